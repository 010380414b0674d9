// SPDX-License-Identifier: Apache-2.0
// Every entry point of every implementation, one line each. Device entry points return a
// cudaError_t as int (0: launched) and take the stream as an opaque pointer; they allocate nothing,
// synchronise nothing and print nothing, so a captured graph can hold them.
#pragma once

#include "params.h"
#include "plan.h"

namespace specfused {

namespace cpu {
void store_rows(const AttnParams& p);
// Units [begin, end) of bs * num_q_heads; store_rows must have run. Any split over threads.
void verify_attn(const AttnParams& p, int64_t begin, int64_t end);
void decode_attn(const AttnParams& p, int64_t begin, int64_t end);
void commit(const CommitParams& p);
void compact(const CompactParams& p);
void draft_topk(const DraftTopkParams& p);
// committed == nullptr: QLEN_ONLY mask, else FULL_MASK.
void tree_words_from_mask(const uint8_t* mask, int64_t mask_numel, const int64_t* committed,
                          int32_t bs, int32_t width, int64_t* words);
}  // namespace cpu

namespace smxx {  // any GPU from sm_80 on
int run_plan(const int64_t* seq_lens, int64_t seq_lens_offset, int32_t bs, int32_t num_kv_heads,
             int32_t num_ctas, int32_t* plan, void* stream);
int run_tree_words_from_links(const int64_t* next_token, const int64_t* next_sibling, int32_t bs,
                              int32_t width, int64_t* words, void* stream);
// committed == nullptr: QLEN_ONLY mask, else FULL_MASK.
int run_tree_words_from_mask(const uint8_t* mask, int64_t mask_numel, const int64_t* committed,
                             int32_t bs, int32_t width, int64_t* words, void* stream);
int run_verify_attn(const AttnParams& p, void* stream);
int run_decode_attn(const AttnParams& p, void* stream);
int run_commit(const CommitParams& p, void* stream);
int run_compact(const CompactParams& p, void* stream);
int run_draft_topk(const DraftTopkParams& p, void* stream);

// Yardsticks. Reads `bytes` at full speed; folds them into sink[0] (8 bytes) so that they are read.
int run_bench_read(const void* src, int64_t bytes, void* sink, void* stream);
// The same for rows of two buffers at slots[0..n): what attention reads, without the attention.
int run_bench_read_rows(const void* k, const void* v, const int32_t* slots, int64_t n,
                        int64_t row_bytes, void* sink, void* stream);
int run_bench_empty(void* stream);
// The kernel class that serves a step on the current device; tests compare rows within one.
int attn_kernel_class(int rows_per_kv_head, int head_dim, int* kernel_class);
// CTAs of a plan on the current device; depends on nothing else, so one plan serves every step.
int attn_num_ctas(int head_dim, int* num_ctas);
// Whether a launch may start while the one in front of it ends, on devices that can (sm_90 on). On
// unless the bench turns it off; the results are the same.
void set_launch_overlap(bool on);
// Of the random delays of the launches to come; 0: none. Not supported unless the build has
// SPECFUSED_RANDOM_DELAY.
int set_delay_seed(uint32_t seed);
const char* error_string(int error);
}  // namespace smxx

}  // namespace specfused
