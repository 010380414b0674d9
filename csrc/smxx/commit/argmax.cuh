// SPDX-License-Identifier: Apache-2.0
// argmax over the vocabulary, split over CTAs: each leaves one 64-bit key per (row, slice).
//
// A key orders as torch.argmax does: the value first (NaN above all), then the lower index. The
// largest key of a row holds its target. One CTA: one slice, 16-byte loads, kUnroll in flight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "../../params.h"
#include "../../workspace.h"

namespace specfused::smxx {

constexpr int kArgmaxThreads = 256;

__device__ __forceinline__ uint64_t argmax_key(float value, uint32_t index) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));  // -0 and 0 are equal
  uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
  if (value != value) order = 0xffffffffu;
  return static_cast<uint64_t>(order) << 32 | ~index;
}

__device__ __forceinline__ uint32_t argmax_index(uint64_t key) {
  return ~static_cast<uint32_t>(key);
}

// Running maximum of one thread, whose indices ascend. Starts at its first element as if that were
// -inf: if nothing is larger, that is the answer.
struct Best {
  float value;
  uint32_t index;

  __device__ __forceinline__ explicit Best(uint32_t first) : value(-INFINITY), index(first) {}

  __device__ __forceinline__ void take(float candidate, uint32_t at) {
    // Not (candidate <= value) is also true of a NaN, which then stays.
    if (!(candidate <= value) && value == value) {
      value = candidate;
      index = at;
    }
  }
};

__device__ __forceinline__ void take_vector(Best& best, const int4& bits, uint32_t at,
                                            const float*) {
  best.take(__uint_as_float(uint32_t(bits.x)), at);
  best.take(__uint_as_float(uint32_t(bits.y)), at + 1);
  best.take(__uint_as_float(uint32_t(bits.z)), at + 2);
  best.take(__uint_as_float(uint32_t(bits.w)), at + 3);
}

__device__ __forceinline__ void take_vector(Best& best, const int4& bits, uint32_t at,
                                            const __nv_bfloat16*) {
  const uint32_t words[4] = {uint32_t(bits.x), uint32_t(bits.y), uint32_t(bits.z),
                             uint32_t(bits.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    best.take(__uint_as_float(words[i] << 16), at + 2 * i);
    best.take(__uint_as_float(words[i] & 0xffff0000u), at + 2 * i + 1);
  }
}

__device__ __forceinline__ void take_vector(Best& best, const int4& bits, uint32_t at,
                                            const __half*) {
  const uint32_t words[4] = {uint32_t(bits.x), uint32_t(bits.y), uint32_t(bits.z),
                             uint32_t(bits.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    best.take(__half2float(__ushort_as_half(static_cast<unsigned short>(words[i]))), at + 2 * i);
    best.take(__half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16))),
              at + 2 * i + 1);
  }
}

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }

// grid = (slices, rows). Slices are multiples of 16 bytes from the row's first aligned element.
template <class T>
__global__ __launch_bounds__(kArgmaxThreads) void argmax_kernel(const T* logits, int64_t stride,
                                                                int64_t vocab, uint64_t* keys) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kUnroll = 4;
  const T* row = logits + blockIdx.y * stride;
  const int64_t misaligned = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T);
  const int64_t head = min_of<int64_t>(misaligned == 0 ? 0 : kVector - misaligned, vocab);
  const int64_t vectors = (vocab - head) / kVector;
  const int64_t per_slice = ceil_div<int64_t>(vectors, gridDim.x);
  const int64_t begin = min_of(blockIdx.x * per_slice, vectors);
  const int64_t end = min_of(begin + per_slice, vectors);
  const int4* vector = reinterpret_cast<const int4*>(row + head);

  uint64_t key = 0;
  if (begin + threadIdx.x < end) {
    int64_t i = begin + threadIdx.x;
    Best best(static_cast<uint32_t>(head + i * kVector));
    for (; i + (kUnroll - 1) * kArgmaxThreads < end; i += kUnroll * kArgmaxThreads) {
      int4 bits[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) bits[u] = __ldcs(vector + i + u * kArgmaxThreads);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        take_vector(best, bits[u], static_cast<uint32_t>(head + (i + u * kArgmaxThreads) * kVector),
                    static_cast<const T*>(nullptr));
      }
    }
    for (; i < end; i += kArgmaxThreads) {
      take_vector(best, __ldcs(vector + i), static_cast<uint32_t>(head + i * kVector),
                  static_cast<const T*>(nullptr));
    }
    key = argmax_key(best.value, best.index);
  }
  // What no 16-byte load covers: before the first and after the last vector.
  if (blockIdx.x == 0) {
    const int64_t tail = head + vectors * kVector;
    for (int64_t i = threadIdx.x; i < head + vocab - tail; i += kArgmaxThreads) {
      const int64_t at = i < head ? i : tail + i - head;
      key = max_of(key, argmax_key(as_float(row[at]), static_cast<uint32_t>(at)));
    }
  }

  for (int step = 16; step > 0; step /= 2) key = max_of(key, __shfl_xor_sync(~0u, key, step));
  __shared__ uint64_t warp_keys[kArgmaxThreads / 32];
  if (threadIdx.x % 32 == 0) warp_keys[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint64_t other : warp_keys) key = max_of(key, other);
    keys[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = key;
  }
}

}  // namespace specfused::smxx
