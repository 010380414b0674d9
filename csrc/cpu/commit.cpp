// SPDX-License-Identifier: Apache-2.0
// Commit on the CPU: argmax or given targets -> greedy walk -> bookkeeping -> KV to the front.
#include <cmath>
#include <vector>

#include "../launch.h"
#include "compact_rows.h"
#include "element.h"

namespace specfused::cpu {
namespace {

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

}  // namespace

void commit(const CommitParams& p) {
  std::vector<int64_t> computed;
  const int64_t rows = int64_t{p.bs} * p.width;
  if (p.targets == nullptr) {
    computed.resize(rows);
    with_element(p.logits_dtype, [&](auto element) {
      using T = decltype(element);
      for (int64_t row = 0; row < rows; ++row) {
        computed[row] =
            argmax(static_cast<const T*>(p.logits) + row * p.stride_logits_row, p.vocab);
      }
    });
  }
  const int64_t* all_targets = p.targets != nullptr ? p.targets : computed.data();
  std::vector<int32_t> path(p.max_path);
  for (int r = 0; r < p.bs; ++r) {
    const int64_t first = int64_t{r} * p.width;
    const int64_t* targets = all_targets + first;
    const int64_t* next_token = p.next_token == nullptr ? nullptr : p.next_token + first;
    const int64_t* next_sibling = p.next_sibling == nullptr ? nullptr : p.next_sibling + first;
    const int correct = walk_greedy(next_token, next_sibling, p.draft_tokens + first, targets,
                                    p.width, p.max_path, path.data());
    int32_t* index = p.accept_index + int64_t{r} * p.max_path;
    int32_t* tokens = p.accept_tokens + int64_t{r} * p.max_path;
    for (int j = 0; j < p.max_path; ++j) {
      index[j] = j <= correct ? static_cast<int32_t>(first + path[j]) : -1;
      tokens[j] = j <= correct ? static_cast<int32_t>(targets[path[j]]) : -1;
    }
    p.num_correct_drafts[r] = correct;
    p.accept_lens[r] = correct + 1;
    p.bonus_tokens[r] = tokens[correct];
    p.new_seq_lens[r] = slide(p.seq_lens[r], correct + 1);
    if (p.kv.num_buffers > 0) {
      compact_rows(p.kv, p.out_cache_loc + first, index, correct + 1, p.width, first);
    }
  }
}

void compact(const CompactParams& p) {
  for (int r = 0; r < p.bs; ++r) {
    const int64_t first = int64_t{r} * p.width;
    const int count = min_of(p.accept_lens[r], p.max_path);
    compact_rows(p.kv, p.out_cache_loc + first, p.accept_index + int64_t{r} * p.max_path, count,
                 p.width, first);
  }
}

}  // namespace specfused::cpu
