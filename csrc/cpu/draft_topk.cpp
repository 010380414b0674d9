// SPDX-License-Identifier: Apache-2.0
// The likeliest tokens of each row, in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../launch.h"
#include "element.h"

namespace specfused::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Values of a row, NaN as -infinity; a row that is not there has nothing but -infinity.
template <class T>
void read_row(const DraftTopkParams& p, int64_t i, std::vector<float>& values) {
  const int64_t row = p.rows == nullptr ? i : p.rows[i];
  const bool there = row >= 0 && row < p.num_logits_rows;
  const T* logits = static_cast<const T*>(p.logits) + (there ? row : 0) * p.stride_logits_row;
  for (int64_t t = 0; t < p.vocab; ++t) {
    const float value = there ? float(logits[t]) : -kInfinity;
    values[t] = value == value ? value : -kInfinity;
  }
}

// Of the largest. Infinite ones: the first is certain, the others are impossible.
double probability(const std::vector<float>& values, float value, float largest, bool first) {
  if (std::isinf(largest)) return largest > 0 && first ? 1 : 0;
  double sum = 0;
  for (const float x : values) sum += std::exp(double{x} - largest);
  return std::exp(double{value} - largest) / sum;
}

}  // namespace

void draft_topk(const DraftTopkParams& p) {
  with_element(p.logits_dtype, [&](auto element) {
    std::vector<float> values(p.vocab);
    std::vector<int64_t> order(p.vocab);
    for (int64_t i = 0; i < p.num_rows; ++i) {
      read_row<decltype(element)>(p, i, values);
      for (int64_t t = 0; t < p.vocab; ++t) order[t] = t;
      std::partial_sort(order.begin(), order.begin() + p.topk, order.end(),
                        [&](int64_t a, int64_t b) {
                          return values[a] != values[b] ? values[a] > values[b] : a < b;
                        });
      for (int k = 0; k < p.topk; ++k) {
        const int64_t token = order[k];
        p.topk_index[i * p.topk + k] = p.token_map == nullptr ? token : p.token_map[token];
        if (p.topk_p == nullptr) continue;
        p.topk_p[i * p.topk + k] =
            static_cast<float>(probability(values, values[token], values[order[0]], k == 0));
      }
    }
  });
}

}  // namespace specfused::cpu
