// SPDX-License-Identifier: Apache-2.0
// One query row against one request's KV: what both attention variants are made of. Sums are in
// double, so this is the reference that the GPU kernels are tested against.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "../params.h"
#include "element.h"

namespace specfused::cpu {

struct Scratch {
  std::vector<float> q;
  std::vector<double> acc;
  std::vector<double> scores;
  std::vector<int64_t> slots;
};

// out row = softmax(sm_scale * q K^T) V over the committed rows and the columns of `word`.
// A row that sees nothing is 0 with LSE -inf. Rows it may not see are never loaded.
template <class T>
void attend_row(const AttnParams& p, const KvWindow& window, TreeWord word, int64_t row, int head,
                Scratch& s) {
  const int dim = p.head_dim;
  const int kv_head = head / (p.num_q_heads / p.num_kv_heads);
  const T* k = static_cast<const T*>(p.k_cache) + kv_head * p.stride_k_head;
  const T* v = static_cast<const T*>(p.v_cache) + kv_head * p.stride_v_head;
  const T* q = static_cast<const T*>(p.q) + row * p.stride_q_row + head * p.stride_q_head;
  T* out = static_cast<T*>(p.out) + row * p.stride_out_row + head * p.stride_out_head;

  s.slots.clear();
  for (int64_t t = 0; t < window.committed; ++t) s.slots.push_back(window.slot(t));
  for (int c = 0; c < window.width; ++c) {
    if (sees(word, c)) s.slots.push_back(window.slot(window.committed + c));
  }

  s.q.resize(dim);
  for (int d = 0; d < dim; ++d) s.q[d] = float(q[d]);
  s.scores.resize(s.slots.size());
  double max = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const T* key = k + s.slots[i] * p.stride_k_slot;
    double dot = 0;
    for (int d = 0; d < dim; ++d) dot += double{s.q[d]} * double{float(key[d])};
    s.scores[i] = dot * p.sm_scale;
    max = std::fmax(max, s.scores[i]);
  }

  s.acc.assign(dim, 0.0);
  double sum = 0;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const T* value = v + s.slots[i] * p.stride_v_slot;
    const double weight = std::exp(s.scores[i] - max);
    sum += weight;
    for (int d = 0; d < dim; ++d) s.acc[d] += weight * double{float(value[d])};
  }
  const bool empty = s.slots.empty();
  for (int d = 0; d < dim; ++d) out[d] = T::round(empty ? 0.0f : float(s.acc[d] / sum));
  if (p.lse != nullptr) {
    p.lse[row * p.num_q_heads + head] =
        empty ? -std::numeric_limits<float>::infinity() : static_cast<float>(max + std::log(sum));
  }
}

}  // namespace specfused::cpu
