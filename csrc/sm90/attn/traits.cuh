// SPDX-License-Identifier: Apache-2.0
// Types, tile sizes and shared memory of the wgmma attention kernel (sm_90a, class wgmma).
//
// Plan, segments, packed rows, masks, parts and their combination are those of the portable kernel
// (smxx/attn). Here the warps of a CTA have two jobs:
//
//   math     one or two warpgroups, each with kRowBlocks blocks of 64 rows. For each KV tile and
//            block: S [64, 64] = Q K^T and O [64, D] += P V by wgmma, fp32 sums.
//   loaders  one warpgroup behind them: slot indices and KV rows by cp.async, new rows.
//
// Warp w of the math has packed rows 16 kRowBlocks w and on, block b the 16 from 16 b of these, so
// row i of block b of a warpgroup is row 16 kRowBlocks (i / 16) + 16 b + i % 16 of its rows.
//
// Shared memory = Q (if not in registers) + stages x (K 64 x D + V 64 x D) + fixed part. At D 128:
//   rows  64                3 x 32 K + 10 K = 106 K  2 CTAs / SM
//   rows 128                6 x 32 K + 10 K = 202 K  1
//   rows 256   Q 64 K +     4 x 32 K + 10 K = 202 K  1
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../smxx/attn/traits.cuh"
#include "smem_layout.h"

namespace specfused::sm90 {

using smxx::kSegmentBatch;
using smxx::kTile;

// Named barriers; 0 is __syncthreads.
constexpr int kMathBarrier = 1;
constexpr int kLoadBarrier = 2;
constexpr int kWarpgroupBarrier = 3;  // and the next one

template <class Element_, int kHeadDim_, int kRowTile_>
struct WgmmaTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr bool kFew = false;
  static constexpr int kTokenGroups = 1;
  static constexpr int kRowBlocks = kRowTile == 256 ? 2 : 1;
  static constexpr int kWarpgroups = kRowTile / (64 * kRowBlocks);
  static constexpr int kThreads = 128 * kWarpgroups;  // of the math, the first of the CTA
  static constexpr int kRowGroups = kThreads / 32;
  static constexpr int kLoadThreads = 128;
  static constexpr int kCtaThreads = kThreads + kLoadThreads;
  static constexpr int kWarpTokens = kTile;
  static constexpr int kStepTokens = kTile;
  static constexpr bool kLazyMax = true;
  static constexpr bool kQInRegisters = wgmma_q_in_registers(kRowTile, kHeadDim);
  static constexpr bool kQByCopy = !kQInRegisters;
  static constexpr int kMinCtasPerSm = wgmma_ctas_per_sm(kRowTile, kHeadDim);

  // Registers per thread: what a launch gives to all, moved from the loaders to the math.
  static constexpr int kLaunchRegisters = 65536 / (kCtaThreads * kMinCtasPerSm) / 8 * 8;
  static constexpr bool kMoveRegisters = kLaunchRegisters < 200;
  static constexpr int kLoadRegisters = 64;
  static constexpr int kMathRegisters =
      (kLaunchRegisters * kCtaThreads - kLoadRegisters * kLoadThreads) / kThreads / 8 * 8;

  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsPerPass = kLoadThreads / kChunks;
  static constexpr int kHalfStageBytes = kTile * kRowBytes;
  static constexpr int kStageBytes = 2 * kHalfStageBytes;
  static constexpr int kBlockBytes = 64 * kRowBytes;  // of Q
  static constexpr int kQBytes = kQInRegisters ? 0 : kRowTile * kRowBytes;

  static constexpr int kTileRowBytes = kChunkRowBytes;
  static SPECFUSED_HD constexpr uint32_t kv_offset(int row, int chunk) {
    return block_offset(row, chunk, kTile);
  }
  static SPECFUSED_HD constexpr uint32_t q_offset(int row, int chunk) {
    const int warp = row / (16 * kRowBlocks);
    const int block = warp / 4 * kRowBlocks + row / 16 % kRowBlocks;
    return block * kBlockBytes + block_offset(warp % 4 * 16 + row % 16, chunk, 64);
  }
  // Read where it is used: the loaders have few registers.
  static __device__ __forceinline__ uint32_t load_thread() {
    return ptx::thread_index_here() - kThreads;
  }
  static __device__ __forceinline__ void sync() { ptx::named_sync(kMathBarrier, kThreads); }
};

constexpr int kEndOfSegments = -1;

// K and V of a stage come and go by themselves: K is done with when S is there, V a unit later.
struct HalfBarriers {
  uint64_t full[kWgmmaMaxStages];   // this half of the stage has its rows
  uint64_t empty[kWgmmaMaxStages];  // the math is done with it
};

template <class Traits>
struct SharedFront {
  // From the tile that the math works on to the last slot index: 2 stages + 1 tiles, so many
  // entries may be in use when eight more are filled.
  static constexpr int kSegments = 32;
  static_assert(2 * kWgmmaMaxStages + 1 + kSegmentBatch <= kSegments, "overwrites a live entry");
  // Of the tiles to be loaded next, of as many before them whose V slow loaders still read, and
  // one.
  static constexpr int kIndexRing = 2 * kWgmmaMaxStages + 1;
  smxx::SegmentEntry segments[kSegments];
  int64_t slot_index[kIndexRing][kTile];
  smxx::Cursor tile_of_entry[kIndexRing];
  HalfBarriers keys;
  HalfBarriers values;
  int32_t segment_of_stage[kWgmmaMaxStages];  // or kEndOfSegments
  smxx::PlanEntry entry;
  int32_t filled;
  int32_t next_unit;
  smxx::SegmentEntry pending[2];
  uint64_t seen[2];
  bool closes;
};

}  // namespace specfused::sm90
