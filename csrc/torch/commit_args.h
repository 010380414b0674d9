// SPDX-License-Identifier: Apache-2.0
// commit and compact: checks their tensors and fills the params, for every device.
#pragma once

#include "attn_args.h"

namespace specfused::ops {

inline KvTable kv_table(const Checker& c, const OptTensor& kv_ptrs, const OptTensor& kv_row_bytes,
                        int64_t num_slots) {
  KvTable kv{};
  c.require(kv_ptrs.has_value() == kv_row_bytes.has_value(), "kv_row_bytes",
            "be given with kv_ptrs", kv_row_bytes.has_value() ? "kv_row_bytes alone" : "None");
  if (!kv_ptrs.has_value()) return kv;
  Dim buffers{"K and V buffers"};
  c.tensor("kv_ptrs", *kv_ptrs, {ScalarType::Long}, 1);
  c.contiguous("kv_ptrs", *kv_ptrs);
  c.size("kv_ptrs", *kv_ptrs, 0, buffers);
  c.tensor("kv_row_bytes", *kv_row_bytes, {ScalarType::Long}, 1);
  c.contiguous("kv_row_bytes", *kv_row_bytes);
  c.size("kv_row_bytes", *kv_row_bytes, 0, buffers);
  c.require(num_slots > 0, "num_slots", "be the slots of every buffer", std::to_string(num_slots));
  kv.ptrs = data_or_null<int64_t>(kv_ptrs);
  kv.row_bytes = data_or_null<int64_t>(kv_row_bytes);
  kv.num_buffers = static_cast<int32_t>(buffers.value);
  kv.num_slots = num_slots;
  return kv;
}

struct CommitArgs {  // in the order of the schema
  const Tensor& draft_tokens;
  const Tensor& seq_lens;
  const Tensor& accept_index;
  const Tensor& num_correct_drafts;
  const Tensor& accept_lens;
  const Tensor& accept_tokens;
  const Tensor& bonus_tokens;
  const Tensor& new_seq_lens;
  const OptTensor& logits;
  const OptTensor& targets;
  const OptTensor& retrieve_next_token;
  const OptTensor& retrieve_next_sibling;
  const OptTensor& out_cache_loc;
  const OptTensor& kv_ptrs;
  const OptTensor& kv_row_bytes;
  int64_t num_slots;
  const OptTensor& workspace;
  const OptTensor& hidden_states;
  const OptTensor& next_token_ids;
  const OptTensor& select_index;
  const OptTensor& positions;
  const OptTensor& invalid_logits;
  const OptTensor& temperatures;
  const OptTensor& target_probs;
  const OptTensor& draft_probs;
  const OptTensor& coins;
  const OptTensor& coins_final;
  double threshold_single;
  double threshold_acc;
  const OptTensor& window_ends;
};

// Sizes that the arguments of a commit share.
struct CommitDims {
  Dim bs{"bs"};
  Dim width{"num_draft_tokens"};
  Dim path{"longest path"};
  Dim nodes{"bs x num_draft_tokens"};
  Dim vocab{"vocab"};
};

inline void array(const Checker& c, const char* name, const Tensor& t,
                  std::initializer_list<ScalarType> types, std::initializer_list<Dim*> sizes) {
  c.tensor(name, t, types, static_cast<int64_t>(sizes.size()));
  c.contiguous(name, t);
  int64_t at = 0;
  for (Dim* size : sizes) c.size(name, t, at++, *size);
}

inline void check_vocab(const Checker& c, const char* name, const Tensor& t) {
  const int64_t vocab = t.size(t.dim() - 1);
  c.require(vocab >= 1 && vocab <= INT32_MAX, name, "have a vocabulary of 1 to 2^31 - 1 entries",
            std::to_string(vocab));
}

// What the target is asked by: logits, its choices, or probabilities.
inline void add_choice(const Checker& c, const CommitArgs& a, CommitDims& d, CommitParams& p) {
  if (a.target_probs.has_value()) {
    c.require(!a.logits.has_value() && !a.targets.has_value(), "target_probs",
              "be given without logits and targets", a.logits.has_value() ? "logits" : "targets");
    const Tensor& t = *a.target_probs;
    c.tensor("target_probs", t, {ScalarType::Float}, 2);
    c.last_contiguous("target_probs", t);
    c.size("target_probs", t, 0, d.nodes);
    check_vocab(c, "target_probs", t);
    c.size("target_probs", t, 1, d.vocab);
    p.target_probs = static_cast<const float*>(t.data_ptr());
    p.stride_target_probs_row = t.stride(0);
    p.vocab = t.size(1);
    return;
  }
  c.require(a.logits.has_value() != a.targets.has_value(), "targets",
            "be given if and only if logits are not", a.targets.has_value() ? "both" : "neither");
  if (a.targets.has_value()) {
    array(c, "targets", *a.targets, {ScalarType::Long}, {&d.bs, &d.width});
    p.targets = data_or_null<int64_t>(a.targets);
    return;
  }
  const Tensor& t = *a.logits;
  c.tensor("logits", t, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, 2);
  c.last_contiguous("logits", t);
  c.size("logits", t, 0, d.nodes);
  check_vocab(c, "logits", t);
  c.size("logits", t, 1, d.vocab);
  p.logits = t.data_ptr();
  p.stride_logits_row = t.stride(0);
  p.vocab = t.size(1);
  p.logits_dtype = dtype_of(t);
}

inline void add_sampling(const Checker& c, const CommitArgs& a, CommitDims& d, CommitParams& p) {
  const bool sampled = a.coins.has_value();
  c.require(sampled == a.coins_final.has_value(), "coins_final", "be given with coins",
            sampled ? "None" : "coins_final alone");
  c.require(sampled || !a.target_probs.has_value(), "coins", "be given with target_probs", "None");
  c.require(sampled || !a.draft_probs.has_value(), "coins", "be given with draft_probs", "None");
  c.require(!sampled || !a.targets.has_value(), "targets", "be None with coins", "a tensor");
  const bool scaled = sampled && a.logits.has_value();
  c.require(a.temperatures.has_value() == scaled, "temperatures",
            "be given if and only if logits and coins are",
            scaled ? "None" : "temperatures without one of them");
  const auto threshold = [&](const char* name, double value) {
    c.require(value >= 0, name, "be at least 0", std::to_string(value));
    return static_cast<float>(value);
  };
  p.threshold_single = threshold("threshold_single", a.threshold_single);
  p.threshold_acc = threshold("threshold_acc", a.threshold_acc);
  if (!sampled) return;
  array(c, "coins", *a.coins, {ScalarType::Float}, {&d.bs, &d.width});
  array(c, "coins_final", *a.coins_final, {ScalarType::Float}, {&d.bs});
  p.coins = data_or_null<float>(a.coins);
  p.coins_final = data_or_null<float>(a.coins_final);
  if (scaled) {
    array(c, "temperatures", *a.temperatures, {ScalarType::Float}, {&d.bs});
    p.temperatures = data_or_null<float>(a.temperatures);
  }
  if (a.draft_probs.has_value()) {
    const Tensor& t = *a.draft_probs;
    c.tensor("draft_probs", t, {ScalarType::Float}, 3);
    c.last_contiguous("draft_probs", t);
    c.size("draft_probs", t, 0, d.bs);
    c.require(t.size(1) >= d.width.value - 1, "draft_probs",
              "have a row for each node but the last (" + std::to_string(d.width.value - 1) + ")",
              std::to_string(t.size(1)));
    c.size("draft_probs", t, 2, d.vocab);
    p.draft_probs = static_cast<const float*>(t.data_ptr());
    p.stride_draft_probs_request = t.stride(0);
    p.stride_draft_probs_row = t.stride(1);
  }
}

inline void add_outputs(const Checker& c, const CommitArgs& a, CommitDims& d, CommitParams& p) {
  const auto given = [&](const char* name, const OptTensor& t,
                         std::initializer_list<ScalarType> types, Dim& size) -> void* {
    if (!t.has_value()) return nullptr;
    array(c, name, *t, types, {&size});
    return t->data_ptr();
  };
  p.next_token_ids =
      given("next_token_ids", a.next_token_ids, {ScalarType::Long, ScalarType::Int}, d.nodes);
  p.token_ids_are_int32 =
      a.next_token_ids.has_value() && a.next_token_ids->scalar_type() == ScalarType::Int;
  const auto longs = {ScalarType::Long};
  p.select_index = static_cast<int64_t*>(given("select_index", a.select_index, longs, d.bs));
  p.positions = static_cast<int64_t*>(given("positions", a.positions, longs, d.nodes));
  p.window_ends = static_cast<int64_t*>(given("window_ends", a.window_ends, longs, d.bs));
  p.invalid_logits =
      static_cast<int32_t*>(given("invalid_logits", a.invalid_logits, {ScalarType::Int}, d.bs));
  if (a.hidden_states.has_value()) {
    const Tensor& t = *a.hidden_states;
    c.tensor("hidden_states", t, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, 2);
    c.last_contiguous("hidden_states", t);
    c.not_expanded("hidden_states", t);
    c.size("hidden_states", t, 0, d.nodes);
    const auto element = static_cast<int64_t>(t.element_size());
    p.hidden_states = t.size(1) > 0 ? static_cast<char*>(t.data_ptr()) : nullptr;
    p.hidden_row_bytes = t.size(1) * element;
    p.stride_hidden_bytes = t.stride(0) * element;
  }
}

inline CommitParams commit_params(const Checker& c, const CommitArgs& a) {
  CommitDims d;
  CommitParams p{};
  const auto longs = {ScalarType::Long};
  const auto ints = {ScalarType::Int};
  array(c, "draft_tokens", a.draft_tokens, longs, {&d.bs, &d.width});
  const int64_t width = d.width.value;
  c.require(width >= 1 && width <= kMaxWindow, "draft_tokens", "have 1 to 64 nodes per request",
            std::to_string(width));
  d.nodes.value = d.bs.value * width;
  d.nodes.bound_by = "draft_tokens";
  array(c, "seq_lens", a.seq_lens, longs, {&d.bs});
  array(c, "accept_index", a.accept_index, ints, {&d.bs, &d.path});
  c.require(d.path.value >= 1, "accept_index", "have room for the root", "0 columns");
  array(c, "accept_tokens", a.accept_tokens, ints, {&d.bs, &d.path});
  array(c, "num_correct_drafts", a.num_correct_drafts, ints, {&d.bs});
  array(c, "accept_lens", a.accept_lens, ints, {&d.bs});
  array(c, "bonus_tokens", a.bonus_tokens, ints, {&d.bs});
  array(c, "new_seq_lens", a.new_seq_lens, longs, {&d.bs});
  add_choice(c, a, d, p);
  add_sampling(c, a, d, p);
  add_outputs(c, a, d, p);
  c.require(a.retrieve_next_token.has_value() == a.retrieve_next_sibling.has_value(),
            "retrieve_next_sibling", "be given with retrieve_next_token", "one of them");
  if (a.retrieve_next_token.has_value()) {
    array(c, "retrieve_next_token", *a.retrieve_next_token, longs, {&d.bs, &d.width});
    array(c, "retrieve_next_sibling", *a.retrieve_next_sibling, longs, {&d.bs, &d.width});
    p.next_token = data_or_null<int64_t>(a.retrieve_next_token);
    p.next_sibling = data_or_null<int64_t>(a.retrieve_next_sibling);
  }
  p.kv = kv_table(c, a.kv_ptrs, a.kv_row_bytes, a.num_slots);
  if (p.kv.num_buffers > 0) {
    c.require(a.out_cache_loc.has_value(), "out_cache_loc", "be given with kv_ptrs", "None");
    array(c, "out_cache_loc", *a.out_cache_loc, longs, {&d.nodes});
    p.out_cache_loc = data_or_null<int64_t>(a.out_cache_loc);
  }
  if (a.workspace.has_value()) {
    c.tensor("workspace", *a.workspace, {ScalarType::Byte}, 1);
    c.contiguous("workspace", *a.workspace);
    p.workspace = a.workspace->data_ptr();
  }
  p.draft_tokens = static_cast<const int64_t*>(a.draft_tokens.data_ptr());
  p.seq_lens = static_cast<const int64_t*>(a.seq_lens.data_ptr());
  p.accept_index = static_cast<int32_t*>(a.accept_index.data_ptr());
  p.num_correct_drafts = static_cast<int32_t*>(a.num_correct_drafts.data_ptr());
  p.accept_lens = static_cast<int32_t*>(a.accept_lens.data_ptr());
  p.accept_tokens = static_cast<int32_t*>(a.accept_tokens.data_ptr());
  p.bonus_tokens = static_cast<int32_t*>(a.bonus_tokens.data_ptr());
  p.new_seq_lens = static_cast<int64_t*>(a.new_seq_lens.data_ptr());
  p.bs = static_cast<int32_t>(d.bs.value);
  p.width = static_cast<int32_t>(width);
  p.max_path = static_cast<int32_t>(d.path.value);
  return p;
}

inline CompactParams compact_params(const Checker& c, const Tensor& kv_ptrs,
                                    const Tensor& kv_row_bytes, int64_t num_slots,
                                    const Tensor& out_cache_loc, const Tensor& accept_index,
                                    const Tensor& accept_lens) {
  Dim bs{"bs"}, path{"longest path"};
  c.tensor("accept_index", accept_index, {ScalarType::Int}, 2);
  c.contiguous("accept_index", accept_index);
  c.size("accept_index", accept_index, 0, bs);
  c.size("accept_index", accept_index, 1, path);
  c.tensor("accept_lens", accept_lens, {ScalarType::Int}, 1);
  c.contiguous("accept_lens", accept_lens);
  c.size("accept_lens", accept_lens, 0, bs);
  c.tensor("out_cache_loc", out_cache_loc, {ScalarType::Long}, 2);
  c.contiguous("out_cache_loc", out_cache_loc);
  c.size("out_cache_loc", out_cache_loc, 0, bs);
  const int64_t width = out_cache_loc.size(1);
  c.require(width >= 1 && width <= kMaxWindow, "out_cache_loc", "have 1 to 64 slots per request",
            std::to_string(width));
  CompactParams p{};
  p.kv = kv_table(c, kv_ptrs, kv_row_bytes, num_slots);
  p.out_cache_loc = static_cast<const int64_t*>(out_cache_loc.data_ptr());
  p.accept_index = static_cast<const int32_t*>(accept_index.data_ptr());
  p.accept_lens = static_cast<const int32_t*>(accept_lens.data_ptr());
  p.bs = static_cast<int32_t>(bs.value);
  p.width = static_cast<int32_t>(width);
  p.max_path = static_cast<int32_t>(path.value);
  return p;
}

}  // namespace specfused::ops
