// SPDX-License-Identifier: Apache-2.0
// Target and draft distributions of one request, in double: rows are read when they are visited.
#pragma once

#include <cmath>
#include <limits>

#include "../params.h"
#include "../sampling.h"
#include "element.h"

namespace specfused::cpu {

// Index of the largest logit; the lowest of equals; a NaN counts as the largest, as in
// torch.argmax.
template <class T>
int64_t argmax(const T* logits, int64_t vocab) {
  int64_t best = 0;
  float best_value = float(logits[0]);
  for (int64_t i = 1; i < vocab && !std::isnan(best_value); ++i) {
    const float value = float(logits[i]);
    if (value > best_value || std::isnan(value)) {
      best = i;
      best_value = value;
    }
  }
  return best;
}

struct Choice {
  int64_t token;
  bool valid;  // the row has a largest value and it is finite
};

inline Choice largest_logit(const CommitParams& p, int64_t row) {
  return with_element(p.logits_dtype, [&](auto element) {
    const auto* logits =
        static_cast<const decltype(element)*>(p.logits) + row * p.stride_logits_row;
    const int64_t token = argmax(logits, p.vocab);
    return Choice{token, std::isfinite(float(logits[token]))};
  });
}

class TargetRows {
 public:
  TargetRows(const CommitParams& p, int request)
      : p_(p), request_(request), first_(int64_t{request} * p.width) {
    if (p.temperatures != nullptr) scale_ = exponent_scale(p.temperatures[request]);
  }

  // Of the child's token in the row of `node`; -1: the row cannot be used.
  double target(int node, int child) const {
    const int64_t token = p_.draft_tokens[first_ + child];
    visit(node);
    if (!valid_) return -1;
    return token >= 0 && token < p_.vocab ? prob(token) : 0;
  }

  double draft(int node, int child) const {
    const int64_t token = p_.draft_tokens[first_ + child];
    return token >= 0 && token < p_.vocab ? double{draft_row(node)[token]} : 0;
  }

  // The bonus token: from the row of `node`, without what the rejected children stand for. coin in
  // [0, 1) goes over the residual in the order of the vocabulary.
  template <class Accept>
  Choice draw(int node, const Accept& accept, double coin) const {
    visit(node);
    if (!valid_) return {argmax_, false};
    const bool usable = p_.logits != nullptr || probs_are_usable();
    const float* draft =
        accept.has_draft_probs && accept.num_rejected > 0 ? draft_row(node) : nullptr;
    double total = 0;
    for (int64_t i = 0; i < p_.vocab; ++i) total += weight(i, draft, accept);
    const double limit = coin * total;
    double sum = 0;
    int64_t last = -1;
    for (int64_t i = 0; i < p_.vocab; ++i) {
      const double w = weight(i, draft, accept);
      if (!(w > 0)) continue;
      last = i;
      sum += w;
      if (sum > limit) break;
    }
    // No mass: the likeliest of those that took it all, so the token has a probability above 0.
    if (last < 0 && accept.likeliest >= 0) last = accept.draft_tokens[accept.likeliest];
    return {last >= 0 ? last : argmax_, usable};
  }

 private:
  const float* probs_row() const {
    return p_.target_probs + (first_ + node_) * p_.stride_target_probs_row;
  }

  const float* draft_row(int node) const {
    return p_.draft_probs + request_ * p_.stride_draft_probs_request +
           node * p_.stride_draft_probs_row;
  }

  // exp((x - max) / temperature) in base 2.
  template <class T>
  double power(T logit) const {
    return std::exp2((double{float(logit)} - max_) * scale_);
  }

  void visit(int node) const {
    if (node == node_) return;
    node_ = node;
    valid_ = true;
    if (p_.logits == nullptr) return;
    const int64_t row = first_ + node;
    const Choice largest = largest_logit(p_, row);
    argmax_ = largest.token;
    valid_ = largest.valid;
    with_element(p_.logits_dtype, [&](auto element) {
      const auto* logits =
          static_cast<const decltype(element)*>(p_.logits) + row * p_.stride_logits_row;
      max_ = float(logits[argmax_]);
      sum_ = 0;
      if (valid_) {
        for (int64_t i = 0; i < p_.vocab; ++i) sum_ += power(logits[i]);
      }
    });
  }

  double prob(int64_t token) const {
    if (p_.logits == nullptr) {
      const double x = probs_row()[token];
      return is_weight(x) ? x : -1;
    }
    return with_element(p_.logits_dtype, [&](auto element) {
      const auto* logits = static_cast<const decltype(element)*>(p_.logits);
      return power(logits[(first_ + node_) * p_.stride_logits_row + token]) / sum_;
    });
  }

  bool probs_are_usable() const {
    bool usable = true;
    for (int64_t i = 0; i < p_.vocab; ++i) usable = usable && is_weight(probs_row()[i]);
    return usable;
  }

  template <class Accept>
  double weight(int64_t token, const float* draft, const Accept& accept) const {
    const double p = max_of(prob(token), 0.0);
    if (draft != nullptr) return residual(p, double{draft[token]});
    if (accept.has_draft_probs) return p;
    for (int i = 0; i < accept.num_rejected; ++i) {
      if (accept.draft_tokens[accept.rejected[i]] == token) return 0;
    }
    return p;
  }

  const CommitParams& p_;
  int request_;
  int64_t first_;
  double scale_ = 1;
  // The row visited last.
  mutable int node_ = -1;
  mutable bool valid_ = true;
  mutable int64_t argmax_ = 0;
  mutable double max_ = 0;
  mutable double sum_ = 0;
};

}  // namespace specfused::cpu
