// SPDX-License-Identifier: Apache-2.0
// The loaders: one warpgroup that brings slot indices and KV rows of all tiles of a plan entry.
//
// Tile t goes to stage t % stages, its slot indices to entry t % (2 stages + 1). At tile t the
// loaders copy its K and the indices of tile t + stages, which arrive at the barrier of the
// stage's K together, and then its V. A loader reads the indices of tile t behind its wait for the
// math to release the K of tile t - stages, which the math could not read before those copies had
// arrived: so the indices are there, without a barrier among the loaders. Nor does a fast loader
// overwrite indices that a slow one still needs: it is at most stages tiles ahead of the last one
// whose V a slow loader has yet to copy.
#pragma once

#include "../../smxx/attn/loads.cuh"
#include "traits.cuh"

namespace specfused::sm90 {

template <class Traits, class Rows>
struct Loader {
  using Shared = SharedFront<Traits>;
  const AttnParams& p;
  const smxx::AttnLaunch& launch;
  Shared& shared;
  smxx::Cursor index_at{0, smxx::kNotEntered};  // next tile whose slot indices are to be loaded

  static __device__ __forceinline__ void sync() {
    ptx::named_sync(kLoadBarrier, Traits::kLoadThreads);
  }

  // Into the table's next segment, which may have to be filled first. False: there is none.
  // shared.filled changes only between two barriers here: all loaders read the same.
  __device__ __forceinline__ bool enter() {
    if (index_at.segment == shared.filled) {
      if (shared.next_unit >= p.bs * p.num_kv_heads) return false;
      ptx::delay(index_at.segment);
      sync();  // all have read next_unit
      ptx::delay(index_at.segment);
      if (Traits::load_thread() < 32) smxx::fill_segments(p, launch, shared, false);
      sync();
      ptx::delay(index_at.segment);
      if (index_at.segment == shared.filled) return false;
    }
    if (index_at.tile == smxx::kNotEntered) smxx::enter_segment(shared, index_at);
    return true;
  }

  __device__ __forceinline__ void next_index(int entry) {
    const bool more = enter();
    if (Traits::load_thread() == 0) {
      shared.tile_of_entry[entry] = more ? index_at : smxx::Cursor{kEndOfSegments, 0};
    }
    if (!more) return;
    const smxx::SegmentEntry& s = shared.segments[index_at.segment % Shared::kSegments];
    smxx::load_slot_index<Traits>(shared, index_at, entry);
    if (s.tail && index_at.tile == s.tile_begin) {
      smxx::prepare_window<Traits, Rows>(p, shared, index_at.segment);
      ptx::delay(index_at.segment);
      sync();  // the window's rows and s.used are there before any loader needs them
    }
    smxx::advance(shared, index_at);
  }

  // What was written without cp.async is released by one thread, which saw it behind sync().
  __device__ __forceinline__ void arrive(uint64_t& full) {
    ptx::delay(index_at.tile);
    ptx::barrier_arrive_after_copies(ptx::smem_address(&full));
    if (Traits::load_thread() == 0) ptx::barrier_arrive(ptx::smem_address(&full));
  }

  __device__ __forceinline__ void run(uint32_t ring) {
    const int stages = launch.stages;
    const int entries = 2 * stages + 1;
    // The slot indices of the first tiles, before anything else.
    int index_entry = 0;
    for (; index_entry < stages; ++index_entry) next_index(index_entry);
    ptx::cp_async_commit();
    ptx::cp_async_wait(0);
    sync();

    int stage = 0;
    int entry = 0;
    uint32_t parity = 1;  // the first round finds all stages empty
#pragma unroll 1
    while (true) {
      ptx::delay(index_at.tile);
      ptx::barrier_wait(ptx::smem_address(&shared.keys.empty[stage]), parity);
      ptx::delay(index_at.tile);
      const smxx::Cursor at = shared.tile_of_entry[entry];
      const uint32_t address = ring + stage * Traits::kStageBytes;
      if (Traits::load_thread() == 0) shared.segment_of_stage[stage] = at.segment;
      if (at.segment == kEndOfSegments) break;
      smxx::load_tile<Traits, smxx::kKeys>(p, launch, shared, at, entry, address);
      ptx::delay(at.tile);
      next_index(index_entry);
      arrive(shared.keys.full[stage]);
      ptx::barrier_wait(ptx::smem_address(&shared.values.empty[stage]), parity);
      ptx::delay(at.tile);
      smxx::load_tile<Traits, smxx::kValues>(p, launch, shared, at, entry, address);
      arrive(shared.values.full[stage]);
      if (++index_entry == entries) index_entry = 0;
      if (++entry == entries) entry = 0;
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    arrive(shared.keys.full[stage]);
    ptx::cp_async_commit();
    ptx::cp_async_wait(0);
  }
};

}  // namespace specfused::sm90
