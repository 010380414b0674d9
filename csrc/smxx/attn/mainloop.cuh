// SPDX-License-Identifier: Apache-2.0
// One KV tile in shared memory against the rows of one warp: S = Q K^T, online softmax, O += P V.
//
// What happens to a row depends on that row alone: its max, sum and rescaling are its own, a masked
// score is replaced before it counts, and a masked column then adds exact zeros. So a row's bits do
// not depend on how many rows or window columns the step has. The fused multiply-adds are spelled
// out, so that every instantiation rounds alike.
#pragma once

#include <math_constants.h>

#include "loads.cuh"

namespace specfused::smxx {

// The state of a warp's rows. Block b, half h: row 16 b + 8 h + lane / 4.
template <class Traits>
struct RowState {
  static constexpr int kBlocks = Traits::kRowBlocks;
  float o[kBlocks][Traits::kHeadDim / 8][4];
  float max[kBlocks][2];  // of the unscaled scores
  float sum[kBlocks][2];  // of this lane's columns only, until the segment ends

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][n][i] = 0.0f;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[b][h] = -CUDART_INF_F;
        sum[b][h] = 0.0f;
      }
    }
  }
};

constexpr float kLazyExponent = 8.0f;

// A score maximum as an exponent of 2, or 0 while nothing was visible: exp2 of -inf minus it is 0.
__device__ __forceinline__ float exponent_of(float max, float scale) {
  return max == -CUDART_INF_F ? 0.0f : __fmul_rn(max, scale);
}

// Bit q: may a row with `word` see position tile * kTile + q?
__device__ __forceinline__ uint64_t visible_positions(TreeWord word, int committed, int tile) {
  const int window = committed - tile * kTile;  // place of window column 0
  if (window >= kTile) return ~uint64_t{0};
  if (window >= 0) return (word << window) | ((uint64_t{1} << window) - 1);
  return window > -kTile ? word >> -window : 0;
}

// Bits 0, 1, 8, 9, 16, 17, 24, 25 -> 0 to 7.
__device__ __forceinline__ uint32_t every_8th_pair(uint32_t bits) {
  bits &= 0x03030303;
  bits |= bits >> 6;
  return (bits | bits >> 12) & 0xff;
}

template <class Traits>
struct WarpTile {
  using Op = ptx::Element<typename Traits::Element>;
  static constexpr int kBlocks = Traits::kRowBlocks;
  static constexpr int kDimSteps = Traits::kHeadDim / 16;
  static constexpr int kTokenBlocks = Traits::kStepTokens / 16;
  static constexpr int kBlockBytes = 16 * Traits::kRowBytes;  // 16 tokens or rows
  using BlockScores = float[Traits::kStepTokens / 8][4];
  using Scores = BlockScores[kBlocks];

  // Per lane: where its row of each 8 x 8 matrix is. A chunk index 2 n enters by XOR: see swizzle.
  uint32_t k_offset;
  uint32_t v_offset;
  uint32_t q_address;

  __device__ __forceinline__ WarpTile(uint32_t q_smem) {
    const int thread = ptx::thread_index_here();
    const int lane = thread % 32;
    const int first_token = thread / 32 % Traits::kTokenGroups * Traits::kWarpTokens;
    const int row_group = thread / 32 / Traits::kTokenGroups;
    // K: matrices (tokens 0-7, d 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15) of a 16 x 16 block
    k_offset =
        swizzled_offset(first_token + lane / 16 * 8 + lane % 8, lane / 8 % 2, Traits::kRowBytes);
    // V, transposed: (0-7, 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15). Q: the same order.
    const int row = lane / 8 % 2 * 8 + lane % 8;
    v_offset =
        swizzled_offset(first_token + row, lane / 16, Traits::kRowBytes) + Traits::kHalfStageBytes;
    q_address =
        q_smem + swizzled_offset(row_group * 16 * kBlocks + row, lane / 16, Traits::kRowBytes);
  }

  __device__ __forceinline__ void scores(uint32_t stage, const uint32_t (&q)[kDimSteps][4],
                                         Scores& s) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < Traits::kStepTokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[b][n][i] = 0.0f;
      }
    }
    const uint32_t k_address = stage + k_offset;
#pragma unroll
    for (int d = 0; d < kDimSteps; ++d) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if constexpr (Traits::kQInRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[b][i] = q[d][i];
        } else {
          ptx::ldmatrix_x4(a[b], (q_address ^ (d * 32)) + b * kBlockBytes);
        }
      }
#pragma unroll
      for (int n = 0; n < kTokenBlocks; ++n) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, (k_address ^ (d * 32)) + n * kBlockBytes);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          Op::mma(s[b][2 * n], a[b], k[0], k[1]);
          Op::mma(s[b][2 * n + 1], a[b], k[2], k[3]);
        }
      }
    }
  }

  // What row (block b, half h) sees: bit 2 n + i is this lane's column i of the n-th 8 tokens.
  template <class Rows>
  static __device__ __forceinline__ uint32_t look_up(const AttnParams& p, const AttnLaunch& launch,
                                                     const SegmentEntry& segment, int tile,
                                                     int packed_row, int first_token) {
    const int lane = threadIdx.x % 32;
    const int row = row_of(launch, packed_row + lane / 4);
    const TreeWord word =
        row < Rows::num_rows(p) ? Rows::word(p, segment.request, row) & segment.used : 0;
    const uint64_t columns =
        visible_positions(word, segment.committed, tile) >> (first_token + lane % 4 * 2);
    return every_8th_pair(static_cast<uint32_t>(columns)) |
           every_8th_pair(static_cast<uint32_t>(columns >> 32)) << 8;
  }

  static __device__ __forceinline__ void mask(uint32_t visible, int h, BlockScores& s) {
#pragma unroll
    for (int n = 0; n < Traits::kStepTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool keep = visible >> (2 * n + i) & 1;
        s[n][2 * h + i] = keep ? s[n][2 * h + i] : -CUDART_INF_F;
      }
    }
  }

  // Scores of one row block -> weights, in place; max and sum of its rows to the new maximum. The
  // factors are what it does to sums of before; changed: one of this lane's is not 1. A lazy
  // maximum follows the true one only when that has grown by a factor of 2^8 in weight, so that O
  // is hardly ever scaled (FlashAttention 4); fp16 holds weights of up to 2^16.
  static __device__ __forceinline__ void weights_of(float scale, int b, BlockScores& s,
                                                    RowState<Traits>& state, float (&rescale)[2],
                                                    bool& changed) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float max = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < Traits::kStepTokens / 8; ++n) {
        max = fmaxf(max, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      }
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      const float before = state.max[b][h];
      max = fmaxf(max, before);
      if (Traits::kLazyMax && __fmul_rn(__fadd_rn(max, -before), scale) <= kLazyExponent) {
        max = before;
      }
      const float exponent = exponent_of(max, scale);
      rescale[h] = before == max ? 1.0f : ptx::exp2_approx(__fmaf_rn(before, scale, -exponent));
      changed |= before != max;
      float sum = __fmul_rn(state.sum[b][h], rescale[h]);
#pragma unroll
      for (int n = 0; n < Traits::kStepTokens / 8; ++n) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[n][i] = ptx::exp2_approx(__fmaf_rn(s[n][i], scale, -exponent));
          sum = __fadd_rn(sum, s[n][i]);
        }
      }
      state.max[b][h] = max;
      state.sum[b][h] = sum;
    }
  }

  static __device__ __forceinline__ void rescale_output(int b, const float (&rescale)[2],
                                                        RowState<Traits>& state) {
#pragma unroll
    for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state.o[b][n][i] = __fmul_rn(state.o[b][n][i], rescale[i / 2]);
      }
    }
  }

  // A factor of 1 changes nothing, so skipping it for all rows of the warp changes no row's bits.
  static __device__ __forceinline__ void softmax(float scale, Scores& s, RowState<Traits>& state) {
    float rescale[kBlocks][2];
    bool changed = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) weights_of(scale, b, s[b], state, rescale[b], changed);
    if (__any_sync(~0u, changed)) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) rescale_output(b, rescale[b], state);
    }
  }

  // Weights of the n-th 16 tokens of one row block as an A fragment.
  static __device__ __forceinline__ void pack_weights(const BlockScores& p, int n,
                                                      uint32_t (&a)[4]) {
    a[0] = Op::pack(p[2 * n][0], p[2 * n][1]);
    a[1] = Op::pack(p[2 * n][2], p[2 * n][3]);
    a[2] = Op::pack(p[2 * n + 1][0], p[2 * n + 1][1]);
    a[3] = Op::pack(p[2 * n + 1][2], p[2 * n + 1][3]);
  }

  __device__ __forceinline__ void weigh_values(uint32_t stage, const Scores& p,
                                               RowState<Traits>& state) const {
    const uint32_t v_address = stage + v_offset;
#pragma unroll
    for (int n = 0; n < kTokenBlocks; ++n) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) pack_weights(p[b], n, a[b]);
#pragma unroll
      for (int d = 0; d < kDimSteps; ++d) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, (v_address ^ (d * 32)) + n * kBlockBytes);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          Op::mma(state.o[b][2 * d], a[b], v[0], v[1]);
          Op::mma(state.o[b][2 * d + 1], a[b], v[2], v[3]);
        }
      }
    }
  }

  // What the rows of this lane see: a half of a register for each. Looked up before anything waits
  // for the tile.
  struct Mask {
    uint32_t visible[kBlocks];
  };

  // first_packed: this warp's first packed row; first_token: of its tokens, within the tile.
  template <class Rows>
  static __device__ __forceinline__ void look_up_all(const AttnParams& p, const AttnLaunch& launch,
                                                     const SegmentEntry& segment, int tile,
                                                     int first_packed, int first_token,
                                                     Mask& mask) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int row = first_packed + 16 * b;
      mask.visible[b] = look_up<Rows>(p, launch, segment, tile, row, first_token) |
                        look_up<Rows>(p, launch, segment, tile, row + 8, first_token) << 16;
    }
  }

  // All of one tile. The mask is used only in tiles that reach into the window.
  template <class Rows>
  __device__ __forceinline__ void attend(const AttnParams& p, const AttnLaunch& launch,
                                         const SegmentEntry& segment, int tile, int first_packed,
                                         int first_token, bool masked, const Mask& early,
                                         uint32_t stage, const uint32_t (&q)[kDimSteps][4],
                                         RowState<Traits>& state) const {
#pragma unroll 1
    for (int step = 0; step < Traits::kWarpTokens; step += Traits::kStepTokens) {
      Scores s;
      scores(stage + step * Traits::kRowBytes, q, s);
      if (masked) {
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          mask(early.visible[i / 2] >> (16 * (i % 2) + step / 4), i % 2, s[i / 2]);
        }
      }
      softmax(launch.scale_log2, s, state);
      weigh_values(stage + step * Traits::kRowBytes, s, state);
    }
  }
};

}  // namespace specfused::smxx
