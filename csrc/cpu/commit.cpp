// SPDX-License-Identifier: Apache-2.0
// Commit on the CPU: choice of the target -> walk -> bookkeeping -> KV and hidden rows to the
// front.
#include <vector>

#include "../launch.h"
#include "compact_rows.h"
#include "target_rows.h"

namespace specfused::cpu {
namespace {

struct Decision {
  int num_correct_drafts;
  int64_t bonus;
  bool invalid;
};

Decision decide_greedy(const CommitParams& p, int64_t first, const int64_t* next_token,
                       const int64_t* next_sibling, int32_t* path) {
  int chosen = -1;  // the node of `choice`
  Choice choice{0, true};
  bool invalid = false;
  const auto target = [&](int node) {
    if (p.targets != nullptr) return p.targets[first + node];
    if (node != chosen) {
      chosen = node;
      choice = largest_logit(p, first + node);
      invalid = invalid || !choice.valid;
    }
    return choice.token;
  };
  const GreedyAccept<decltype(target)> accept{p.draft_tokens + first, target};
  const int correct = walk_tree(next_token, next_sibling, p.width, p.max_path, path, accept);
  const int64_t bonus = target(path[correct]);
  return {correct, bonus, invalid};
}

Decision decide_sampled(const CommitParams& p, int request, const int64_t* next_token,
                        const int64_t* next_sibling, int32_t* path) {
  const int64_t first = int64_t{request} * p.width;
  const TargetRows rows(p, request);
  int32_t rejected[kMaxWindow];
  SampledAccept<double, TargetRows> accept{rows,
                                           p.draft_tokens + first,
                                           p.coins + first,
                                           p.threshold_single,
                                           max_of(p.threshold_acc, 1e-9f),
                                           p.draft_probs != nullptr,
                                           rejected};
  const int correct = walk_tree(next_token, next_sibling, p.width, p.max_path, path, accept);
  const Choice bonus = rows.draw(path[correct], accept, p.coins_final[request]);
  return {correct, bonus.token, accept.invalid || !bonus.valid};
}

void write_tokens(const CommitParams& p, int64_t first, const int32_t* tokens, int count) {
  if (p.next_token_ids == nullptr) return;
  for (int j = 0; j < p.width; ++j) {
    const int32_t token = j < count ? tokens[j] : 0;
    if (p.token_ids_are_int32) {
      static_cast<int32_t*>(p.next_token_ids)[first + j] = token;
    } else {
      static_cast<int64_t*>(p.next_token_ids)[first + j] = token;
    }
  }
}

}  // namespace

void commit(const CommitParams& p) {
  std::vector<int32_t> path(p.max_path);
  for (int r = 0; r < p.bs; ++r) {
    const int64_t first = int64_t{r} * p.width;
    const int64_t* next_token = p.next_token == nullptr ? nullptr : p.next_token + first;
    const int64_t* next_sibling = p.next_sibling == nullptr ? nullptr : p.next_sibling + first;
    const Decision decision = p.coins != nullptr
                                  ? decide_sampled(p, r, next_token, next_sibling, path.data())
                                  : decide_greedy(p, first, next_token, next_sibling, path.data());
    const int correct = decision.num_correct_drafts;
    const int64_t committed = p.seq_lens[r];
    int32_t* index = p.accept_index + int64_t{r} * p.max_path;
    int32_t* tokens = p.accept_tokens + int64_t{r} * p.max_path;
    for (int j = 0; j < p.max_path; ++j) {
      index[j] = j <= correct ? static_cast<int32_t>(first + path[j]) : -1;
      tokens[j] = j < correct ? static_cast<int32_t>(p.draft_tokens[first + path[j + 1]]) : -1;
    }
    tokens[correct] = static_cast<int32_t>(decision.bonus);
    p.num_correct_drafts[r] = correct;
    p.accept_lens[r] = correct + 1;
    p.bonus_tokens[r] = tokens[correct];
    p.new_seq_lens[r] = slide(committed, correct + 1);
    write_tokens(p, first, tokens, correct + 1);
    if (p.select_index != nullptr) p.select_index[r] = first + correct;
    if (p.window_ends != nullptr) p.window_ends[r] = committed + p.width;
    if (p.invalid_logits != nullptr) p.invalid_logits[r] = decision.invalid;
    if (p.positions != nullptr) {
      for (int j = 0; j < p.width; ++j) p.positions[first + j] = committed + j;
    }
    if (p.kv.num_buffers > 0) {
      compact_rows(p.kv, p.out_cache_loc + first, index, correct + 1, p.width, first);
    }
    if (p.hidden_states != nullptr) compact_hidden(p, path.data(), correct + 1, first);
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
