// SPDX-License-Identifier: Apache-2.0
// The math: warpgroups that turn the tiles of the loaders into finished rows.
//
// For each stage, in order, its S and the O of the stage before are started together; S ends first,
// and its softmax is computed while that O still runs. A K is released behind its S, a V behind its
// O. Both are complete before the next stage, so no wgmma is in flight when O is scaled. The S of
// one warpgroup is hidden behind the softmax of the other one, or of another CTA. Two warpgroups of
// a CTA take turns in starting theirs, else both would do the same at the same time
// (FlashAttention 3).
#pragma once

#include "../../smxx/attn/epilogue.cuh"
#include "traits.cuh"

namespace specfused::sm90 {

template <class Traits, class Rows>
struct Math {
  using Element = typename Traits::Element;
  using Op = ptx::Wgmma<Element>;
  using Tile = smxx::WarpTile<Traits>;
  static constexpr int kTokens = Traits::kStageTokens;
  static constexpr int kTiles = Traits::kStageTiles;
  static constexpr int kSteps = Traits::kHeadDim / 16;  // of Q K^T
  static constexpr int kTokenSteps = kTokens / 16;      // of P V
  using Scores = typename Tile::BlockScores;
  using Weights = uint32_t[kTokenSteps][4];
  using Queries = uint32_t[kSteps][4];
  using State = smxx::RowState<Traits>;

  // A tile's place in the ring.
  struct Place {
    int stage;
    uint32_t parity;
  };

  // What this lane's rows see of a stage, looked up before anything waits for it.
  struct Mask {
    bool used;
    typename Tile::Mask of_tile[kTiles];
  };

  // S, committed. The Q of this warpgroup is at q_address or in q.
  static __device__ __forceinline__ void start_scores(uint32_t stage, uint32_t q_address,
                                                      const Queries& q, Scores& s) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t keys = row_descriptor(stage, 16 * k, kTokens);
      if constexpr (Traits::kQInRegisters) {
        Op::template multiply<false>(s, q[k], keys, k > 0);
      } else {
        Op::multiply(s, row_descriptor(q_address, 16 * k, 64), keys, k > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // O += P V, committed.
  static __device__ __forceinline__ void start_values(uint32_t stage, const Weights& w,
                                                      State& state) {
#pragma unroll
    for (int k = 0; k < kTokenSteps; ++k) {
      const uint64_t values = column_descriptor(stage + Traits::kHalfStageBytes, 16 * k, kTokens);
      Op::template multiply<true>(state.o[0], w[k], values, true);
    }
    ptx::wgmma_commit();
  }

  // Only stages that reach into the window or behind the segment have a mask.
  static __device__ __forceinline__ void look_up(const AttnParams& p,
                                                 const smxx::AttnLaunch& launch,
                                                 const smxx::SegmentEntry& s, int tile,
                                                 int warp_row, Mask& mask) {
    mask.used = (tile + kTiles) * kTile > s.committed || tile + kTiles > s.tile_end;
    if (!mask.used) return;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mask.of_tile[i].visible[0] = 0;
      if (tile + i >= s.tile_end) continue;
      Tile::template look_up_all<Rows>(p, launch, s, tile + i, warp_row, 0, mask.of_tile[i]);
    }
  }

  static __device__ __forceinline__ void pack(const Scores& s, Weights& weights) {
#pragma unroll
    for (int k = 0; k < kTokenSteps; ++k) Tile::pack_weights(s, k, weights[k]);
  }

  static __device__ __forceinline__ void weigh(float scale, const Mask& mask, Scores& s,
                                               State& state, float (&rescale)[2], bool& changed) {
    if (mask.used) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint32_t visible = mask.of_tile[i].visible[0];
        Tile::mask(visible, 0, i * kTile / 8, s);
        Tile::mask(visible >> 16, 1, i * kTile / 8, s);
      }
    }
    Tile::weights_of(scale, 0, s, state, rescale, changed);
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
      ptx::named_sync(barrier, 128);  // nor in the others
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
    const int warp_row = first_row + warp * 16;
    // By shuffle, so that the compiler knows that lanes agree and keeps descriptors in uniform
    // registers.
    const uint32_t q_address =
        ptx::smem_address(q_smem) + __shfl_sync(~0u, warp / 4, 0) * Traits::kBlockBytes;
    Place at{0, 0};
    smxx::RowState<Traits> state;
    Queries q;

    auto address_of = [&](int i) { return ring + __shfl_sync(~0u, i, 0) * Traits::kStageBytes; };
    auto wait_for = [&](HalfBarriers& half, const Place& place) {
      ptx::barrier_wait(ptx::smem_address(&half.full[place.stage]), place.parity);
      ptx::async_proxy_fence();  // the copies were made through the generic proxy
    };
    auto release = [&](HalfBarriers& half, const Place& place) {
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::smem_address(&half.empty[place.stage]));
    };
    auto next_stage = [&] {
      if (++at.stage == launch.stages) at = Place{0, at.parity ^ 1};
    };
    constexpr bool kTurns = Traits::kWarpgroups == 2;
    const int warpgroup = warp / 4;
    auto take_turn = [&] {
      if constexpr (kTurns) ptx::named_sync(kTurnBarrier + warpgroup, Traits::kThreads);
    };
    auto give_turn = [&] {
      if constexpr (kTurns) ptx::named_arrive(kTurnBarrier + 1 - warpgroup, Traits::kThreads);
    };
    if (warpgroup == 1) give_turn();
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
      Mask mask;
      float rescale[2];
      const int tile_end = s.tile_end;
      int tile = s.tile_begin;
      look_up(p, launch, s, tile, warp_row, mask);

      // The first S has no O beside it, and there is nothing to scale.
      uint32_t address = address_of(at.stage);
      bool changed = false;
      ptx::pin(scores);
      take_turn();
      ptx::wgmma_fence();
      start_scores(address, q_address, q, scores);
      give_turn();
      ptx::wgmma_wait<0>();
      ptx::pin(scores);
      release(shared.keys, at);
      weigh(launch.scale_log2, mask, scores, state, rescale, changed);
      pack(scores, weights);
      wait_for(shared.values, at);
#pragma unroll 1
      while ((tile += kTiles) < tile_end) {
        const Place before = at;
        const uint32_t address_before = address;
        next_stage();
        address = address_of(at.stage);
        look_up(p, launch, s, tile, warp_row, mask);
        wait_for(shared.keys, at);
        changed = false;
        ptx::pin(scores);
        ptx::pin(weights);
        ptx::pin(state.o[0]);
        take_turn();
        ptx::wgmma_fence();
        start_scores(address, q_address, q, scores);
        start_values(address_before, weights, state);
        give_turn();
        ptx::wgmma_wait<1>();
        ptx::pin(scores);
        release(shared.keys, at);
        weigh(launch.scale_log2, mask, scores, state, rescale, changed);
        ptx::pin(scores);  // before the wait
        ptx::wgmma_wait<0>();
        ptx::pin(state.o[0]);
        release(shared.values, before);
        if (__any_sync(~0u, changed)) Tile::rescale_output(0, rescale, state);
        ptx::pin(weights);
        pack(scores, weights);
        wait_for(shared.values, at);
      }
      ptx::pin(weights);
      ptx::pin(state.o[0]);
      take_turn();
      ptx::wgmma_fence();
      start_values(address, weights, state);
      give_turn();
      ptx::wgmma_wait<0>();
      ptx::pin(state.o[0]);
      ptx::pin(weights);
      release(shared.values, at);
      next_stage();

      const smxx::Partials partials(p.workspace, p, launch.rows);
      const smxx::RowSink<Traits, Rows> sink(p, launch, s, partials);
      smxx::finish_many<Traits, Rows>(first_row, warp, state, sink);
      if (!sink.direct() && threadIdx.x == 0) shared.pending[s.split == 0] = s;
    }
    if (warpgroup == 0) take_turn();  // the last one given
  }
};

}  // namespace specfused::sm90
