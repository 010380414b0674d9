// SPDX-License-Identifier: Apache-2.0
// Which child a sampled step accepts, and what is left to draw the bonus token from.
//
// Target-only (SpecInfer's multi-step rejection with drafts that were picked, not drawn): siblings
// add up their target probability until the node's coin is below the sum; those before are out.
// With draft probabilities (arXiv 2211.17192) the one child is kept with probability min(1, p / q)
// and the rest is max(p - q, 0). A rule with coins: equal inputs give equal decisions on every
// rank.
#pragma once

#include "common.h"

namespace specfused {

// Rows: target(node, child) and draft(node, child), the probabilities of the child's token. A
// target below 0 says that it cannot be used. Real: float on the device, double on the CPU.
template <class Real, class Rows>
struct SampledAccept {
  const Rows& rows;
  const int64_t* draft_tokens;
  const float* coins;
  Real threshold_single;
  Real threshold_acc;
  bool has_draft_probs;
  int32_t* rejected;  // [width] out: rejected children of the last node
  int num_rejected = 0;
  int likeliest = -1;  // of them
  Real likeliest_prob = 0;
  Real sum = 0;          // of their probabilities
  uint64_t seen = 0;     // a bit of each of their tokens: most children need no look at the list
  bool invalid = false;  // a probability could not be used

  SPECFUSED_HD bool operator()(int node, int child) {
    if (has_draft_probs && num_rejected > 0) return false;  // a chain has no second child
    const uint64_t bit = uint64_t{1} << (static_cast<uint64_t>(draft_tokens[child]) % 64);
    const int known = (seen & bit) != 0 ? num_rejected : 0;
    for (int i = 0; i < known; ++i) {
      if (draft_tokens[rejected[i]] == draft_tokens[child]) return false;  // it was asked before
    }
    const Real p = rows.target(node, child);
    if (!(p >= 0)) {
      invalid = true;
      return false;
    }
    sum += p;
    const Real coin = coins[node];
    bool accepted = p > 0 && (coin < sum / threshold_acc || p >= threshold_single);
    if (has_draft_probs) {
      const Real q = rows.draft(node, child);
      accepted = q > 0 && q <= 1 && coin * q < p;
    }
    if (accepted) {
      num_rejected = 0;
      likeliest = -1;
      likeliest_prob = 0;
      sum = 0;
      seen = 0;
      return true;
    }
    rejected[num_rejected++] = child;
    seen |= bit;
    if (p > likeliest_prob) {
      likeliest = child;
      likeliest_prob = p;
    }
    return false;
  }
};

// A draft probability as it counts in the residual.
template <class Real>
SPECFUSED_HD Real residual(Real p, Real q) {
  const Real removed = q >= 0 && q <= 1 ? q : Real{0};
  return p > removed ? p - removed : Real{0};
}

// A target probability that can be used: neither NaN nor negative nor infinite.
template <class Real>
SPECFUSED_HD bool is_weight(Real p) {
  return p >= 0 && p <= Real{3.4e38f};
}

// Factor from logits to exponents of 2. A temperature that is not above 0 is the limit of small
// ones; the bounds keep 0 * inf out.
SPECFUSED_HD float exponent_scale(float temperature) {
  const float scale = temperature > 0 ? 1.44269504f / temperature : 1e30f;
  return scale < 1e-30f ? 1e-30f : scale > 1e30f ? 1e30f : scale;
}

}  // namespace specfused
