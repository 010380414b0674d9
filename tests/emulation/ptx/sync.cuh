// SPDX-License-Identifier: Apache-2.0
// csrc/ptx/sync.cuh on the emulator. CTAs run one after the other, so nothing here waits.
#pragma once

#include "emulation/device.h"

namespace specfused::ptx {

inline uint64_t add_relaxed(uint64_t* word, uint64_t value) {
  const uint64_t old = *word;
  *word += value;
  return old;
}
inline uint64_t add_acq_rel(uint64_t* word, uint64_t value) { return add_relaxed(word, value); }
inline uint64_t compare_and_swap(uint64_t* word, uint64_t expected, uint64_t desired) {
  const uint64_t old = *word;
  if (old == expected) *word = desired;
  return old;
}
inline uint64_t load_acquire(const uint64_t* word) { return *word; }
inline void store_relaxed(uint64_t* word, uint64_t value) { *word = value; }
inline void let_next_launch_start() {}
inline void wait_for_previous_launch() {}
inline int thread_index_here() { return emulation::thread(); }
inline void* opaque(void* value) { return value; }
inline int opaque(int value) { return value; }

}  // namespace specfused::ptx
