// SPDX-License-Identifier: Apache-2.0
// The schema of every op, nothing else. specfused/ops.py documents the arguments.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(specfused, m) {
  // Spec variant: W rows per request under a tree mask.
  m.def(
      "verify_attn(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor req_to_token, "
      "Tensor req_pool_indices, Tensor seq_lens, Tensor? tree_words, Tensor(c!) out, *, "
      "Tensor(d!)? lse=None, Tensor? k_new=None, Tensor? v_new=None, Tensor? out_cache_loc=None, "
      "Tensor? window_slots=None, Tensor? plan=None, Tensor(e!)? workspace=None, "
      "int seq_lens_offset=0, float? sm_scale=None, Tensor? sinks=None, int window=-1, "
      "float softcap=0., float? k_scale=None, float? v_scale=None) -> ()");
  // Non-spec variant: one row per request.
  m.def(
      "decode_attn(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor req_to_token, "
      "Tensor req_pool_indices, Tensor seq_lens, Tensor(c!) out, *, "
      "Tensor(d!)? lse=None, Tensor? k_new=None, Tensor? v_new=None, Tensor? out_cache_loc=None, "
      "Tensor? plan=None, Tensor(e!)? workspace=None, "
      "int seq_lens_offset=0, float? sm_scale=None, Tensor? sinks=None, int window=-1, "
      "float softcap=0., float? k_scale=None, float? v_scale=None) -> ()");
  // Greedy or sampled decision, bookkeeping, KV of all layers and hidden rows to the front.
  m.def(
      "commit(Tensor draft_tokens, Tensor seq_lens, Tensor(a!) accept_index, "
      "Tensor(b!) num_correct_drafts, Tensor(c!) accept_lens, Tensor(d!) accept_tokens, "
      "Tensor(e!) bonus_tokens, Tensor(f!) new_seq_lens, *, Tensor? logits=None, "
      "Tensor? targets=None, Tensor? retrieve_next_token=None, Tensor? retrieve_next_sibling=None, "
      "Tensor? out_cache_loc=None, Tensor? kv_ptrs=None, Tensor? kv_row_bytes=None, "
      "int num_slots=0, Tensor(g!)? workspace=None, Tensor(h!)? hidden_states=None, "
      "Tensor(i!)? next_token_ids=None, Tensor(j!)? select_index=None, "
      "Tensor(k!)? positions=None, Tensor(l!)? invalid_logits=None, Tensor? temperatures=None, "
      "Tensor? target_probs=None, Tensor? draft_probs=None, Tensor? coins=None, "
      "Tensor? coins_final=None, float threshold_single=1., float threshold_acc=1., "
      "Tensor(m!)? window_ends=None) -> ()");
  // The KV part of commit alone.
  m.def(
      "compact(Tensor kv_ptrs, Tensor kv_row_bytes, int num_slots, Tensor out_cache_loc, "
      "Tensor accept_index, Tensor accept_lens) -> ()");
  // The draft model's likeliest tokens and their probabilities.
  m.def(
      "draft_topk(Tensor logits, Tensor(a!) topk_index, *, Tensor(b!)? topk_p=None, "
      "Tensor? rows=None, Tensor? token_map=None, Tensor(c!)? workspace=None) -> ()");
  // Lengths -> split plan.
  m.def(
      "plan(Tensor seq_lens, int num_kv_heads, int num_ctas, Tensor(a!) out, *, "
      "int seq_lens_offset=0) -> ()");
  // Draft tree -> one word per row, from links or from a boolean mask.
  m.def(
      "tree_words_from_links(Tensor retrieve_next_token, Tensor retrieve_next_sibling, "
      "Tensor(a!) words) -> ()");
  m.def(
      "tree_words_from_mask(Tensor custom_mask, Tensor(a!) words, *, Tensor? seq_lens=None) -> ()");
  // Sizes that a caller needs before it can allocate. No tensors: any device.
  m.def("plan_numel(int bs, int num_ctas) -> int");
  m.def("attn_num_ctas(int device_index, int head_dim) -> int");
  m.def("attn_workspace_bytes(int num_ctas, int rows_per_kv_head, int head_dim) -> int");
  m.def("commit_workspace_bytes(int bs, int num_draft_tokens, int vocab) -> int");
  m.def("draft_workspace_bytes(int rows, int vocab, int topk) -> int");
  m.def("build_info() -> str");
  // The bench's yardsticks on CUDA: reads all bytes of src; does nothing;
  // lets our launches overlap the one in front, as they do by default.
  m.def("bench_read(Tensor src, Tensor(a!) sink) -> ()");
  m.def("bench_empty(Tensor anchor) -> ()");
  m.def("bench_overlap(bool on) -> ()");
}
