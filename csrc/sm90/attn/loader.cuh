// SPDX-License-Identifier: Apache-2.0
// The loaders: one warpgroup that brings slot indices and KV rows of all tiles of a plan entry.
//
// Tile t goes to stage t % stages, its slot indices to entry t % (2 stages). At tile t the loaders
// copy its KV and the indices of tile t + stages, and these copies arrive at the stage's barrier
// together. A loader reads the indices of tile t behind its wait for the math to release tile
// t - stages, which the math could not start on before those copies had arrived: so the indices are
// there, without a barrier among the loaders. Nor does a fast loader overwrite indices that a slow
// one still needs: their entry comes again 2 stages later.
#pragma once

#include "../../smxx/attn/loads.cuh"
#include "traits.cuh"

namespace specfused::sm90 {

template <class Traits, class Rows>
struct Loader {
  const AttnParams& p;
  const smxx::AttnLaunch& launch;
  SharedFront<Traits>& shared;
  smxx::Cursor index_at{0, smxx::kNotEntered};  // next tile whose slot indices are to be loaded

  static __device__ __forceinline__ void sync() {
    ptx::named_sync(kLoadBarrier, Traits::kLoadThreads);
  }

  // Into the table's next segment, which may have to be filled first. False: there is none.
  // shared.filled changes only between two barriers here: all loaders read the same.
  __device__ __forceinline__ bool enter() {
    if (index_at.segment == shared.filled) {
      if (shared.next_unit >= p.bs * p.num_kv_heads) return false;
      sync();  // all have read next_unit
      if (Traits::load_thread() < 32) smxx::fill_segments(p, launch, shared, false);
      sync();
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
    const smxx::SegmentEntry& s = shared.segments[index_at.segment % kSegmentRing];
    smxx::load_slot_index<Traits>(shared, index_at, entry);
    if (s.tail && index_at.tile == s.tile_begin) {
      smxx::prepare_window<Traits, Rows>(p, shared, index_at.segment);
      sync();  // the window's rows and s.used are there before any loader needs them
    }
    smxx::advance(shared, index_at);
  }

  // False: there are no more tiles.
  __device__ __forceinline__ bool next_load(int entry, int stage, uint32_t address) {
    const smxx::Cursor at = shared.tile_of_entry[entry];
    if (Traits::load_thread() == 0) shared.segment_of_stage[stage] = at.segment;
    if (at.segment == kEndOfSegments) return false;
    smxx::load_tile<Traits>(p, launch, shared, at, entry, address);
    return true;
  }

  __device__ __forceinline__ void run(uint32_t ring) {
    const int stages = launch.stages;
    int ahead = 0;        // tiles between the two cursors
    int index_entry = 0;  // of the next slot indices
    int stage = 0;
    uint32_t parity = 1;  // the first round finds all stages empty
    bool more = true;
#pragma unroll 1
    while (more) {
      const bool loading = ahead == stages;
      if (loading) {
        ptx::barrier_wait(ptx::smem_address(&shared.empty[stage]), parity);
        const int entry = index_entry < stages ? index_entry + stages : index_entry - stages;
        more = next_load(entry, stage, ring + stage * Traits::kStageBytes);
      }
      if (more) next_index(index_entry);
      if (++index_entry == 2 * stages) index_entry = 0;
      if (loading) {
        const uint32_t full = ptx::smem_address(&shared.full[stage]);
        ptx::barrier_arrive_after_copies(full);
        // What was written without cp.async is released by one thread, which saw it behind sync().
        if (Traits::load_thread() == 0) ptx::barrier_arrive(full);
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      } else if (++ahead == stages) {
        ptx::cp_async_commit();
        ptx::cp_async_wait(0);
        sync();
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait(0);
  }
};

}  // namespace specfused::sm90
