// SPDX-License-Identifier: Apache-2.0
// Counters between the CTAs of one launch, and special registers.
#pragma once

#include <cstdint>

namespace specfused::ptx {

// old value; the counter becomes old >= last ? 0 : old + 1, so the last of last
// + 1 arrivals resets it. Releases what this CTA wrote before the preceding
// barrier, acquires what the others released.
__device__ __forceinline__ uint32_t arrive_wrapping(uint32_t* counter, uint32_t last) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(counter), "r"(last)
               : "memory");
  return old;
}

// threadIdx.x, read where it is used: what is derived from it then occupies no
// registers elsewhere.
__device__ __forceinline__ int thread_index_here() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The same value, about which the compiler may assume nothing.
__device__ __forceinline__ void* opaque(void* value) {
  void* same;
  asm volatile("mov.b64 %0, %1;" : "=l"(same) : "l"(value));
  return same;
}

__device__ __forceinline__ int opaque(int value) {
  int same;
  asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}

}  // namespace specfused::ptx
