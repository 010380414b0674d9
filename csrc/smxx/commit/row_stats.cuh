// SPDX-License-Identifier: Apache-2.0
// One pass over the logits: the largest logit of each slice as a 64-bit key and, where the row is
// sampled from, sum exp((x - largest) / temperature) of the slice and of each of its parts.
//
// A key orders as torch.argmax does: the value first (NaN above all), then the lower index. The
// largest key of a row holds its argmax.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>

#include "../../params.h"
#include "../../ptx/delay.cuh"
#include "../../ptx/grid.cuh"
#include "../../ptx/mma.cuh"
#include "../../sampling.h"
#include "../../workspace.h"

namespace specfused::smxx {

constexpr int kStatsThreads = 256;

__device__ __forceinline__ uint64_t argmax_key(float value, uint32_t index) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));  // -0 and 0 are equal
  uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
  if (value != value) order = 0xffffffffu;
  return static_cast<uint64_t>(order) << 32 | ~index;
}

__device__ __forceinline__ uint32_t argmax_index(uint64_t key) {
  return ~static_cast<uint32_t>(key);
}

// The value of a key; of NaN some NaN, of no element (key 0) as well.
__device__ __forceinline__ float argmax_value(uint64_t key) {
  const uint32_t order = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
  const uint32_t mine = static_cast<uint32_t>(key >> 32);
  const uint32_t high = __reduce_max_sync(~0u, mine);
  const uint32_t low = __reduce_max_sync(~0u, mine == high ? static_cast<uint32_t>(key) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }

__device__ __forceinline__ void unpack(const int4& bits, float* out, const float*) {
  out[0] = __uint_as_float(uint32_t(bits.x));
  out[1] = __uint_as_float(uint32_t(bits.y));
  out[2] = __uint_as_float(uint32_t(bits.z));
  out[3] = __uint_as_float(uint32_t(bits.w));
}

__device__ __forceinline__ void unpack(const int4& bits, float* out, const __nv_bfloat16*) {
  const uint32_t words[4] = {uint32_t(bits.x), uint32_t(bits.y), uint32_t(bits.z),
                             uint32_t(bits.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(const int4& bits, float* out, const __half*) {
  const uint32_t words[4] = {uint32_t(bits.x), uint32_t(bits.y), uint32_t(bits.z),
                             uint32_t(bits.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i])));
    out[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
  }
}

// Of -infinity.
__device__ __forceinline__ uint32_t lowest(const float*) { return 0xff800000u; }
__device__ __forceinline__ uint16_t lowest(const __nv_bfloat16*) { return 0xff80u; }
__device__ __forceinline__ uint16_t lowest(const __half*) { return 0xfc00u; }

// A lane's share of a block: kVectors vectors, 32 of them apart.
template <class T>
struct Share {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kVectors = kRowBlock / kStatsThreads / kVector;
  static constexpr int kElements = kVectors * kVector;

  int4 bits[kVectors];

  __device__ static constexpr int offset(int vector) { return vector * 32 * kVector; }

  // From element `at` of the row on. What is behind the row is -infinity. Rows off the 16-byte
  // borders, and the end of a row, in single elements: the same order, so the same sums.
  __device__ __forceinline__ void load(const T* row, int64_t at, int64_t vocab) {
    const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
    if (aligned && at + offset(kVectors - 1) + kVector <= vocab) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        bits[u] = __ldcs(reinterpret_cast<const int4*>(row + at + offset(u)));
      }
      return;
    }
    using Raw = decltype(lowest(row));
    const Raw* raw = reinterpret_cast<const Raw*>(row);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      Raw elements[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int64_t j = at + offset(u) + i;
        elements[i] = j < vocab ? raw[j] : lowest(row);
      }
      memcpy(&bits[u], elements, sizeof elements);
    }
  }
};

// What one thread has seen of a slice, or of several.
template <bool kSums>
struct Partial {
  uint64_t key = 0;
  float largest = -INFINITY;  // NaN left out
  float sum = 0;              // of exp2((x - largest) * scale)

  template <class T>
  __device__ __forceinline__ void take(const Share<T>& share, uint32_t at, float scale) {
    using S = Share<T>;
    float values[S::kElements];
#pragma unroll
    for (int u = 0; u < S::kVectors; ++u) {
      unpack(share.bits[u], values + u * S::kVector, static_cast<const T*>(nullptr));
    }
    float best = values[0];
    uint32_t index = at;
#pragma unroll
    for (int i = 1; i < S::kElements; ++i) {
      // Not (x <= best) is also true of a NaN, which then stays.
      if (!(values[i] <= best) && best == best) {
        best = values[i];
        index = at + S::offset(i / S::kVector) + i % S::kVector;
      }
    }
    key = max_of(key, argmax_key(best, index));
    if constexpr (kSums) {
      const float above = fmaxf(largest, best);
      if (above == -INFINITY) return;
      sum *= ptx::exp2_approx((largest - above) * scale);
#pragma unroll
      for (float x : values) sum += ptx::exp2_approx((x - above) * scale);
      largest = above;
    }
  }
};

// Of each cell, a (row, slice).
struct RowStats {
  uint64_t* keys;
  float* sums;
  float* parts;  // [cells, kSliceParts], of exp2((x - largest of the slice) * scale) as the sums
};

struct WarpStats {
  uint64_t keys[kStatsThreads / 32];
  float sums[kStatsThreads / 32];
};

// All threads: what the warps have seen, to shared memory. Ends with a barrier.
template <bool kSums>
__device__ __forceinline__ void collect(const Partial<kSums>& seen, float scale, WarpStats& to) {
  const uint64_t key = warp_max(seen.key);
  float sum = 0;
  if constexpr (kSums) {
    // Where the key's value is not finite, the sum is nothing or nobody's.
    const float rescale = ptx::exp2_approx((seen.largest - argmax_value(key)) * scale);
    sum = warp_sum(seen.sum > 0 ? seen.sum * rescale : 0);
  }
  if (threadIdx.x % 32 == 0) {
    to.keys[threadIdx.x / 32] = key;
    to.sums[threadIdx.x / 32] = sum;
  }
  ptx::delay(0);
  __syncthreads();
}

// Warp 0, behind collect.
template <bool kSums>
__device__ __forceinline__ void write_stats(const WarpStats& from, float scale, int64_t cell,
                                            const RowStats& to) {
  ptx::delay(cell);
  const int lane = threadIdx.x;
  const uint64_t mine = lane < kSliceParts ? from.keys[lane] : 0;
  const uint64_t key = warp_max(mine);
  if (lane == 0) to.keys[cell] = key;
  if constexpr (kSums) {
    const float sum = lane < kSliceParts ? from.sums[lane] : 0;
    const float rescale = ptx::exp2_approx((argmax_value(mine) - argmax_value(key)) * scale);
    const float part = sum > 0 ? sum * rescale : 0;
    if (lane < kSliceParts) to.parts[cell * kSliceParts + lane] = part;
    const float total = warp_sum(part);
    if (lane == 0) to.sums[cell] = total;
  }
}

struct RowStatsParams {
  const void* logits;
  int64_t stride;
  int64_t vocab;
  int64_t length;  // of a slice
  int32_t slices;  // of a row
  int32_t slices_per_cta;
  int32_t ctas_per_row;
  int32_t width;
  const float* temperatures;  // with sums
  RowStats to;                // without sums a key per CTA
};

// grid = rows * ctas_per_row, the CTAs of a row side by side. The next block is on its way while
// one is taken.
template <class T, bool kSums>
__global__ __launch_bounds__(kStatsThreads,
                             4) void row_stats_kernel(const __grid_constant__ RowStatsParams p) {
  static_assert(kStatsThreads / 32 == kSliceParts, "a warp reads a part");
  __shared__ WarpStats warps[2];
  ptx::delay(0);
  ptx::allow_next_grid();
  ptx::delay(0);
  const int64_t row = blockIdx.x / p.ctas_per_row;
  const int first = static_cast<int>(blockIdx.x % p.ctas_per_row) * p.slices_per_cta;
  const int last = min_of(first + p.slices_per_cta, p.slices);
  const T* logits = static_cast<const T*>(p.logits) + row * p.stride;
  const float scale = kSums ? exponent_scale(p.temperatures[row / p.width]) : 1;
  const int64_t part = p.length / kSliceParts;
  const int64_t offset = threadIdx.x / 32 * part + threadIdx.x % 32 * Share<T>::kVector;
  const auto step = kRowBlock / kSliceParts;

  Share<T> next;
  next.load(logits, first * p.length + offset, p.vocab);
  Partial<kSums> seen;
  for (int slice = first; slice < last; ++slice) {
    for (int64_t in_part = 0; in_part < part; in_part += step) {
      const int64_t at = slice * p.length + offset + in_part;
      const Share<T> now = next;
      if (in_part + step < part) {
        next.load(logits, at + step, p.vocab);
      } else if (slice + 1 < last) {
        next.load(logits, (slice + 1) * p.length + offset, p.vocab);
      }
      seen.take(now, static_cast<uint32_t>(at), scale);
    }
    if constexpr (kSums) {
      // Of two buffers, so that the others need not wait for warp 0.
      collect(seen, scale, warps[slice % 2]);
      if (threadIdx.x < 32) {
        write_stats<kSums>(warps[slice % 2], scale, row * p.slices + slice, p.to);
      }
      seen = {};
    }
  }
  if constexpr (!kSums) {
    collect(seen, scale, warps[0]);
    if (threadIdx.x < 32) write_stats<kSums>(warps[0], scale, blockIdx.x, p.to);
  }
}

inline int32_t stats_ctas_per_row(const CommitParams& p) {
  const int64_t rows = static_cast<int64_t>(p.bs) * p.width;
  return ceil_div(num_slices(p.vocab), slices_per_cta(rows, p.vocab));
}

template <bool kSums>
cudaError_t launch_row_stats(const CommitParams& p, const RowStats& to, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.bs) * p.width;
  const int32_t ctas_per_row = stats_ctas_per_row(p);
  const int64_t ctas = rows * ctas_per_row;
  if (to.keys == nullptr || p.vocab < 1 || ctas > INT32_MAX) return cudaErrorInvalidValue;
  const RowStatsParams params{p.logits,
                              p.stride_logits_row,
                              p.vocab,
                              slice_length(p.vocab),
                              num_slices(p.vocab),
                              slices_per_cta(rows, p.vocab),
                              ctas_per_row,
                              p.width,
                              p.temperatures,
                              to};
  const auto launch = [&](auto element) {
    using T = decltype(element);
    row_stats_kernel<T, kSums><<<static_cast<unsigned>(ctas), kStatsThreads, 0, stream>>>(params);
  };
  switch (p.logits_dtype) {
    case DType::kFloat32:
      launch(float{});
      break;
    case DType::kBFloat16:
      launch(__nv_bfloat16{});
      break;
    case DType::kFloat16:
      launch(__half{});
      break;
  }
  return cudaGetLastError();
}

}  // namespace specfused::smxx
