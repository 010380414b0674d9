// SPDX-License-Identifier: Apache-2.0
// csrc/ptx/mma.cuh on the emulator.
#pragma once

#include <type_traits>

#include "emulation/device.h"
#include "emulation/tensor.h"

namespace specfused::ptx {

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  emulation::load_matrices(r, address, false);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  emulation::load_matrices(r, address, true);
}
inline float exp2_approx(float x) { return std::exp2(x); }

template <class T>
constexpr emulation::Type kTypeOf =
    std::is_same_v<T, __half> ? emulation::Type::kFloat16 : emulation::Type::kBFloat16;

template <class T>
struct Element {
  static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulation::multiply_16x8x16(kTypeOf<T>, c, a, b0, b1);
  }
  static uint32_t pack(float lo, float hi) {
    const T pair[2] = {T(lo), T(hi)};
    uint32_t packed;
    std::memcpy(&packed, pair, sizeof packed);
    return packed;
  }
};

}  // namespace specfused::ptx
