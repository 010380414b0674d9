// SPDX-License-Identifier: Apache-2.0
// The body that verify.cuh and decode.cuh share: pipeline over the tiles of one plan entry.
//
// At tile t the CTA computes on stage t, has the KV of the next stages - 1 tiles in flight, and the
// slot indices of as many more: indices of tile i travel in the same cp.async group as the KV of
// tile i - (stages - 1), so waiting for one group per tile covers both. One barrier per tile.
#pragma once

#include "combine.cuh"
#include "launch.cuh"

namespace specfused::smxx {

template <class Traits, class Rows>
__device__ __forceinline__ void attend_plan_entry(const AttnParams& p, const AttnLaunch& launch) {
  using Shared = SharedFront<Traits>;
  extern __shared__ __align__(1024) char smem[];
  static_assert(sizeof(Shared) <= Traits::kQOffset);
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  char* ring = smem + Traits::kRingOffset;

  const int row_tile = blockIdx.x;
  const int warp = threadIdx.x / 32;
  const int token_group = warp % Traits::kTokenGroups;
  const int row_group = warp / Traits::kTokenGroups;
  const int first_row = row_tile * Traits::kRowTile;
  const int warp_row = first_row + row_group * Traits::kRowBlocks * 16;
  const int stages = launch.stages;
  const uint32_t ring_address = ptx::smem_address(ring);

  ptx::delay(0);
  ptx::let_next_launch_start();
  ptx::wait_for_previous_launch();
  ptx::delay(0);
  if (warp == 0) fill_segments(p, launch, shared, true);
  __syncthreads();
  ptx::delay(0);
  // shared.filled changes only between two barriers in next_index: all threads read the same.
  if (shared.filled == 0) return;

  Cursor math_at{0, kNotEntered};
  enter_segment(shared, math_at);
  keep_cursor(shared.index_at[warp], math_at);
  keep_cursor(shared.load_at[warp], math_at);

  // Slot indices of the next tile; all threads, since a new segment may need the whole CTA. Ring
  // entry i holds the indices of the tile that goes to stage i.
  auto next_index = [&](int ring_entry) {
    Cursor at = shared.index_at[warp];
    if (at.segment == shared.filled) {
      if (shared.next_unit >= p.bs * p.num_kv_heads) return;
      ptx::delay(at.segment);
      __syncthreads();  // all have read next_unit
      ptx::delay(at.segment);
      if (warp == 0) fill_segments(p, launch, shared, false);
      __syncthreads();
      ptx::delay(at.segment);
      if (at.segment == shared.filled) return;
      enter_segment(shared, at);
    }
    const SegmentEntry& s = shared.segments[at.segment % Shared::kSegments];
    load_slot_index<Traits>(shared, at, ring_entry);
    if (s.tail && at.tile == s.tile_begin) prepare_window<Traits, Rows>(p, shared, at.segment);
    advance(shared, at);
    keep_cursor(shared.index_at[warp], at);
  };
  auto next_load = [&](int stage) {
    Cursor at = shared.load_at[warp];
    if (at.segment == shared.filled) return;
    if (at.tile == kNotEntered) enter_segment(shared, at);
    load_tile<Traits, kBoth>(p, launch, shared, at, stage,
                             ring_address + stage * Traits::kStageBytes);
    advance(shared, at);
    keep_cursor(shared.load_at[warp], at);
  };
  auto before = [&](int stage) { return stage == 0 ? stages - 1 : stage - 1; };

  // Indices of the first stages - 1 tiles, then their KV and the indices of as many more.
  const int ahead = max_of(stages - 1, 1);
#pragma unroll 1
  for (int i = 0; i < ahead + stages - 1; ++i) {
    const int stage = i - ahead;
    if (stage >= 0) {
      if (stage == 0) ptx::cp_async_wait(0);
      ptx::delay(i);
      __syncthreads();  // the indices are there; ring entry before(stage) has been read
      next_load(stage);
    }
    ptx::delay(i);
    next_index(stage >= 0 ? before(stage) : i);
    ptx::cp_async_commit();
  }
  if (stages == 1) __syncthreads();  // no barrier yet behind the first tile's prepare_window

  RowState<Traits> state;
  uint32_t q[Traits::kHeadDim / 16][4];
  state.reset();

  for (int stage = 0; math_at.segment < shared.filled;
       stage = stage + 1 == stages ? 0 : stage + 1) {
    const SegmentEntry& s = shared.segments[math_at.segment % Shared::kSegments];
    const bool segment_begins = math_at.tile == s.tile_begin;
    int in_flight = stages - 2;
    // What comes from global memory comes on its way before anything waits for the tile.
    if (segment_begins) {
      if constexpr (Traits::kQInRegisters) {
        load_q_fragments<Traits, Rows>(p, launch, s, warp_row, q);
      } else {
        load_q_shared<Traits, Rows>(p, launch, s, first_row, smem + Traits::kQOffset);
        if constexpr (Traits::kQByCopy) {
          ptx::cp_async_commit();
          in_flight = 0;
        }
      }
    }
    const bool masked = (math_at.tile + 1) * kTile > s.committed;
    const int first_token = token_group * Traits::kWarpTokens;
    typename WarpTile<Traits>::Mask mask;
    if (masked) {
      WarpTile<Traits>::template look_up_all<Rows>(p, launch, s, math_at.tile, warp_row,
                                                   first_token, mask);
    }

    ptx::delay(math_at.tile);
    ptx::cp_async_wait(in_flight);
    __syncthreads();  // this stage is there, the one before it is free
    if (segment_begins && math_at.segment == 1 && threadIdx.x == 0) {
      arrive_early<Traits>(p, launch, shared, row_tile);
    }
    ptx::delay(math_at.tile);
    next_load(before(stage));
    if (stages == 1) __syncthreads();  // the only ring entry has been read
    ptx::delay(math_at.tile);
    next_index(before(before(stage)));
    ptx::cp_async_commit();
    if (stages == 1) {
      ptx::cp_async_wait(0);
      __syncthreads();
    }

    ptx::delay(math_at.tile);
    const WarpTile<Traits> warp_tile(ptx::smem_address(smem + Traits::kQOffset));
    warp_tile.template attend<Rows>(p, launch, s, math_at.tile, warp_row, first_token, masked, mask,
                                    ring_address + stage * Traits::kStageBytes, q, state);

    if (math_at.tile + 1 == s.tile_end) {
      const Partials partials(p.workspace, p, launch.rows);
      const RowSink<Traits, Rows> sink(p, launch, s, partials,
                                       closes<Traits>(p, shared, s, row_tile));
      ptx::delay(math_at.segment);
      if constexpr (Traits::kFew) {
        finish_few<Traits, Rows>(shared, ring + stage * Traits::kStageBytes, first_row, token_group,
                                 row_group, state, sink);
      } else {
        finish_many<Traits, Rows>(first_row, row_group, state, sink);
      }
      ptx::delay(math_at.segment);
      if (!sink.direct() && threadIdx.x == 0) shared.pending[s.split == 0] = s;
      state.reset();
    }
    advance(shared, math_at);
  }
  combine<Traits, Rows>(p, launch, shared, row_tile);
}

}  // namespace specfused::smxx
