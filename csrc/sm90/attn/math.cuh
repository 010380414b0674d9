// SPDX-License-Identifier: Apache-2.0
// The math: warpgroups that turn the tiles of the loaders into finished rows.
//
// A unit is one row block of one tile. For each unit, in order, its S and the O of the unit before
// are started together; S ends first, and its softmax is computed while that O still runs. A K is
// released behind its last S, a V behind its last O: a unit later. Both are complete before the
// next unit, so no wgmma is in flight when an O is scaled. The S of one warpgroup is hidden behind
// the softmax of the other one, or of another CTA.
#pragma once

#include "../../smxx/attn/combine.cuh"
#include "traits.cuh"

namespace specfused::sm90 {

template <class Traits, class Rows>
struct Math {
  using Element = typename Traits::Element;
  using Op = ptx::Wgmma<Element>;
  using Tile = smxx::WarpTile<Traits>;
  static constexpr int kBlocks = Traits::kRowBlocks;
  static constexpr int kSteps = Traits::kHeadDim / 16;  // of Q K^T
  static constexpr int kTokenSteps = kTile / 16;        // of P V
  using Scores = typename Tile::BlockScores;
  using Weights = uint32_t[kTokenSteps][4];
  using Queries = uint32_t[kSteps][4];
  using State = smxx::RowState<Traits>;

  // A tile's place in the ring.
  struct Place {
    int stage;
    uint32_t parity;
  };

  // S of block b, committed. The Q of this warpgroup is at q_address or in q.
  static __device__ __forceinline__ void start_scores(int b, uint32_t stage, uint32_t q_address,
                                                      const Queries& q, Scores& s) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t keys = row_descriptor(stage, 16 * k, kTile);
      if constexpr (Traits::kQInRegisters) {
        Op::template multiply<false>(s, q[k], keys, k > 0);
      } else {
        const uint32_t block = q_address + b * Traits::kBlockBytes;
        Op::multiply(s, row_descriptor(block, 16 * k, 64), keys, k > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // O += P V of block b, committed.
  static __device__ __forceinline__ void start_values(int b, uint32_t stage, const Weights& w,
                                                      State& state) {
#pragma unroll
    for (int k = 0; k < kTokenSteps; ++k) {
      Op::template multiply<true>(state.o[b], w[k],
                                  column_descriptor(stage + Traits::kHalfStageBytes, 16 * k, kTile),
                                  true);
    }
    ptx::wgmma_commit();
  }

  // The mask is used only in tiles that reach into the window.
  static __device__ __forceinline__ void weigh(float scale, int b, bool masked, uint32_t visible,
                                               Scores& s, State& state, float (&rescale)[2],
                                               bool& changed) {
    if (masked) {
      Tile::mask(visible, 0, s);
      Tile::mask(visible >> 16, 1, s);
    }
    Tile::weights_of(scale, b, s, state, rescale, changed);
  }

  // The queries of this warpgroup. No wgmma that reads the old ones is in flight in this warp.
  static __device__ __forceinline__ void load_queries(const AttnParams& p,
                                                      const smxx::AttnLaunch& launch,
                                                      const smxx::SegmentEntry& s, int first_row,
                                                      char* q_smem, Queries& q) {
    const int warp = threadIdx.x / 32;
    if constexpr (Traits::kQInRegisters) {
      smxx::load_q_fragments<Traits, Rows>(p, launch, s, first_row + 16 * warp, q);
    } else {
      const int barrier = kWarpgroupBarrier + warp / 4;
      ptx::delay(s.tile_begin);
      ptx::named_sync(barrier, 128);  // nor in the others
      ptx::delay(s.tile_begin);
      smxx::load_q_shared<Traits, Rows>(p, launch, s, first_row, q_smem);
      ptx::cp_async_commit();
      ptx::cp_async_wait(0);
      ptx::named_sync(barrier, 128);
      // The fence behind the wait for the first tile comes before the wgmma.
    }
  }

  static __device__ __forceinline__ void run(const AttnParams& p, const smxx::AttnLaunch& launch,
                                             SharedFront<Traits>& shared, int first_row,
                                             char* q_smem, uint32_t ring) {
    const int warp = threadIdx.x / 32;
    const int warp_row = first_row + warp * 16 * kBlocks;
    // By shuffle, so that the compiler knows that lanes agree and keeps descriptors in uniform
    // registers.
    const uint32_t q_address =
        ptx::smem_address(q_smem) + __shfl_sync(~0u, warp / 4, 0) * kBlocks * Traits::kBlockBytes;
    Place at{0, 0};
    smxx::RowState<Traits> state;
    Queries q;

    auto address_of = [&](int i) { return ring + __shfl_sync(~0u, i, 0) * Traits::kStageBytes; };
    auto wait_for = [&](HalfBarriers& half, const Place& place) {
      ptx::barrier_wait(ptx::smem_address(&half.full[place.stage]), place.parity);
      ptx::delay(2 * place.stage + place.parity);
      ptx::async_proxy_fence();  // the copies were made through the generic proxy
    };
    auto release = [&](HalfBarriers& half, const Place& place) {
      __syncwarp();  // behind what any of its lanes has read
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::smem_address(&half.empty[place.stage]));
    };
    auto next_stage = [&] {
      if (++at.stage == launch.stages) at = Place{0, at.parity ^ 1};
    };
    auto look_up = [&](const smxx::SegmentEntry& s, int tile, typename Tile::Mask& mask) {
      const bool masked = (tile + 1) * kTile > s.committed;
      if (masked) Tile::template look_up_all<Rows>(p, launch, s, tile, warp_row, 0, mask);
      return masked;
    };

#pragma unroll 1
    for (int segment = 0;; ++segment) {
      // The first segment is in the table from the start: its queries are on their way before its
      // first tile is there.
      if (segment > 0) {
        wait_for(shared.keys, at);
        if (shared.segment_of_stage[at.stage] == kEndOfSegments) break;
      }
      const smxx::SegmentEntry& s = shared.segments[segment % SharedFront<Traits>::kSegments];
      load_queries(p, launch, s, first_row, q_smem, q);
      state.reset();
      wait_for(shared.keys, at);

      Scores scores;
      Weights weights;
      typename Tile::Mask mask;
      const int tile_end = s.tile_end;
      int tile = s.tile_begin;
      bool masked = look_up(s, tile, mask);

      // The wgmma of one unit, block b of the tile whose K is at `at`, and of the unit before,
      // block `before` of the tile whose V is at `values`. Then the softmax.
      auto unit = [&](int b, int before, const Place& values) {
        float rescale[2];
        bool changed = false;
        const uint32_t keys_address = address_of(at.stage);
        const uint32_t values_address = address_of(values.stage);
        ptx::pin(scores);
        ptx::pin(weights);
        ptx::pin(state.o[before]);
        ptx::wgmma_fence();
        start_scores(b, keys_address, q_address, q, scores);
        start_values(before, values_address, weights, state);
        ptx::wgmma_wait<1>();
        ptx::pin(scores);
        if (b == kBlocks - 1) release(shared.keys, at);
        weigh(launch.scale_log2, b, masked, mask.visible[b], scores, state, rescale, changed);
        ptx::pin(scores);  // before the wait
        ptx::wgmma_wait<0>();
        ptx::pin(state.o[before]);
        if (before == kBlocks - 1) release(shared.values, values);
        if (__any_sync(~0u, changed)) Tile::rescale_output(b, rescale, state);
        ptx::pin(weights);
#pragma unroll
        for (int k = 0; k < kTokenSteps; ++k) Tile::pack_weights(scores, k, weights[k]);
      };

      // The first unit has none before it, and its O nothing to scale.
      {
        float rescale[2];
        bool changed = false;
        ptx::pin(scores);
        ptx::wgmma_fence();
        start_scores(0, address_of(at.stage), q_address, q, scores);
        ptx::wgmma_wait<0>();
        ptx::pin(scores);
        if (kBlocks == 1) release(shared.keys, at);
        weigh(launch.scale_log2, 0, masked, mask.visible[0], scores, state, rescale, changed);
#pragma unroll
        for (int k = 0; k < kTokenSteps; ++k) Tile::pack_weights(scores, k, weights[k]);
      }
#pragma unroll 1
      while (true) {
        ptx::delay(tile);
        wait_for(shared.values, at);
        if constexpr (kBlocks == 2) unit(1, 0, at);
        if (++tile == tile_end) break;
        const Place values = at;
        next_stage();
        masked = look_up(s, tile, mask);
        ptx::delay(tile);
        wait_for(shared.keys, at);
        unit(0, kBlocks - 1, values);
      }
      ptx::pin(weights);
      ptx::pin(state.o[kBlocks - 1]);
      ptx::wgmma_fence();
      start_values(kBlocks - 1, address_of(at.stage), weights, state);
      ptx::wgmma_wait<0>();
      ptx::pin(state.o[kBlocks - 1]);
      ptx::pin(weights);
      release(shared.values, at);
      next_stage();

      const smxx::Partials partials(p.workspace, p, launch.rows);
      const int row_tile = blockIdx.x;
      const smxx::RowSink<Traits, Rows> sink(p, launch, s, partials,
                                             smxx::closes<Traits>(p, shared, s, row_tile));
      ptx::delay(segment);
      smxx::finish_many<Traits, Rows>(first_row, warp, state, sink);
      ptx::delay(segment);
      if (!sink.direct() && threadIdx.x == 0) shared.pending[s.split == 0] = s;
      if (s.split > 0 && s.num_splits <= smxx::kMostClosed) {
        Traits::sync();
        if (threadIdx.x == 0) smxx::arrive(p, shared, 0, row_tile);
      }
    }
  }
};

}  // namespace specfused::sm90
