// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier), named barriers, and the register file of a warpgroup: what
// warps with different jobs in one CTA need (sm_90).
#pragma once

#include <cstdint>

namespace specfused::ptx {

// Before any use, by one thread; a CTA barrier must follow.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Releases what this thread wrote or has seen.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when all cp.async that this thread issued before have landed; one of the arrivals that
// the barrier was made for (noinc).
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until the phase of this parity has ended; acquires what the arrivals released. A build with
// SPECFUSED_BOUNDED_WAITS goes on after some milliseconds, so that a mistake in the protocol shows
// as wrong results and not as a launch that never ends.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef SPECFUSED_BOUNDED_WAITS
  constexpr int kMaxLooks = 1 << 16;
#else
  constexpr int kMaxLooks = 0;  // no bound
#endif
  uint32_t done = 0;
  for (int look = 0; !done && (kMaxLooks == 0 || look < kMaxLooks); ++look) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// All of `threads` threads that name this barrier; whole warps.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Registers per thread of the calling warpgroup, all of whose warps must come here.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace specfused::ptx
