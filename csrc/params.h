// SPDX-License-Identifier: Apache-2.0
// The arguments of every kernel, CPU and CUDA: plain pointers, strides in elements.
#pragma once

#include "draft_tree.h"
#include "kv_window.h"

namespace specfused {

// verify_attn and decode_attn. decode_attn is num_rows = 1, tree_words = null.
struct AttnParams {
  const void* q;      // [bs * num_rows, num_q_heads, head_dim]
  void* k_cache;      // [num_slots, num_kv_heads, head_dim]
  void* v_cache;      // [num_slots, num_kv_heads, head_dim]
  const void* k_new;  // [bs * num_rows, num_kv_heads, head_dim] or null: nothing to store
  const void* v_new;  // same
  const int64_t* out_cache_loc;  // [bs * num_rows], slot of each new row; null without k_new
  const int64_t* tree_words;     // [bs, num_rows], TreeWord bits; null: row i sees columns 0..i
  void* out;                     // [bs * num_rows, num_q_heads, head_dim]
  float* lse;                    // [bs * num_rows, num_q_heads], natural log; or null
  const int32_t* plan;           // see plan.h; CUDA only
  void* workspace;               // partial results and counters; CUDA only

  WindowTable table;  // where the KV rows are

  int64_t stride_q_row, stride_q_head;
  int64_t stride_k_slot, stride_k_head;
  int64_t stride_v_slot, stride_v_head;
  int64_t stride_k_new_row, stride_k_new_head;
  int64_t stride_v_new_row, stride_v_new_head;
  int64_t stride_out_cache_loc;
  int64_t stride_words;  // elements between requests of tree_words; 0: one tree for all
  int64_t stride_out_row, stride_out_head;

  int32_t bs;
  int32_t num_rows;  // query rows per request
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t num_ctas;  // CTAs of the plan; CUDA only
  float sm_scale;
  DType dtype;  // of q, caches, new rows and out
};

// Where the KV rows of all layers are, as raw addresses: one table for any number of layers.
struct KvTable {
  const int64_t* ptrs;       // [num_buffers] address of slot 0 of each K and each V buffer
  const int64_t* row_bytes;  // [num_buffers] bytes of one slot's row, also the distance of slots
  int32_t num_buffers;       // 2 x layers; 0: nothing to move
  int64_t num_slots;         // rows of every buffer
};

// commit: choice of the target -> walk -> bookkeeping -> KV and hidden rows to the front.
// One of logits, targets and target_probs is given; with coins the choice is sampled.
struct CommitParams {
  const void* logits;            // [bs * W, vocab] or null
  const int64_t* targets;        // [bs * W] or null
  const float* target_probs;     // [bs * W, vocab] or null
  const float* draft_probs;      // [bs, draft_prob_rows, vocab] or null: target-only rejection
  const float* temperatures;     // [bs], with logits and coins
  const float* coins;            // [bs, W] or null: greedy; a node's coin decides on its children
  const float* coins_final;      // [bs] for the bonus token
  const int64_t* draft_tokens;   // [bs * W]; entry 0 of a request is the root
  const int64_t* next_token;     // [bs, W] first child, or null: chain
  const int64_t* next_sibling;   // [bs, W]
  const int64_t* seq_lens;       // [bs] committed lengths before the step
  const int64_t* out_cache_loc;  // [bs * W] slots of the window; null without kv
  int32_t* accept_index;         // [bs, max_path] flat node ids r * W + node, -1 behind the path
  int32_t* num_correct_drafts;   // [bs] without the bonus token
  int32_t* accept_lens;          // [bs] with it
  int32_t* accept_tokens;        // [bs, max_path] emitted tokens in path order, -1 behind them
  int32_t* bonus_tokens;         // [bs] the last emitted token, root of the next step
  int64_t* new_seq_lens;         // [bs] seq_lens + accept_lens
  void* next_token_ids;          // [bs * W] emitted tokens at r * W + j, 0 behind; or null
  int64_t* select_index;         // [bs] r * W + accept_lens - 1; or null
  int64_t* positions;            // [bs * W] seq_lens + j; or null
  int64_t* window_ends;          // [bs] seq_lens + W; or null
  int32_t* invalid_logits;       // [bs] 1: a visited row cannot be used; or null
  char* hidden_states;           // [bs * W] rows, moved as the KV rows are; or null
  void* workspace;               // commit_workspace_bytes, unless targets are given; CUDA only
  KvTable kv;
  int64_t stride_logits_row;
  int64_t stride_target_probs_row;
  int64_t stride_draft_probs_request, stride_draft_probs_row;
  int64_t stride_hidden_bytes;  // between rows of hidden_states
  int64_t hidden_row_bytes;
  int64_t vocab;
  int32_t bs;
  int32_t width;     // W = num_draft_tokens
  int32_t max_path;  // most rows a path can have: draft steps + 1
  float threshold_single, threshold_acc;
  DType logits_dtype;
  bool token_ids_are_int32;  // next_token_ids; else int64
};

// compact: the KV part of commit alone, from an earlier decision.
struct CompactParams {
  const int64_t* out_cache_loc;  // [bs * W] of the verify step itself, never the table row
  const int32_t* accept_index;   // [bs, max_path]
  const int32_t* accept_lens;    // [bs]
  KvTable kv;
  int32_t bs;
  int32_t width;
  int32_t max_path;
};

// draft_topk: the likeliest tokens of the draft model and their probabilities.
struct DraftTopkParams {
  const void* logits;        // [num_logits_rows, vocab]
  const int64_t* rows;       // [num_rows] rows of logits, or null: row i of row i
  const int64_t* token_map;  // [vocab] ids to hand out, or null: places in the vocabulary
  int64_t* topk_index;       // [num_rows, topk]
  float* topk_p;             // [num_rows, topk] or null
  void* workspace;           // draft_workspace_bytes; CUDA only
  int64_t stride_logits_row;
  int64_t num_logits_rows;
  int64_t num_rows;
  int64_t vocab;
  int32_t topk;
  DType logits_dtype;
};

}  // namespace specfused
