// SPDX-License-Identifier: Apache-2.0
// The end of a segment: merge of the token groups, then either the result (the
// unit has one split) or a partial result, which the last CTA of the unit to
// arrive combines in split order.
#pragma once

#include "mainloop.cuh"

namespace specfused::smxx {

constexpr float kLn2 = 0.693147180559945309f;

// Partial results in the workspace, behind the counters: O not normalised, max
// as an exponent of 2.
struct Partials {
  uint32_t* counters;
  float2* stats;  // [slot, packed row] max, sum
  float* o;       // [slot, packed row, head_dim]
  int64_t rows;   // packed rows of a unit

  __device__ __forceinline__ Partials(void* workspace, const AttnParams& p, int64_t packed_rows) {
    auto* base = static_cast<char*>(workspace);
    rows = packed_rows;
    counters = reinterpret_cast<uint32_t*>(base);
    o = reinterpret_cast<float*>(base + kCounterBytes);
    stats = reinterpret_cast<float2*>(o + attn_partial_rows(p.num_ctas, rows) * p.head_dim);
  }
};

// 1 / sum; a row that saw nothing has sum 0 and O 0, and its result is 0.
__device__ __forceinline__ float normaliser(float sum) {
  return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
}

// Where finished rows of a segment go.
template <class Traits, class Rows>
struct RowSink {
  const AttnParams& p;
  const AttnLaunch& launch;
  const SegmentEntry& segment;
  const Partials& partials;
  int64_t slot;

  __device__ __forceinline__ RowSink(const AttnParams& params, const AttnLaunch& launched,
                                     const SegmentEntry& s, const Partials& parts)
      : p(params),
        launch(launched),
        segment(s),
        partials(parts),
        slot(partial_slot(s.first_cta + s.split, s.split == 0)) {}

  __device__ __forceinline__ bool direct() const { return segment.num_splits == 1; }

  __device__ __forceinline__ typename Traits::Element* out_row(int packed) const {
    const RowPlace place = row_place<Rows>(p, launch.group, segment, packed);
    return static_cast<typename Traits::Element*>(p.out) + place.row * p.stride_out_row +
           place.head * p.stride_out_head;
  }

  __device__ __forceinline__ float* partial_row(int packed) const {
    return partials.o + (slot * partials.rows + packed) * Traits::kHeadDim;
  }

  // max is an exponent of 2, or -inf.
  __device__ __forceinline__ void put_stats(int packed, float max, float sum) const {
    if (!direct()) {
      partials.stats[slot * partials.rows + packed] = make_float2(max, sum);
    } else {
      put_lse(packed, max, sum);
    }
  }

  __device__ __forceinline__ void put_lse(int packed, float max, float sum) const {
    if (p.lse == nullptr) return;
    const RowPlace place = row_place<Rows>(p, launch.group, segment, packed);
    p.lse[place.row * p.num_q_heads + place.head] =
        sum == 0.0f ? -CUDART_INF_F : (max + __log2f(sum)) * kLn2;
  }
};

template <class Traits>
__device__ __forceinline__ uint2 pack4(const float4& x) {
  using Op = ptx::Element<typename Traits::Element>;
  return make_uint2(Op::pack(x.x, x.y), Op::pack(x.z, x.w));
}

// Class few. Each pass: the warps that hold 16 given rows put their O, scaled
// to the common maximum, into the stage that was read last (no load into it is
// issued before the next barrier of the main loop); then all threads add the
// four parts in token-group order and store.
template <class Traits, class Rows, class Shared>
__device__ __forceinline__ void finish_few(Shared& shared, char* stage, int first_row,
                                           int token_group, int row_group, RowState<Traits>& state,
                                           const RowSink<Traits, Rows>& sink) {
  const int rows = sink.launch.rows;
  const float scale = sink.launch.scale_log2;
  constexpr int kDim = Traits::kHeadDim;
  constexpr int kGroups = Traits::kTokenGroups;
  const int lane = threadIdx.x % 32;
  float2* stats = shared.row_stats;
#pragma unroll
  for (int b = 0; b < Traits::kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = state.sum[b][h];
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
      const int row = (row_group * Traits::kRowBlocks + b) * 16 + h * 8 + lane / 4;
      const float max = state.max[b][h];
      if (lane % 4 == 0) {
        stats[token_group * Traits::kRowTile + row] =
            make_float2(max == -CUDART_INF_F ? max : __fmul_rn(max, scale), sum);
      }
    }
  }
  __syncthreads();

  auto common_max = [&](int row) {
    float max = stats[row].x;
#pragma unroll
    for (int g = 1; g < kGroups; ++g) max = fmaxf(max, stats[g * Traits::kRowTile + row].x);
    return max;
  };
  auto factor = [&](int group, int row, float max) {
    return ptx::exp2_approx(stats[group * Traits::kRowTile + row].x -
                            (max == -CUDART_INF_F ? 0.0f : max));
  };
  // Element (row, d) of a part is at d ^ 8 (row % 8): conflict-free writes by
  // fragment.
  auto* parts = reinterpret_cast<float*>(stage);

#pragma unroll
  for (int pass = 0; pass < Traits::kRowTile / 16; ++pass) {
    if (first_row + pass * 16 >= rows) break;
    if (pass > 0) __syncthreads();
    if (row_group == pass / Traits::kRowBlocks) {
      constexpr int kBlocks = Traits::kRowBlocks;
      const int b = kBlocks == 1 ? 0 : pass % kBlocks;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = h * 8 + lane / 4;
        const float f = factor(token_group, pass * 16 + row, common_max(pass * 16 + row));
        float* to = parts + (token_group * 16 + row) * kDim;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const int d = (n * 8 + lane % 4 * 2) ^ (row % 8 * 8);
          *reinterpret_cast<float2*>(to + d) = make_float2(__fmul_rn(state.o[b][n][2 * h], f),
                                                           __fmul_rn(state.o[b][n][2 * h + 1], f));
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * kDim / 4; i += Traits::kThreads) {
      const int row = i / (kDim / 4);
      const int d = i % (kDim / 4) * 4;
      const int packed = first_row + pass * 16 + row;
      if (packed >= rows) break;
      const float* from = parts + row * kDim + (d ^ (row % 8 * 8));
      float4 o = *reinterpret_cast<const float4*>(from);
      const float max = common_max(pass * 16 + row);
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        sum = __fmaf_rn(stats[g * Traits::kRowTile + pass * 16 + row].y,
                        factor(g, pass * 16 + row, max), sum);
        if (g == 0) continue;
        const float4 part = *reinterpret_cast<const float4*>(from + g * 16 * kDim);
        o.x = __fadd_rn(o.x, part.x);
        o.y = __fadd_rn(o.y, part.y);
        o.z = __fadd_rn(o.z, part.z);
        o.w = __fadd_rn(o.w, part.w);
      }
      if (sink.direct()) {
        const float f = normaliser(sum);
        const float4 result =
            make_float4(__fmul_rn(o.x, f), __fmul_rn(o.y, f), __fmul_rn(o.z, f), __fmul_rn(o.w, f));
        *reinterpret_cast<uint2*>(sink.out_row(packed) + d) = pack4<Traits>(result);
      } else {
        *reinterpret_cast<float4*>(sink.partial_row(packed) + d) = o;
      }
      if (d == 0) sink.put_stats(packed, max, sum);
    }
  }
}

// Class many: a warp has whole rows.
template <class Traits, class Rows>
__device__ __forceinline__ void finish_many(int first_row, int row_group, RowState<Traits>& state,
                                            const RowSink<Traits, Rows>& sink) {
  const int rows = sink.launch.rows;
  const float scale = sink.launch.scale_log2;
  using Op = ptx::Element<typename Traits::Element>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < Traits::kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = state.sum[b][h];
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
      const int packed = first_row + (row_group * Traits::kRowBlocks + b) * 16 + h * 8 + lane / 4;
      if (packed >= rows) continue;
      const float max = state.max[b][h];
      if (lane % 4 == 0) {
        sink.put_stats(packed, max == -CUDART_INF_F ? max : __fmul_rn(max, scale), sum);
      }
      if (sink.direct()) {
        const float f = normaliser(sum);
        auto* to = sink.out_row(packed) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
          *reinterpret_cast<uint32_t*>(to + n * 8) =
              Op::pack(__fmul_rn(state.o[b][n][2 * h], f), __fmul_rn(state.o[b][n][2 * h + 1], f));
        }
      } else {
        float* to = sink.partial_row(packed) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
          *reinterpret_cast<float2*>(to + n * 8) =
              make_float2(state.o[b][n][2 * h], state.o[b][n][2 * h + 1]);
        }
      }
    }
  }
}

// After the partial results: count the arrival; the last CTA of the unit and
// row tile adds up its rows over all splits, in split order. The barrier before
// the arrival orders all threads' stores before its release, the one after it
// all threads' loads behind its acquire.
//
// One CTA reads splits x rows x head_dim floats out of L2, so what counts is
// loads in flight: the stats come first, all at once, into the stage that was
// read last; then each thread adds up kItems chunks of four elements together.
template <class Traits, class Rows, class Shared>
__device__ __forceinline__ void combine(Shared& shared, char* stage, int row_tile,
                                        const RowSink<Traits, Rows>& sink) {
  constexpr int kDim = Traits::kHeadDim;
  // Chunks of four elements that a thread adds up together, and splits that it loads ahead: with a
  // large O in the main loop, fewer registers are left.
  constexpr int kItems = 4;
  constexpr int kAhead = kDim == 128 && Traits::kRowBlocks == 1 ? 4 : 2;
  const SegmentEntry& s = sink.segment;
  __syncthreads();
  const int thread = ptx::thread_index_here();
  if (thread == 0) {
    const uint32_t last = static_cast<uint32_t>(s.num_splits - 1);
    uint32_t* counter = sink.partials.counters + s.first_cta * kMaxRowTiles + row_tile;
    shared.last_arriver = ptx::arrive_wrapping(counter, last) == last;
  }
  __syncthreads();
  if (!shared.last_arriver) return;

  // Opaque to the compiler, which would otherwise compute addresses ahead of
  // the main loop and keep them in registers that it needs.
  const Partials partials(ptx::opaque(sink.p.workspace), sink.p, ptx::opaque(sink.launch.rows));
  const int splits = s.num_splits;
  const int first_row = row_tile * Traits::kRowTile;
  const int num = min_of(Traits::kRowTile, sink.launch.rows - first_row);
  // Parts of splits 1, 2, ... follow each other; that of split 0 is elsewhere.
  const int64_t part0 = partial_slot(s.first_cta, true) * partials.rows + first_row;
  const int64_t part1 = partial_slot(s.first_cta + 1, false) * partials.rows + first_row;
  const int64_t stride = 2 * partials.rows;
  auto part = [&](int split) { return split == 0 ? part0 : part1 + (split - 1) * stride; };

  auto* stats = reinterpret_cast<float2*>(stage);  // [row of the block][split]
  const int block = min_of(num, Traits::kStageBytes / 8 / splits);
  const int warp = thread / 32;
  const int lane = thread % 32;
#pragma unroll 1
  for (int first = 0; first < num; first += block) {
    const int rows = min_of(block, num - first);
    if (first > 0) __syncthreads();
#pragma unroll 4
    for (int i = thread; i < rows * splits; i += Traits::kThreads) {
      const int split = i / rows;
      const int row = i - split * rows;
      stats[row * splits + split] = __ldcg(partials.stats + part(split) + first + row);
    }
    __syncthreads();

    // A warp per row: maximum and sum over the splits; the max of a part
    // becomes its factor.
#pragma unroll 1
    for (int row = warp; row < rows; row += Traits::kThreads / 32) {
      float2* of_row = stats + row * splits;
      float max = -CUDART_INF_F;
#pragma unroll 1
      for (int split = lane; split < splits; split += 32) max = fmaxf(max, of_row[split].x);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
      }
      const float shift = max == -CUDART_INF_F ? 0.0f : max;
      float sum = 0.0f;
#pragma unroll 1
      for (int split = lane; split < splits; split += 32) {
        const float f = ptx::exp2_approx(of_row[split].x - shift);
        sum = __fmaf_rn(of_row[split].y, f, sum);
        of_row[split].x = f;
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
      }
      const float f = normaliser(sum);
#pragma unroll 1
      for (int split = lane; split < splits; split += 32) of_row[split].x *= f;
      if (lane == 0) sink.put_lse(first_row + first + row, max, sum);
    }
    __syncthreads();

    const int chunks = rows * (kDim / 4);
#pragma unroll 1
    for (int i = thread; i < chunks; i += Traits::kThreads * kItems) {
      float4 o[kItems];
      int row[kItems];
      const float* from[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int item = min_of(i + j * Traits::kThreads, chunks - 1);
        row[j] = item / (kDim / 4);
        from[j] = partials.o + (first + row[j]) * kDim + item % (kDim / 4) * 4;
        o[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      auto add = [&](int j, int split, const float4& x) {
        const float f = stats[row[j] * splits + split].x;
        o[j].x = __fmaf_rn(x.x, f, o[j].x);
        o[j].y = __fmaf_rn(x.y, f, o[j].y);
        o[j].z = __fmaf_rn(x.z, f, o[j].z);
        o[j].w = __fmaf_rn(x.w, f, o[j].w);
      };
#pragma unroll 1
      for (int split = 0; split < splits; split += kAhead) {
        float4 x[kAhead][kItems];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
#pragma unroll
          for (int j = 0; j < kItems; ++j) {
            if (split + a < splits) {
              x[a][j] = __ldcg(reinterpret_cast<const float4*>(from[j] + part(split + a) * kDim));
            }
          }
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
#pragma unroll
          for (int j = 0; j < kItems; ++j) {
            if (split + a < splits) add(j, split + a, x[a][j]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int item = i + j * Traits::kThreads;
        if (item >= chunks) break;
        *reinterpret_cast<uint2*>(sink.out_row(first_row + first + row[j]) +
                                  item % (kDim / 4) * 4) = pack4<Traits>(o[j]);
      }
    }
  }
}

}  // namespace specfused::smxx
