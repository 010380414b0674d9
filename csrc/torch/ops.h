// SPDX-License-Identifier: Apache-2.0
// The ops over a device policy D: D::run_*(params, anchor tensor) launches or computes.
#pragma once

#include "commit_args.h"
#include "draft_args.h"

namespace specfused::ops {

inline int64_t bytes_of(const OptTensor& workspace) {
  return workspace.has_value() ? workspace->numel() : 0;
}

template <class D>
struct Ops {
  static void verify_attn(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                          const Tensor& req_to_token, const Tensor& req_pool_indices,
                          const Tensor& seq_lens, const OptTensor& tree_words, const Tensor& out,
                          const OptTensor& lse, const OptTensor& k_new, const OptTensor& v_new,
                          const OptTensor& out_cache_loc, const OptTensor& window_slots,
                          const OptTensor& plan, const OptTensor& workspace,
                          int64_t seq_lens_offset, std::optional<double> sm_scale,
                          const OptTensor& sinks, int64_t window, double softcap,
                          std::optional<double> k_scale, std::optional<double> v_scale) {
    const Checker c("verify_attn", "q", q);
    refuse_features(c.op(), sinks, window, softcap, k_scale, v_scale);
    AttnParams p =
        attn_params(c,
                    {q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, out, lse, k_new,
                     v_new, out_cache_loc, plan, workspace, seq_lens_offset, sm_scale},
                    /*num_rows=*/-1);
    add_tree(c, tree_words, window_slots, p);
    if (p.bs > 0) D::verify_attn(c, p, bytes_of(workspace), q);
  }

  static void decode_attn(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                          const Tensor& req_to_token, const Tensor& req_pool_indices,
                          const Tensor& seq_lens, const Tensor& out, const OptTensor& lse,
                          const OptTensor& k_new, const OptTensor& v_new,
                          const OptTensor& out_cache_loc, const OptTensor& plan,
                          const OptTensor& workspace, int64_t seq_lens_offset,
                          std::optional<double> sm_scale, const OptTensor& sinks, int64_t window,
                          double softcap, std::optional<double> k_scale,
                          std::optional<double> v_scale) {
    const Checker c("decode_attn", "q", q);
    refuse_features(c.op(), sinks, window, softcap, k_scale, v_scale);
    const AttnParams p =
        attn_params(c,
                    {q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, out, lse, k_new,
                     v_new, out_cache_loc, plan, workspace, seq_lens_offset, sm_scale},
                    /*num_rows=*/1);
    if (p.bs > 0) D::decode_attn(c, p, bytes_of(workspace), q);
  }

  static void commit(const Tensor& draft_tokens, const Tensor& seq_lens, const Tensor& accept_index,
                     const Tensor& num_correct_drafts, const Tensor& accept_lens,
                     const Tensor& accept_tokens, const Tensor& bonus_tokens,
                     const Tensor& new_seq_lens, const OptTensor& logits, const OptTensor& targets,
                     const OptTensor& retrieve_next_token, const OptTensor& retrieve_next_sibling,
                     const OptTensor& out_cache_loc, const OptTensor& kv_ptrs,
                     const OptTensor& kv_row_bytes, int64_t num_slots, const OptTensor& workspace,
                     const OptTensor& hidden_states, const OptTensor& next_token_ids,
                     const OptTensor& select_index, const OptTensor& positions,
                     const OptTensor& invalid_logits, const OptTensor& temperatures,
                     const OptTensor& target_probs, const OptTensor& draft_probs,
                     const OptTensor& coins, const OptTensor& coins_final, double threshold_single,
                     double threshold_acc, const OptTensor& window_ends) {
    const Checker c("commit", "draft_tokens", draft_tokens);
    const CommitParams p =
        commit_params(c, {draft_tokens,  seq_lens,       accept_index,        num_correct_drafts,
                          accept_lens,   accept_tokens,  bonus_tokens,        new_seq_lens,
                          logits,        targets,        retrieve_next_token, retrieve_next_sibling,
                          out_cache_loc, kv_ptrs,        kv_row_bytes,        num_slots,
                          workspace,     hidden_states,  next_token_ids,      select_index,
                          positions,     invalid_logits, temperatures,        target_probs,
                          draft_probs,   coins,          coins_final,         threshold_single,
                          threshold_acc, window_ends});
    if (p.bs > 0) D::commit(c, p, bytes_of(workspace), draft_tokens);
  }

  static void compact(const Tensor& kv_ptrs, const Tensor& kv_row_bytes, int64_t num_slots,
                      const Tensor& out_cache_loc, const Tensor& accept_index,
                      const Tensor& accept_lens) {
    const Checker c("compact", "accept_index", accept_index);
    const CompactParams p = compact_params(c, kv_ptrs, kv_row_bytes, num_slots, out_cache_loc,
                                           accept_index, accept_lens);
    if (p.bs > 0 && p.kv.num_buffers > 0) D::compact(c, p, accept_index);
  }

  static void draft_topk(const Tensor& logits, const Tensor& topk_index, const OptTensor& topk_p,
                         const OptTensor& rows, const OptTensor& token_map,
                         const OptTensor& workspace) {
    const Checker c("draft_topk", "logits", logits);
    DraftTopkParams p = draft_topk_params(c, logits, topk_index, topk_p, rows, token_map);
    if (workspace.has_value()) {
      c.tensor("workspace", *workspace, {ScalarType::Byte}, 1);
      c.contiguous("workspace", *workspace);
      p.workspace = workspace->data_ptr();
    }
    if (p.num_rows > 0) D::draft_topk(c, p, bytes_of(workspace), logits);
  }

  static void plan(const Tensor& seq_lens, int64_t num_kv_heads, int64_t num_ctas,
                   const Tensor& out, int64_t seq_lens_offset) {
    const Checker c("plan", "seq_lens", seq_lens);
    c.tensor("seq_lens", seq_lens, {ScalarType::Long}, 1);
    c.contiguous("seq_lens", seq_lens);
    c.require(seq_lens_offset >= -kMaxContext && seq_lens_offset <= kMaxContext, "seq_lens_offset",
              "be a small number of rows", std::to_string(seq_lens_offset));
    c.require(num_kv_heads >= 1 && num_kv_heads <= INT32_MAX, "num_kv_heads", "be 1 to 2^31 - 1",
              std::to_string(num_kv_heads));
    c.require(num_ctas >= 1 && num_ctas <= INT32_MAX, "num_ctas", "be 1 to 2^31 - 1",
              std::to_string(num_ctas));
    c.tensor("out", out, {ScalarType::Int}, 1);
    c.contiguous("out", out);
    Dim numel{"plan_numel(bs, num_ctas)", plan_numel(seq_lens.size(0), num_ctas), "num_ctas"};
    c.size("out", out, 0, numel);
    D::plan(c, seq_lens, seq_lens_offset, static_cast<int32_t>(num_kv_heads),
            static_cast<int32_t>(num_ctas), out);
  }

  static void tree_words_from_links(const Tensor& next_token, const Tensor& next_sibling,
                                    const Tensor& words) {
    const Checker c("tree_words_from_links", "words", words);
    Dim bs{"bs"}, width{"num_draft_tokens"};
    const auto array = [&](const char* name, const Tensor& t) {
      c.tensor(name, t, {ScalarType::Long}, 2);
      c.contiguous(name, t);
      c.size(name, t, 0, bs);
      c.size(name, t, 1, width);
    };
    array("words", words);
    array("retrieve_next_token", next_token);
    array("retrieve_next_sibling", next_sibling);
    c.require(width.value >= 1 && width.value <= kMaxWindow, "words", "have 1 to 64 columns",
              std::to_string(width.value));
    if (bs.value > 0) {
      D::tree_words_from_links(c, next_token, next_sibling, static_cast<int32_t>(bs.value),
                               static_cast<int32_t>(width.value), words);
    }
  }

  static void tree_words_from_mask(const Tensor& custom_mask, const Tensor& words,
                                   const OptTensor& seq_lens) {
    const Checker c("tree_words_from_mask", "words", words);
    Dim bs{"bs"};
    c.tensor("words", words, {ScalarType::Long}, 2);
    c.contiguous("words", words);
    c.size("words", words, 0, bs);
    const int64_t width = words.size(1);
    c.require(width >= 1 && width <= kMaxWindow, "words", "have 1 to 64 columns",
              std::to_string(width));
    c.tensor("custom_mask", custom_mask, {ScalarType::Bool, ScalarType::Byte}, 1);
    c.contiguous("custom_mask", custom_mask);
    if (seq_lens.has_value()) {
      c.tensor("seq_lens", *seq_lens, {ScalarType::Long}, 1);
      c.contiguous("seq_lens", *seq_lens);
      c.size("seq_lens", *seq_lens, 0, bs);
    } else {
      const int64_t cells = bs.value * width * width;
      c.require(custom_mask.size(0) >= cells, "custom_mask",
                "have at least " + std::to_string(cells) + " cells (bs x W x W)",
                std::to_string(custom_mask.size(0)));
    }
    if (bs.value > 0) {
      D::tree_words_from_mask(c, custom_mask, seq_lens, static_cast<int32_t>(bs.value),
                              static_cast<int32_t>(width), words);
    }
  }
};

}  // namespace specfused::ops

// One place that knows which ops take tensors: every device file expands it.
#define SPECFUSED_TENSOR_OPS(X) \
  X(verify_attn)                \
  X(decode_attn)                \
  X(commit) X(compact) X(draft_topk) X(plan) X(tree_words_from_links) X(tree_words_from_mask)
