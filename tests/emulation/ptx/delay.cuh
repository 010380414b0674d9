// SPDX-License-Identifier: Apache-2.0
// csrc/ptx/delay.cuh on the emulator, in every build: one call in four lets the others run.
#pragma once

#include "emulation/fibers.h"

namespace specfused::ptx {

inline void delay(uint32_t) {
  if (emulation::random_below(4) != 0) return;
  uint32_t looks = emulation::random_below(16);
  emulation::wait_until([&] { return looks-- == 0; });
}

}  // namespace specfused::ptx
