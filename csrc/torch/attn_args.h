// SPDX-License-Identifier: Apache-2.0
// verify_attn and decode_attn: checks their tensors and fills AttnParams, for every device.
#pragma once

#include <cmath>

#include "../params.h"
#include "../plan.h"
#include "checks.h"

namespace specfused::ops {

using OptTensor = std::optional<Tensor>;

// What both variants take. The spec variant adds tree_words and window_slots.
struct AttnArgs {
  const Tensor& q;
  const Tensor& k_cache;
  const Tensor& v_cache;
  const Tensor& req_to_token;
  const Tensor& req_pool_indices;
  const Tensor& seq_lens;
  const Tensor& out;
  const OptTensor& lse;
  const OptTensor& k_new;
  const OptTensor& v_new;
  const OptTensor& out_cache_loc;
  const OptTensor& plan;
  const OptTensor& workspace;
  int64_t seq_lens_offset;
  std::optional<double> sm_scale;
};

// Features that the schema names and no kernel has yet: refused by name, never ignored.
inline void refuse_features(const char* op, const OptTensor& sinks, int64_t window, double softcap,
                            std::optional<double> k_scale, std::optional<double> v_scale) {
  if (sinks.has_value()) fail(op, ": sinks must be None (attention sinks), got a tensor");
  if (window != -1) fail(op, ": window must be -1 (sliding window attention), got ", window);
  if (softcap != 0.0) fail(op, ": softcap must be 0 (logit soft cap), got ", softcap);
  const auto unscaled = [&](const char* arg, const std::optional<double>& scale) {
    if (scale.has_value() && *scale != 1.0) {
      fail(op, ": ", arg, " must be None or 1 (scaled fp8 KV), got ", *scale);
    }
  };
  unscaled("k_scale", k_scale);
  unscaled("v_scale", v_scale);
}

// num_rows: query rows per request, or -1: q.size(0) / bs.
inline AttnParams attn_params(const Checker& c, const AttnArgs& a, int64_t num_rows) {
  const ScalarType element = a.q.scalar_type();
  Dim bs{"bs"}, rows{"rows of q"}, q_heads{"num_q_heads"}, kv_heads{"num_kv_heads"};
  Dim head_dim{"head_dim"}, slots{"num_slots"};

  c.tensor("q", a.q, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float}, 3);
  c.last_contiguous("q", a.q);
  c.size("q", a.q, 0, rows);
  c.size("q", a.q, 1, q_heads);
  c.size("q", a.q, 2, head_dim);
  const auto cache = [&](const char* name, const Tensor& t) {
    c.tensor(name, t, {element}, 3);
    c.last_contiguous(name, t);
    c.size(name, t, 0, slots);
    c.size(name, t, 1, kv_heads);
    c.size(name, t, 2, head_dim);
  };
  cache("k_cache", a.k_cache);
  cache("v_cache", a.v_cache);
  c.require(kv_heads.value > 0 && q_heads.value % kv_heads.value == 0, "q",
            "have a multiple of num_kv_heads = " + std::to_string(kv_heads.value) + " heads",
            std::to_string(q_heads.value));
  c.require(head_dim.value > 0, "q", "have a head_dim of at least 1", "0");
  c.require(slots.value > 0, "k_cache", "have at least one slot", "0");

  c.tensor("req_pool_indices", a.req_pool_indices, {ScalarType::Long}, 1);
  c.contiguous("req_pool_indices", a.req_pool_indices);
  c.size("req_pool_indices", a.req_pool_indices, 0, bs);
  c.tensor("seq_lens", a.seq_lens, {ScalarType::Long}, 1);
  c.contiguous("seq_lens", a.seq_lens);
  c.size("seq_lens", a.seq_lens, 0, bs);
  c.tensor("req_to_token", a.req_to_token, {ScalarType::Int}, 2);
  c.last_contiguous("req_to_token", a.req_to_token);
  c.require(a.req_to_token.size(1) <= kMaxContext, "req_to_token",
            "have at most 2^23 columns (context length)", std::to_string(a.req_to_token.size(1)));
  c.require(a.seq_lens_offset >= -kMaxContext && a.seq_lens_offset <= kMaxContext,
            "seq_lens_offset", "be a small number of rows", std::to_string(a.seq_lens_offset));
  if (num_rows < 0) {
    c.require(bs.value == 0 || (rows.value % bs.value == 0 && rows.value > 0), "q",
              "have a multiple of bs = " + std::to_string(bs.value) + " rows",
              std::to_string(rows.value));
    num_rows = bs.value == 0 ? 1 : rows.value / bs.value;
  }
  c.require(rows.value == bs.value * num_rows, "q",
            "have " + std::to_string(bs.value * num_rows) + " rows (bs x rows per request)",
            std::to_string(rows.value));
  c.require(num_rows <= kMaxWindow, "q", "have at most 64 rows per request",
            std::to_string(num_rows));

  c.tensor("out", a.out, {element}, 3);
  c.last_contiguous("out", a.out);
  c.not_expanded("out", a.out);
  c.size("out", a.out, 0, rows);
  c.size("out", a.out, 1, q_heads);
  c.size("out", a.out, 2, head_dim);
  if (a.lse.has_value()) {
    c.tensor("lse", *a.lse, {ScalarType::Float}, 2);
    c.contiguous("lse", *a.lse);
    c.size("lse", *a.lse, 0, rows);
    c.size("lse", *a.lse, 1, q_heads);
  }
  const auto fresh = [&](const char* name, const Tensor& t) {
    c.tensor(name, t, {element}, 3);
    c.last_contiguous(name, t);
    c.size(name, t, 0, rows);
    c.size(name, t, 1, kv_heads);
    c.size(name, t, 2, head_dim);
  };
  c.require(a.k_new.has_value() == a.v_new.has_value(), "v_new", "be given with k_new",
            a.v_new.has_value() ? "v_new alone" : "k_new alone");
  if (a.k_new.has_value()) {
    fresh("k_new", *a.k_new);
    fresh("v_new", *a.v_new);
    c.not_expanded("k_cache", a.k_cache);
    c.not_expanded("v_cache", a.v_cache);
    c.require(a.out_cache_loc.has_value(), "out_cache_loc", "be given with k_new", "None");
    c.tensor("out_cache_loc", *a.out_cache_loc, {ScalarType::Long}, 1);
    c.size("out_cache_loc", *a.out_cache_loc, 0, rows);
  }

  AttnParams p{};
  if (a.plan.has_value()) {
    c.tensor("plan", *a.plan, {ScalarType::Int}, 1);
    c.contiguous("plan", *a.plan);
    p.num_ctas = static_cast<int32_t>(a.plan->size(0) - plan_numel(bs.value, 0));
    c.require(p.num_ctas > 0, "plan",
              "have more than " + std::to_string(plan_numel(bs.value, 0)) +
                  " entries (plan_numel(bs, num_ctas))",
              std::to_string(a.plan->size(0)));
  }
  if (a.workspace.has_value()) {
    c.tensor("workspace", *a.workspace, {ScalarType::Byte}, 1);
    c.contiguous("workspace", *a.workspace);
  }

  p.q = a.q.data_ptr();
  p.k_cache = a.k_cache.data_ptr();
  p.v_cache = a.v_cache.data_ptr();
  p.out = a.out.data_ptr();
  p.lse = const_cast<float*>(data_or_null<float>(a.lse));
  p.plan = data_or_null<int32_t>(a.plan);
  p.workspace = const_cast<uint8_t*>(data_or_null<uint8_t>(a.workspace));
  p.table.req_to_token = static_cast<const int32_t*>(a.req_to_token.data_ptr());
  p.table.req_pool_indices = static_cast<const int64_t*>(a.req_pool_indices.data_ptr());
  p.table.seq_lens = static_cast<const int64_t*>(a.seq_lens.data_ptr());
  p.table.stride_req_to_token = a.req_to_token.stride(0);
  p.table.num_reqs = a.req_to_token.size(0);
  p.table.max_context = a.req_to_token.size(1);
  p.table.num_slots = slots.value;
  p.table.seq_lens_offset = a.seq_lens_offset;
  p.table.width = static_cast<int32_t>(num_rows);
  p.stride_q_row = a.q.stride(0);
  p.stride_q_head = a.q.stride(1);
  p.stride_k_slot = a.k_cache.stride(0);
  p.stride_k_head = a.k_cache.stride(1);
  p.stride_v_slot = a.v_cache.stride(0);
  p.stride_v_head = a.v_cache.stride(1);
  p.stride_out_row = a.out.stride(0);
  p.stride_out_head = a.out.stride(1);
  if (a.k_new.has_value()) {
    p.k_new = a.k_new->data_ptr();
    p.v_new = a.v_new->data_ptr();
    p.out_cache_loc = data_or_null<int64_t>(a.out_cache_loc);
    p.stride_out_cache_loc = a.out_cache_loc->stride(0);
    p.stride_k_new_row = a.k_new->stride(0);
    p.stride_k_new_head = a.k_new->stride(1);
    p.stride_v_new_row = a.v_new->stride(0);
    p.stride_v_new_head = a.v_new->stride(1);
  }
  p.bs = static_cast<int32_t>(bs.value);
  p.num_rows = static_cast<int32_t>(num_rows);
  p.num_q_heads = static_cast<int32_t>(q_heads.value);
  p.num_kv_heads = static_cast<int32_t>(kv_heads.value);
  p.head_dim = static_cast<int32_t>(head_dim.value);
  p.sm_scale =
      static_cast<float>(a.sm_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim.value))));
  p.dtype = dtype_of(a.q);
  c.require(p.sm_scale > 0 && std::isfinite(p.sm_scale), "sm_scale", "be positive and finite",
            std::to_string(p.sm_scale));
  return p;
}

// The spec variant's own arguments: who sees what, and where the window's columns are.
inline void add_tree(const Checker& c, const OptTensor& tree_words, const OptTensor& window_slots,
                     AttnParams& p) {
  if (window_slots.has_value()) {
    c.tensor("window_slots", *window_slots, {ScalarType::Long}, 2);
    c.last_contiguous("window_slots", *window_slots);
    Dim bs{"bs", p.bs, "req_pool_indices"};
    c.size("window_slots", *window_slots, 0, bs);
    c.require(window_slots->size(1) >= 1 && window_slots->size(1) <= kMaxWindow, "window_slots",
              "have 1 to 64 columns", std::to_string(window_slots->size(1)));
    p.table.window_slots = data_or_null<int64_t>(window_slots);
    p.table.stride_window_slots = window_slots->stride(0);
    p.table.width = static_cast<int32_t>(window_slots->size(1));
  }
  c.require(tree_words.has_value() || p.table.width >= p.num_rows, "window_slots",
            "have a column for each row when tree_words is None",
            std::to_string(p.table.width) + " columns");
  if (tree_words.has_value() && p.bs > 0) {
    c.tensor("tree_words", *tree_words, {ScalarType::Long}, 2);
    c.last_contiguous("tree_words", *tree_words);
    Dim bs{"bs", p.bs, "req_pool_indices"}, rows{"rows per request", p.num_rows, "q"};
    c.size("tree_words", *tree_words, 0, bs);
    c.size("tree_words", *tree_words, 1, rows);
    p.tree_words = data_or_null<int64_t>(tree_words);
    p.stride_words = tree_words->stride(0);
  }
}

}  // namespace specfused::ops
