// SPDX-License-Identifier: Apache-2.0
// One commit with random inputs, on the host and on the device.
#pragma once

#include <array>
#include <memory>

#include "check.h"

namespace specfused::checks {

// How the target's choice is given; kSampled and what follows have coins.
enum class Source { kTargets, kArgmax, kSampled, kProbs, kProbsAndDraft, kLogitsAndDraft };
constexpr int kNumSources = 6;
inline const char* const kSourceNames[kNumSources] = {"targets", "argmax",      "sampled",
                                                      "probs",   "probs_draft", "logits_draft"};

enum class Tree { kNoLinks, kChain, kRandom, kWild };  // kWild: links that point anywhere

struct CommitShape {
  Source source = Source::kTargets;
  Tree tree = Tree::kNoLinks;
  int bs = 1, width = 1, max_path = 1;
  int64_t vocab = 1;
  DType dtype = DType::kFloat32;  // of logits
  int64_t hidden_bytes = 0;       // of a row of hidden states; 0: none
  bool kv = false;
  bool bad_slots = false;  // some slots outside the pool
  bool bad_rows = false;   // some rows with NaN, with infinities, or with nothing else
  bool ids32 = false;      // next_token_ids in int32
  float threshold_single = 1, threshold_acc = 1;
  int skew = 0;  // elements between the start of an allocation and the first row

  bool sampled() const { return source >= Source::kSampled; }
  bool logits() const {
    return source == Source::kArgmax || source == Source::kSampled ||
           source == Source::kLogitsAndDraft;
  }
  bool draft_probs() const { return source >= Source::kProbsAndDraft; }
  int64_t rows() const { return int64_t{bs} * width; }
  std::string name() const;
};

template <class T>
struct Both {
  Vec<T> host;
  Dev<T> dev;

  void upload() { dev.put(host); }
  // nullptr if it is empty: an argument left out.
  T* at(bool on_device) { return host.empty() ? nullptr : on_device ? dev.data() : host.data(); }
};

enum Out32 { kAcceptIndex, kNumCorrect, kAcceptLens, kAcceptTokens, kBonus, kInvalid, kIds32 };
enum Out64 { kNewSeqLens, kIds64, kSelectIndex, kPositions, kWindowEnds };
inline const char* const kOut32Names[7] = {"accept_index",  "num_correct_drafts", "accept_lens",
                                           "accept_tokens", "bonus_tokens",       "invalid_logits",
                                           "next_token_ids"};
inline const char* const kOut64Names[5] = {"new_seq_lens", "next_token_ids", "select_index",
                                           "positions", "window_ends"};

struct Outputs {
  std::array<Vec<int32_t>, 7> out32;
  std::array<Vec<int64_t>, 5> out64;

  // The first output in which request r differs, or nullptr.
  const char* difference(const Outputs& other, int r, int bs) const;
};

struct CommitCase {
  CommitShape shape;
  Both<int64_t> draft_tokens, targets, next_token, next_sibling, seq_lens, out_cache_loc;
  Both<char> logits, hidden_states;
  Both<float> probs, draft_probs, temperatures, coins, coins_final;
  std::vector<std::unique_ptr<Both<char>>> kv;

  CommitCase(const CommitShape& shape, Random& random);

  // Outputs, KV and hidden states as before a launch, on the device.
  void reset_device();
  void reset_host_outputs();
  CommitParams params(bool on_device);
  KvTable kv_table(bool on_device);
  Outputs outputs(bool on_device) const;

 private:
  void draw_tree(Random& random);
  void draw_rows(Random& random);
  void draw_draft_probs(Random& random);
  void draw_kv(Random& random);
  void put_logits(const Vec<float>& rows);
  void put_probs(const Vec<float>& rows);

  Both<int64_t> kv_ptrs_, kv_row_bytes_, kv_host_ptrs_;
  std::array<Both<int32_t>, 7> out32_;
  std::array<Both<int64_t>, 5> out64_;
  Dev<char> workspace_;
  int64_t num_slots_ = 0, stride_logits_ = 0, stride_hidden_ = 0;
};

void time_commits(const Options& options, Groups& groups);  // commit_bench.cu

}  // namespace specfused::checks
