// SPDX-License-Identifier: Apache-2.0
// The end of a segment: merge of the token groups, then either the result (the unit has one split,
// or this CTA closes it) or a partial result, see combine.cuh.
#pragma once

#include "mainloop.cuh"

namespace specfused::smxx {

constexpr float kLn2 = 0.693147180559945309f;

// Partial results in the workspace, behind the counters: O not normalised, max as an exponent of 2.
struct Partials {
  uint64_t* counters;  // [plan entry, row tile]
  float2* stats;       // [slot, packed row] max, sum
  float* o;            // [slot, packed row, head_dim]
  int64_t rows;        // packed rows of a unit

  __device__ __forceinline__ Partials(void* workspace, const AttnParams& p, int64_t packed_rows) {
    auto* base = static_cast<char*>(workspace);
    rows = packed_rows;
    counters = reinterpret_cast<uint64_t*>(base);
    o = reinterpret_cast<float*>(base + kCounterBytes);
    stats = reinterpret_cast<float2*>(o + attn_partial_rows(p.num_ctas, rows) * p.head_dim);
  }
};

// 1 / sum; a row that saw nothing has sum 0 and O 0, and its result is 0.
__device__ __forceinline__ float normaliser(float sum) {
  return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
}

// Most splits of a unit that the CTA of split 0 adds up by itself, see combine.cuh.
constexpr int kMostClosed = 4;

// Statistics of the other parts of a row and, by weigh(), their weights beside that of this CTA's.
struct OtherParts {
  float2 stats[kMostClosed - 1];  // max, sum
  float weight[kMostClosed - 1];

  // As combine_rows does it: the maximum of all, then sums in split order. Returns the weight of
  // split 0, whose max and sum become those of all.
  __device__ __forceinline__ float weigh(float& max, float& sum) {
    const float own = max;
#pragma unroll
    for (int i = 0; i < kMostClosed - 1; ++i) max = fmaxf(max, stats[i].x);
    const float shift = max == -CUDART_INF_F ? 0.0f : max;
    const float rescale = ptx::exp2_approx(own - shift);
    sum = __fmaf_rn(sum, rescale, 0.0f);
#pragma unroll
    for (int i = 0; i < kMostClosed - 1; ++i) {
      weight[i] = ptx::exp2_approx(stats[i].x - shift);
      sum = __fmaf_rn(stats[i].y, weight[i], sum);
    }
    return rescale;
  }
};

// Where finished rows of a segment go.
template <class Traits, class Rows>
struct RowSink {
  const AttnParams& p;
  const AttnLaunch& launch;
  const SegmentEntry& segment;
  const Partials& partials;
  int64_t slot;
  int others;  // parts of other CTAs to add: this one has split 0 and closes the unit. Or 0.

  __device__ __forceinline__ RowSink(const AttnParams& params, const AttnLaunch& launched,
                                     const SegmentEntry& s, const Partials& parts,
                                     bool closes = false)
      : p(params),
        launch(launched),
        segment(s),
        partials(parts),
        slot(partial_slot(s.first_cta + s.split, s.split == 0)),
        others(closes ? s.num_splits - 1 : 0) {}

  // Results, not a part.
  __device__ __forceinline__ bool direct() const { return segment.num_splits == 1 || others > 0; }

  // Row of parts of split i + 1, all in 32 bits, see combine_rows.
  __device__ __forceinline__ int other_row(int i, int packed) const {
    const int rows = static_cast<int>(partials.rows);
    return (segment.first_cta + 1 + i) * 2 * rows + packed;
  }

  __device__ __forceinline__ void read_stats(int packed, OtherParts& parts) const {
#pragma unroll
    for (int i = 0; i < kMostClosed - 1; ++i) {
      parts.stats[i] =
          ptx::load_cg_if(i < others, partials.stats + other_row(i, packed), -CUDART_INF_F, 0.0f);
    }
  }

  __device__ __forceinline__ typename Traits::Element* out_row(int packed) const {
    const RowPlace place = row_place<Rows>(p, launch, segment, packed);
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
    const RowPlace place = row_place<Rows>(p, launch, segment, packed);
    p.lse[place.row * p.num_q_heads + place.head] =
        sum == 0.0f ? -CUDART_INF_F : (max + __log2f(sum)) * kLn2;
  }
};

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float f) {
  sum.x = __fmaf_rn(x.x, f, sum.x);
  sum.y = __fmaf_rn(x.y, f, sum.y);
  sum.z = __fmaf_rn(x.z, f, sum.z);
  sum.w = __fmaf_rn(x.w, f, sum.w);
}

__device__ __forceinline__ float4 scaled(const float4& x, float f) {
  return make_float4(__fmul_rn(x.x, f), __fmul_rn(x.y, f), __fmul_rn(x.z, f), __fmul_rn(x.w, f));
}

template <class Traits>
__device__ __forceinline__ uint2 pack4(const float4& x) {
  using Op = ptx::Element<typename Traits::Element>;
  return make_uint2(Op::pack(x.x, x.y), Op::pack(x.z, x.w));
}

// Class few. Each pass: the warps that hold 16 given rows put their O into the stage that was read
// last (no load into it is issued before the next barrier of the main loop); then all threads bring
// the four parts to the common maximum, add them in token-group order and store.
template <class Traits, class Rows, class Shared>
__device__ __forceinline__ void finish_few(Shared& shared, char* stage, int first_row,
                                           int token_group, int row_group, RowState<Traits>& state,
                                           const RowSink<Traits, Rows>& sink) {
  const int rows = sink.launch.rows;
  const float scale = sink.launch.scale_log2;
  constexpr int kDim = Traits::kHeadDim;
  constexpr int kGroups = Traits::kTokenGroups;
  constexpr int kBlocks = Traits::kRowBlocks;
  const int lane = threadIdx.x % 32;
  float2* stats = shared.row_stats;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = state.sum[b][h];
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
      const int row = (row_group * kBlocks + b) * 16 + h * 8 + lane / 4;
      const float max = state.max[b][h];
      if (lane % 4 == 0) {
        stats[token_group * Traits::kRowTile + row] =
            make_float2(max == -CUDART_INF_F ? max : __fmul_rn(max, scale), sum);
      }
    }
  }
  // The stage may still be read by warps that are behind.
  ptx::delay(sink.segment.tile_end);
  __syncthreads();

  // Element (row, d) of a part is at d ^ 8 (row % 8): conflict-free writes by fragment.
  auto* parts = reinterpret_cast<float*>(stage);

#pragma unroll
  for (int pass = 0; pass < Traits::kRowTile / 16; ++pass) {
    if (first_row + pass * 16 >= rows) break;
    ptx::delay(pass);
    if (pass > 0) __syncthreads();
    ptx::delay(pass);
    if (row_group == pass / kBlocks) {
      const int b = kBlocks == 1 ? 0 : pass % kBlocks;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = h * 8 + lane / 4;
        float* to = parts + (token_group * 16 + row) * kDim;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const int d = (n * 8 + lane % 4 * 2) ^ (row % 8 * 8);
          *reinterpret_cast<float2*>(to + d) =
              make_float2(state.o[b][n][2 * h], state.o[b][n][2 * h + 1]);
        }
      }
    }
    ptx::delay(pass);
    __syncthreads();
    ptx::delay(pass);
    for (int i = threadIdx.x; i < 16 * kDim / 4; i += Traits::kThreads) {
      const int row = i / (kDim / 4);
      const int d = i % (kDim / 4) * 4;
      const int packed = first_row + pass * 16 + row;
      if (packed >= rows) break;
      const float* from = parts + row * kDim + (d ^ (row % 8 * 8));
      float2 of_group[kGroups];
      float4 part[kGroups];
      float max = -CUDART_INF_F;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        of_group[g] = stats[g * Traits::kRowTile + pass * 16 + row];
        part[g] = *reinterpret_cast<const float4*>(from + g * 16 * kDim);
        max = fmaxf(max, of_group[g].x);
      }
      const float shift = max == -CUDART_INF_F ? 0.0f : max;
      float sum = 0.0f;
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float f = ptx::exp2_approx(of_group[g].x - shift);
        sum = __fmaf_rn(of_group[g].y, f, sum);
        add_scaled(o, part[g], f);
      }
      if (sink.others > 0) {
        OtherParts parts;
        float4 x[kMostClosed - 1];
        sink.read_stats(packed, parts);
#pragma unroll
        for (int i = 0; i < kMostClosed - 1; ++i) {
          const float* row = sink.partials.o + int64_t{sink.other_row(i, packed)} * kDim;
          x[i] = ptx::load_cg_if(i < sink.others, reinterpret_cast<const float4*>(row + d));
        }
        const float4 own = o;
        o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        add_scaled(o, own, parts.weigh(max, sum));
#pragma unroll
        for (int i = 0; i < kMostClosed - 1; ++i) add_scaled(o, x[i], parts.weight[i]);
      }
      if (sink.direct()) {
        *reinterpret_cast<uint2*>(sink.out_row(packed) + d) =
            pack4<Traits>(scaled(o, normaliser(sum)));
      } else {
        *reinterpret_cast<float4*>(sink.partial_row(packed) + d) = o;
      }
      if (d == 0) sink.put_stats(packed, max, sum);
    }
  }
}

// Class many: the other parts of one row to that of this thread's warp. One round of loads for two
// splits, which is the rule.
template <class Traits, class Rows>
__device__ __forceinline__ void add_others(int packed, int b, int h, float& max, float& sum,
                                           RowState<Traits>& state,
                                           const RowSink<Traits, Rows>& sink) {
  constexpr int kPairs = Traits::kHeadDim / 8;
  OtherParts parts;
  float2 x[kPairs];
  auto read = [&](int i) {
    const float* from = sink.partials.o + int64_t{sink.other_row(i, packed)} * Traits::kHeadDim +
                        threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      x[n] = ptx::load_cg_if(true, reinterpret_cast<const float2*>(from + n * 8), 0.0f, 0.0f);
    }
  };
  sink.read_stats(packed, parts);
  read(0);
  const float own = parts.weigh(max, sum);
#pragma unroll
  for (int i = 0; i < kMostClosed - 1; ++i) {
    if (i == sink.others) break;
    if (i > 0) read(i);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      float* o = &state.o[b][n][2 * h];
      o[0] = __fmaf_rn(x[n].x, parts.weight[i], i == 0 ? __fmaf_rn(o[0], own, 0.0f) : o[0]);
      o[1] = __fmaf_rn(x[n].y, parts.weight[i], i == 0 ? __fmaf_rn(o[1], own, 0.0f) : o[1]);
    }
  }
}

// Among each four lanes, word i of lane j becomes word j of lane i. The whole warp calls it.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t sent = upper ? words[i] : words[i + step];
      const uint32_t got = __shfl_xor_sync(~0u, sent, step);
      (upper ? words[i] : words[i + step]) = got;
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
  const int lane = ptx::thread_index_here() % 32;
  const auto row_of_tile = [&](int b, int h) {
    return first_row + (row_group * Traits::kRowBlocks + b) * 16 + h * 8 + lane / 4;
  };
#pragma unroll
  for (int b = 0; b < Traits::kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float& sum = state.sum[b][h];
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
      float& max = state.max[b][h];
      max = max == -CUDART_INF_F ? max : __fmul_rn(max, scale);
    }
  }
  // Parts and results each in one piece of code, and what closes a unit apart: a CTA runs through
  // as little as it can. By vote, so that the compiler knows that lanes agree.
  if (__any_sync(~0u, sink.others > 0)) {
#pragma unroll
    for (int b = 0; b < Traits::kRowBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        add_others<Traits, Rows>(min_of(row_of_tile(b, h), rows - 1), b, h, state.max[b][h],
                                 state.sum[b][h], state, sink);
      }
    }
  }
  const bool direct = __any_sync(~0u, sink.direct());
#pragma unroll
  for (int b = 0; b < Traits::kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_tile(b, h);
      if (row < rows && lane % 4 == 0) sink.put_stats(row, state.max[b][h], state.sum[b][h]);
      if (direct || row >= rows) continue;
      float* to = sink.partial_row(row) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) =
            make_float2(state.o[b][n][2 * h], state.o[b][n][2 * h + 1]);
      }
    }
  }
  if (!direct) return;
#pragma unroll
  for (int b = 0; b < Traits::kRowBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_tile(b, h);
      const float f = normaliser(state.sum[b][h]);
      auto* to = sink.out_row(min_of(row, rows - 1)) + lane % 4 * 8;
#pragma unroll
      for (int n = 0; n < Traits::kHeadDim / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* o = &state.o[b][n + i][2 * h];
          words[i] = Op::pack(__fmul_rn(o[0], f), __fmul_rn(o[1], f));
        }
        transpose_in_quad(words);
        if (row < rows) {
          *reinterpret_cast<uint4*>(to + n * 8) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

}  // namespace specfused::smxx
