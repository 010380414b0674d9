// SPDX-License-Identifier: Apache-2.0
// Random delays of warps, in builds with SPECFUSED_RANDOM_DELAY: order that only usual timing
// makes, and no barrier, then shows as other bits (attn_check --delays). In all other builds,
// nothing.
#pragma once

#include <cstdint>

namespace specfused::ptx {

#ifdef SPECFUSED_RANDOM_DELAY

// 0: no delays. Each translation unit has its own; smxx::set_delay_seed sets those in this list.
static __constant__ uint32_t delay_seed;

struct DelaySeed {
  const void* symbol;
  const DelaySeed* next;

  explicit DelaySeed(const void* seed) : symbol(seed), next(first) { first = this; }
  static inline const DelaySeed* first = nullptr;
};
static const DelaySeed registered_delay_seed(&delay_seed);

// One call in four sleeps for up to 4 us, short times as often as long ones. How long follows from
// the seed, the place in the source, the CTA, the warp and `iteration`. May stand where a warp, or
// a part of it, waits or arrives; not between wgmma of one group, nor between wgmma and the release
// of what they read: it would give a release that comes too early the time that it lacks.
__device__ __forceinline__ void delay(uint32_t iteration, uint32_t line = __builtin_LINE()) {
  const uint32_t seed = delay_seed;
  if (seed == 0) return;
  uint32_t x = seed;
  const uint32_t parts[] = {line, iteration, blockIdx.x, blockIdx.y, threadIdx.x / 32};
  for (const uint32_t part : parts) {
    x = (x ^ part) * 0x9e3779b1u;
    x ^= x >> 15;
  }
  if (x % 4 == 0) __nanosleep((x >> 20) >> (x >> 2) % 8);
}

#else

__device__ __forceinline__ void delay(uint32_t) {}

#endif

}  // namespace specfused::ptx
