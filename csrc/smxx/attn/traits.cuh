// SPDX-License-Identifier: Apache-2.0
// Types, tile sizes and shared memory of the mma.sync attention kernels (sm_80 and later).
//
// One CTA takes the segments of one plan entry (plan.h) for one tile of kRowTile packed rows.
// Packed row r of a unit is step row r / group, query head kv_head * group + r % group. For each KV
// tile:
//
//   S [rows, 64] = Q [rows, D]  K^T [D, 64]      m16n8k16, fp32 sums
//   O [rows, D] += P [rows, 64] V   [64, D]      P = exp2(scale * S - max) in the element type
//
// Warps: kTokenGroups x kRowGroups, no specialisation; every warp also issues cp.async. In class
// few the four token groups of a CTA take 16 tokens each of every tile, keep their own max, sum and
// O, and are merged once per segment in a fixed order. In class many a warp sees the whole tile.
//
// Shared memory = fixed part + Q (if not in registers) + stages x (K 64 x D + V 64 x D). At D 128:
//   rows  16  3.5 K          + 3 x 32 K =  99.5 K  2 CTAs / SM on sm_90
//   rows  32  4 K   + Q  8 K + 3 x 32 K = 108 K    2
//   rows  64  3 K            + 3 x 32 K =  99 K    2
//   rows 128  3 K   + Q 32 K + 2 x 32 K =  99 K    2
#pragma once

#include "../../attn_select.h"
#include "../../params.h"
#include "../../plan.h"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/delay.cuh"
#include "../../ptx/load.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/sync.cuh"
#include "../../workspace.h"

namespace specfused::smxx {

constexpr int kTile = kTileTokens;
static_assert(kTile == kAttnTileTokens, "attn_select.h and plan.h disagree");

// What a CTA needs of one of its segments. Width 0 never gets here.
struct SegmentEntry {
  const int32_t* row;           // req_to_token of the request
  const int64_t* window_slots;  // or null
  TreeWord used;                // window columns that some row sees
  int32_t committed;
  int32_t width;
  int32_t request;
  int32_t kv_head;
  int32_t tile_begin;
  int32_t tile_end;   // of the tiles to attend; in the tail, those of the window too
  int32_t first_cta;  // plan entry that holds split 0 of the unit
  int16_t split;
  int16_t num_splits;
  int32_t tail;
  int32_t unused;
};
static_assert(sizeof(SegmentEntry) == 64);

// The table is a ring. It is filled in steps of eight when the slot-index cursor, which is at most
// 2 * (kAttnMaxStages - 1) tiles ahead of the math, needs an entry that is not there yet.
constexpr int kSegmentBatch = 8;

// Slot indices of the tiles between the index cursor and the load cursor.
constexpr int kIndexRing = kAttnMaxStages;

// Swizzle: 16-byte chunk c of row r is at chunk c ^ (r % 8), so that eight rows of one chunk, which
// ldmatrix reads at once, and eight chunks of one row, which cp.async writes, hit all 32 banks.
SPECFUSED_HD constexpr uint32_t swizzled_offset(int row, int chunk, int row_bytes) {
  return static_cast<uint32_t>(row * row_bytes + ((chunk ^ (row & 7)) << 4));
}

template <class Element_, int kHeadDim_, int kRowTile_>
struct AttnTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr bool kFew = kRowTile <= kFewRowsLimit;
  static constexpr int kTokenGroups = kFew ? 4 : 1;
  // 32 rows per warp halve the ldmatrix traffic, but O alone is 256 registers at head_dim 256.
  static constexpr int kRowBlocks = (kRowTile == 32 && kHeadDim <= 128) || kRowTile == 128 ? 2 : 1;
  static constexpr int kRowGroups = kRowTile / (16 * kRowBlocks);
  static constexpr int kThreads = 32 * kTokenGroups * kRowGroups;
  static constexpr int kWarpTokens = kTile / kTokenGroups;
  // Tokens between two updates of the maximum: more, and S would not fit beside O in class many.
  static constexpr int kStepTokens = kFew ? 16 : 32;
  static constexpr bool kLazyMax = false;  // see weights_of
  static constexpr bool kQInRegisters = attn_q_in_registers(kRowTile, kHeadDim);
  static constexpr int kMinCtasPerSm = kHeadDim == 256                    ? 1
                                       : kHeadDim == 64 && kRowTile <= 64 ? 3
                                                                          : 2;
  // Q of many rows would otherwise take several rounds of loads through registers.
  static constexpr bool kQByCopy = !kQInRegisters && !kFew;

  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;  // of one K or V row
  static constexpr int kLoadThreads = kThreads;   // every warp loads
  static constexpr int kRowsPerPass = kLoadThreads / kChunks;
  static constexpr int kHalfStageBytes = kTile * kRowBytes;
  static constexpr int kStageBytes = 2 * kHalfStageBytes;  // K, then V

  // Shared memory: SharedFront, Q, ring. The XOR of a chunk index needs rows aligned to their size.
  static constexpr int kQOffset = attn_fixed_bytes(kRowTile);
  static constexpr int kRingOffset = attn_smem_bytes(kRowTile, kHeadDim, 0);
  static_assert(kQOffset % kRowBytes == 0 && kRingOffset % kRowBytes == 0);
  static_assert(kRowTile == kRowGroups * kRowBlocks * 16);
  static_assert(kTile % kRowsPerPass == 0);
  // The merge of the token groups of 16 rows reuses the stage that was read last.
  static_assert(kTokenGroups * 16 * kHeadDim * 4 <= kStageBytes);

  // Where 16-byte chunks of a row are in a half stage and in Q.
  static constexpr int kTileRowBytes = kRowBytes;
  static SPECFUSED_HD constexpr uint32_t kv_offset(int row, int chunk) {
    return swizzled_offset(row, chunk, kRowBytes);
  }
  static SPECFUSED_HD constexpr uint32_t q_offset(int row, int chunk) {
    return swizzled_offset(row, chunk, kRowBytes);
  }
  static __device__ __forceinline__ uint32_t load_thread() { return threadIdx.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
};

// What the host derives once per launch.
struct AttnLaunch {
  int32_t stages;
  int32_t group;          // query heads per KV head
  int32_t group_inverse;  // see row_of
  int32_t rows;           // packed rows of a unit
  int32_t fold;           // plan entries that one CTA takes as one
  uint32_t num_slots;     // of the pool, which 31 bits count: slots are int32
  uint32_t k_slot_bytes;  // from a slot to the next
  uint32_t v_slot_bytes;
  float scale_log2;  // sm_scale / ln 2: exp2 instead of exp
};

// Step row of a packed row: packed_row / group. Exact for packed_row * group < 65536 with the
// inverse rounded up, and there are at most 1024 + 255 packed rows in groups of at most 16.
__device__ __forceinline__ int row_of(const AttnLaunch& launch, int packed_row) {
  return packed_row * launch.group_inverse >> 16;
}

// A place among the tiles of the segment table. The same in all threads of a CTA.
struct Cursor {
  int32_t segment;
  int32_t tile;  // kNotEntered: the table does not have the segment yet
};
constexpr int kNotEntered = -1;

struct PlanEntry {
  int32_t cta;
  int32_t line_begin;
  int32_t line_end;  // line_begin >= line_end: nothing to do
  int32_t tiles_per_cta;
  int32_t first_request;
};

template <class Traits>
struct SharedFront {
  static constexpr int kSegments = 2 * kSegmentBatch;
  static_assert(2 * (kAttnMaxStages - 1) <= kSegmentBatch, "a live entry would be overwritten");
  SegmentEntry segments[kSegments];
  int64_t slot_index[kIndexRing][kTile];
  float2 row_stats[Traits::kFew ? Traits::kTokenGroups * Traits::kRowTile : 1];  // max, sum
  Cursor index_at[Traits::kThreads / 32];  // next tile whose slot indices are to be loaded
  Cursor load_at[Traits::kThreads / 32];   // next tile whose KV is to be loaded
  PlanEntry entry;
  int32_t filled;     // segments written to the table so far
  int32_t next_unit;  // the unit after them
  // See combine.cuh: a split unit that this CTA does not begin, and one that it begins.
  SegmentEntry pending[2];  // num_splits 0: none
  uint64_t seen[2];         // its word on arrival; 0: not arrived
  bool closes;              // this CTA closes the unit that it begins
};

}  // namespace specfused::smxx
