// SPDX-License-Identifier: Apache-2.0
// csrc/ptx/wgmma.cuh on the emulator. wgmma_fence and pin order registers, which the emulator has
// in memory: they do nothing.
#pragma once

#include "emulation/copies.h"
#include "emulation/device.h"
#include "emulation/tensor.h"
#include "mma.cuh"

namespace specfused::ptx {

inline void async_proxy_fence() { emulation::proxy_fence(); }
inline void wgmma_fence() {}
inline void wgmma_commit() { emulation::commit_products(); }
template <int kPending>
void wgmma_wait() {
  emulation::wait_for_products(kPending);
}
template <class T, int kN>
void pin(T (&)[kN][4]) {}

template <class T>
struct Wgmma {
  template <bool kTransposed, int kN>
  static void multiply(float (&d)[kN][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    emulation::start_product({kTypeOf<T>, kN * 8, &d[0][0], a, 0, b, kTransposed, add});
  }
  static void multiply(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
    emulation::start_product({kTypeOf<T>, 64, &d[0][0], nullptr, a, b, false, add});
  }
};

}  // namespace specfused::ptx
