// SPDX-License-Identifier: Apache-2.0
// Counters between the CTAs of one launch, launches that overlap, and special registers.
#pragma once

#include <cstdint>

namespace specfused::ptx {

// The value before. Releases what this CTA wrote before the preceding barrier, acquires what the
// others released.
__device__ __forceinline__ uint64_t add_acq_rel(uint64_t* word, uint64_t value) {
  uint64_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(word), "l"(value)
               : "memory");
  return old;
}

__device__ __forceinline__ uint64_t compare_and_swap(uint64_t* word, uint64_t expected,
                                                     uint64_t desired) {
  uint64_t old;
  asm volatile("atom.cas.acq_rel.gpu.global.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(word), "l"(expected), "l"(desired)
               : "memory");
  return old;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Orders nothing; the old value is waited for only where it is used.
__device__ __forceinline__ uint64_t add_relaxed(uint64_t* word, uint64_t value) {
  uint64_t old;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value));
  return old;
}

__device__ __forceinline__ void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Programmatic dependent launch (sm_90+): the next launch of the stream may start now, and this one
// waits here until everything that the launch before wrote can be seen. Without the launch
// attribute both do nothing.
__device__ __forceinline__ void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// threadIdx.x, read where it is used: what is derived from it then occupies no registers elsewhere.
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
