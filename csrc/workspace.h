// SPDX-License-Identifier: Apache-2.0
// Bytes of scratch memory that the CUDA kernels need, and where things are in it.
//
// An attention workspace must be zero before its first launch and after a launch that was aborted:
// its first kCounterBytes are counters that each launch leaves at zero. The rest needs no value.
// Their place does not depend on the shape, so one workspace of the largest size serves every step
// of a stream. A commit workspace needs no value at all.
#pragma once

#include "attn_select.h"
#include "common.h"

namespace specfused {

constexpr int kMaxRowTiles = kMaxRowsPerKvHead / 64;
constexpr int64_t kCounterBytes = int64_t{kAttnMaxCtas} * kMaxRowTiles * 8;

// A unit (request, KV head) that several CTAs share is the last of the first one and the first of
// the others, so a CTA leaves at most two partial results, each rows x (head_dim + max + sum).
SPECFUSED_HD int64_t partial_slot(int64_t cta, bool first_of_unit) {
  return 2 * cta + (first_of_unit ? 1 : 0);
}

SPECFUSED_HD int64_t attn_partial_rows(int64_t num_ctas, int64_t rows_per_kv_head) {
  return 2 * num_ctas * rows_per_kv_head;
}

// rows_per_kv_head = num_rows * num_q_heads / num_kv_heads. 0 for float32, which is never split.
SPECFUSED_HD int64_t attn_workspace_bytes(int64_t num_ctas, int64_t rows_per_kv_head,
                                          int64_t head_dim, DType dtype) {
  if (dtype == DType::kFloat32) return 0;
  return kCounterBytes + attn_partial_rows(num_ctas, rows_per_kv_head) * (head_dim + 2) * 4;
}

// A row of logits is cut into slices, and a slice into parts side by side, one for each warp that
// reads it. From the vocabulary alone, so that the sums of a row have the same bits in every batch.
// A slice is a number of blocks of kRowBlock: what one CTA has in flight.
constexpr int64_t kRowBlock = 4096;
constexpr int kSliceParts = 8;
constexpr int kMaxSlices = 64;

SPECFUSED_HD int64_t slice_length(int64_t vocab) {
  return ceil_div(ceil_div<int64_t>(vocab, kMaxSlices), kRowBlock) * kRowBlock;
}

SPECFUSED_HD int32_t num_slices(int64_t vocab) {
  return static_cast<int32_t>(ceil_div(vocab, slice_length(vocab)));
}

// Slices that one CTA reads: enough CTAs to fill a device, none so small that it is all start-up.
SPECFUSED_HD int32_t slices_per_cta(int64_t rows, int64_t vocab) {
  const int64_t slices = num_slices(vocab);
  return static_cast<int32_t>(min_of(max_of<int64_t>(rows * slices / 2048, 1), slices));
}

// Per row and slice a key and, where it is sampled from, a sum in all and of each part; per request
// and part of a row the mass of the residual. One bound for every way to choose.
SPECFUSED_HD int64_t commit_workspace_bytes(int64_t bs, int64_t width, int64_t vocab) {
  const int64_t slices = num_slices(vocab);
  return bs * slices * (width * (8 + 4 + 4 * kSliceParts) + 8 * kSliceParts);
}

// Zero before its first launch and after one that was aborted: it begins with a counter per row,
// which each launch leaves at zero. Then, per row and slice, topk keys, a maximum and a sum.
constexpr int64_t kMaxDraftRows = 1 << 14;
constexpr int64_t kDraftCounterBytes = kMaxDraftRows * 8;

SPECFUSED_HD int64_t draft_workspace_bytes(int64_t rows, int64_t vocab, int64_t topk) {
  return kDraftCounterBytes + rows * num_slices(vocab) * (8 * topk + 8);
}

}  // namespace specfused
