// SPDX-License-Identifier: Apache-2.0
// One pass over the logits, a CTA per (row, slice): the slice's largest logit as a 64-bit key and,
// where the row is sampled from, sum exp((x - largest) / temperature).
//
// A key orders as torch.argmax does: the value first (NaN above all), then the lower index. The
// largest key of a row holds its argmax. 16-byte loads, kUnroll in flight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "../../params.h"
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
  for (int step = 16; step > 0; step /= 2) key = max_of(key, __shfl_xor_sync(~0u, key, step));
  return key;
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

// What one thread has seen. Its indices need not ascend across calls; keys settle ties.
template <bool kSums>
struct Partial {
  uint64_t key = 0;
  float largest = -INFINITY;  // NaN left out
  float sum = 0;              // of exp2((x - largest) * scale)

  // N values from index `at` on.
  template <int N>
  __device__ __forceinline__ void take(const float (&values)[N], uint32_t at, float scale) {
    float best = values[0];
    uint32_t index = at;
#pragma unroll
    for (int i = 1; i < N; ++i) {
      // Not (x <= best) is also true of a NaN, which then stays.
      if (!(values[i] <= best) && best == best) {
        best = values[i];
        index = at + i;
      }
    }
    key = max_of(key, argmax_key(best, index));
    if constexpr (kSums) {
      const float above = fmaxf(largest, best);
      if (above == -INFINITY) return;
      sum *= exp2f((largest - above) * scale);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += exp2f((values[i] - above) * scale);
      largest = above;
    }
  }
};

// grid = slices * rows, the slices of a row side by side.
template <class T, bool kSums>
__global__ __launch_bounds__(kStatsThreads) void row_stats_kernel(
    const T* logits, int64_t stride, int64_t vocab, uint32_t slices, int64_t length,
    const float* temperatures, uint32_t width, uint64_t* keys, float* sums) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kUnroll = 4;
  const uint32_t row_index = blockIdx.x / slices;
  const int64_t begin = min_of<int64_t>(blockIdx.x % slices * length, vocab);
  const int64_t count = min_of<int64_t>(length, vocab - begin);
  const T* slice = logits + row_index * stride + begin;
  const int64_t misaligned = reinterpret_cast<uintptr_t>(slice) % 16 / sizeof(T);
  const int64_t head = min_of<int64_t>(misaligned == 0 ? 0 : kVector - misaligned, count);
  const int64_t vectors = (count - head) / kVector;
  const int4* vector = reinterpret_cast<const int4*>(slice + head);
  const uint32_t first = static_cast<uint32_t>(begin + head);
  const float scale = kSums ? exponent_scale(temperatures[row_index / width]) : 1;

  Partial<kSums> seen;
  int64_t i = threadIdx.x;
  for (; i + (kUnroll - 1) * kStatsThreads < vectors; i += kUnroll * kStatsThreads) {
    int4 bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) bits[u] = __ldcs(vector + i + u * kStatsThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float values[kVector];
      unpack(bits[u], values, static_cast<const T*>(nullptr));
      seen.take(values, first + static_cast<uint32_t>((i + u * kStatsThreads) * kVector), scale);
    }
  }
  for (; i < vectors; i += kStatsThreads) {
    float values[kVector];
    unpack(__ldcs(vector + i), values, static_cast<const T*>(nullptr));
    seen.take(values, first + static_cast<uint32_t>(i * kVector), scale);
  }
  // What no 16-byte load covers: before the first and after the last vector.
  const int64_t tail = head + vectors * kVector;
  for (int64_t j = threadIdx.x; j < head + count - tail; j += kStatsThreads) {
    const int64_t at = j < head ? j : tail + j - head;
    const float values[1] = {as_float(slice[at])};
    seen.take(values, static_cast<uint32_t>(begin + at), scale);
  }

  __shared__ uint64_t warp_keys[kStatsThreads / 32];
  __shared__ float warp_sums[kStatsThreads / 32];
  const uint64_t warp_key = warp_max(seen.key);
  if (threadIdx.x % 32 == 0) warp_keys[threadIdx.x / 32] = warp_key;
  __syncthreads();
  uint64_t key = 0;
#pragma unroll
  for (int w = 0; w < kStatsThreads / 32; ++w) key = max_of(key, warp_keys[w]);
  if constexpr (kSums) {
    // Where this is not finite, nobody uses the sum.
    const float above = argmax_value(key);
    const float mine = seen.sum > 0 ? seen.sum * exp2f((seen.largest - above) * scale) : 0;
    const float warp_total = warp_sum(mine);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = warp_total;
    __syncthreads();
    if (threadIdx.x == 0) {
      float total = 0;
      for (float x : warp_sums) total += x;
      sums[blockIdx.x] = total;
    }
  }
  if (threadIdx.x == 0) keys[blockIdx.x] = key;
}

template <bool kSums>
cudaError_t launch_row_stats(const CommitParams& p, int slices, uint64_t* keys, float* sums,
                             cudaStream_t stream) {
  const int64_t ctas = static_cast<int64_t>(p.bs) * p.width * slices;
  if (keys == nullptr || p.vocab < 1 || ctas > INT32_MAX) return cudaErrorInvalidValue;
  const auto launch = [&](auto element) {
    using T = decltype(element);
    row_stats_kernel<T, kSums><<<static_cast<unsigned>(ctas), kStatsThreads, 0, stream>>>(
        static_cast<const T*>(p.logits), p.stride_logits_row, p.vocab, slices,
        slice_length(p.vocab, slices), p.temperatures, p.width, keys, sums);
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
