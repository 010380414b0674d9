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

struct CommitArgs {
  const Tensor& draft_tokens;
  const Tensor& seq_lens;
  const OptTensor& logits;
  const OptTensor& targets;
  const OptTensor& retrieve_next_token;
  const OptTensor& retrieve_next_sibling;
  const OptTensor& out_cache_loc;
  const OptTensor& kv_ptrs;
  const OptTensor& kv_row_bytes;
  int64_t num_slots;
  const OptTensor& workspace;
  const Tensor& accept_index;
  const Tensor& num_correct_drafts;
  const Tensor& accept_lens;
  const Tensor& accept_tokens;
  const Tensor& bonus_tokens;
  const Tensor& new_seq_lens;
};

inline CommitParams commit_params(const Checker& c, const CommitArgs& a) {
  Dim bs{"bs"}, width{"num_draft_tokens"}, path{"longest path"};
  const auto array = [&](const char* name, const Tensor& t, ScalarType type, int64_t rank) {
    c.tensor(name, t, {type}, rank);
    c.contiguous(name, t);
    c.size(name, t, 0, bs);
  };
  array("draft_tokens", a.draft_tokens, ScalarType::Long, 2);
  c.size("draft_tokens", a.draft_tokens, 1, width);
  c.require(width.value >= 1 && width.value <= kMaxWindow, "draft_tokens",
            "have 1 to 64 nodes per request", std::to_string(width.value));
  array("seq_lens", a.seq_lens, ScalarType::Long, 1);
  array("accept_index", a.accept_index, ScalarType::Int, 2);
  c.size("accept_index", a.accept_index, 1, path);
  c.require(path.value >= 1, "accept_index", "have room for the root", "0 columns");
  array("accept_tokens", a.accept_tokens, ScalarType::Int, 2);
  c.size("accept_tokens", a.accept_tokens, 1, path);
  array("num_correct_drafts", a.num_correct_drafts, ScalarType::Int, 1);
  array("accept_lens", a.accept_lens, ScalarType::Int, 1);
  array("bonus_tokens", a.bonus_tokens, ScalarType::Int, 1);
  array("new_seq_lens", a.new_seq_lens, ScalarType::Long, 1);

  CommitParams p{};
  c.require(a.logits.has_value() != a.targets.has_value(), "targets",
            "be given if and only if logits are not", a.targets.has_value() ? "both" : "neither");
  Dim nodes{"bs x num_draft_tokens", bs.value * width.value, "draft_tokens"};
  if (a.targets.has_value()) {
    array("targets", *a.targets, ScalarType::Long, 2);
    c.size("targets", *a.targets, 1, width);
    p.targets = data_or_null<int64_t>(a.targets);
  } else {
    c.tensor("logits", *a.logits, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, 2);
    c.last_contiguous("logits", *a.logits);
    c.size("logits", *a.logits, 0, nodes);
    c.require(a.logits->size(1) >= 1 && a.logits->size(1) <= INT32_MAX, "logits",
              "have a vocabulary of 1 to 2^31 - 1 entries", std::to_string(a.logits->size(1)));
    p.logits = a.logits->data_ptr();
    p.stride_logits_row = a.logits->stride(0);
    p.vocab = a.logits->size(1);
    p.logits_dtype = dtype_of(*a.logits);
  }
  c.require(a.retrieve_next_token.has_value() == a.retrieve_next_sibling.has_value(),
            "retrieve_next_sibling", "be given with retrieve_next_token", "one of them");
  if (a.retrieve_next_token.has_value()) {
    array("retrieve_next_token", *a.retrieve_next_token, ScalarType::Long, 2);
    c.size("retrieve_next_token", *a.retrieve_next_token, 1, width);
    array("retrieve_next_sibling", *a.retrieve_next_sibling, ScalarType::Long, 2);
    c.size("retrieve_next_sibling", *a.retrieve_next_sibling, 1, width);
    p.next_token = data_or_null<int64_t>(a.retrieve_next_token);
    p.next_sibling = data_or_null<int64_t>(a.retrieve_next_sibling);
  }
  p.kv = kv_table(c, a.kv_ptrs, a.kv_row_bytes, a.num_slots);
  if (p.kv.num_buffers > 0) {
    c.require(a.out_cache_loc.has_value(), "out_cache_loc", "be given with kv_ptrs", "None");
    c.tensor("out_cache_loc", *a.out_cache_loc, {ScalarType::Long}, 1);
    c.contiguous("out_cache_loc", *a.out_cache_loc);
    c.size("out_cache_loc", *a.out_cache_loc, 0, nodes);
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
  p.bs = static_cast<int32_t>(bs.value);
  p.width = static_cast<int32_t>(width.value);
  p.max_path = static_cast<int32_t>(path.value);
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
