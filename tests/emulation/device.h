// SPDX-License-Identifier: Apache-2.0
// What CUDA gives to device code and a host compiler does not have: indices, warp functions, maths.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx (::emulation::ThreadIndex{})
#define blockIdx (::emulation::block)

namespace emulation {

struct ThreadIndex {
  const unsigned x = thread();
};
inline dim3 block;  // the CTA that runs

template <class T>
T shuffle(T value, int from) {
  struct Lane {
    T value;
    int from;
    T got;
  } mine{value, from, value};
  together(mine, [](Lane* const(&lanes)[kWarpSize]) {
    for (Lane* lane : lanes) lane->got = lanes[lane->from % kWarpSize]->value;
  });
  return mine.got;
}

// The bits of all lanes, one by one.
inline uint32_t ballot(bool bit) {
  struct Lane {
    bool bit;
    uint32_t all;
  } mine{bit, 0};
  together(mine, [](Lane* const(&lanes)[kWarpSize]) {
    uint32_t all = 0;
    for (int i = 0; i < kWarpSize; ++i) all |= static_cast<uint32_t>(lanes[i]->bit) << i;
    for (Lane* lane : lanes) lane->all = all;
  });
  return mine.all;
}

}  // namespace emulation

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::shuffle(value, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::shuffle(value, emulation::lane() ^ mask);
}
inline uint32_t __ballot_sync(unsigned, bool bit) { return emulation::ballot(bit); }
inline bool __any_sync(unsigned, bool bit) { return emulation::ballot(bit) != 0; }
inline bool __all_sync(unsigned, bool bit) { return emulation::ballot(bit) == ~0u; }
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  for (int step = 1; step < emulation::kWarpSize; step *= 2) {
    value |= emulation::shuffle(value, emulation::lane() ^ step);
  }
  return value;
}
inline void __syncwarp() { emulation::ballot(true); }
inline void __syncthreads() { emulation::sync_threads(0, emulation::num_threads()); }

inline float __int_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
// The host's mathematics library has a function of this name with another linkage.
#define __log2f ::std::log2
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
