// SPDX-License-Identifier: Apache-2.0
// csrc/ptx/mbarrier.cuh on the emulator. Registers are not counted.
#pragma once

#include "emulation/copies.h"
#include "emulation/device.h"

namespace specfused::ptx {

inline void barrier_init(uint32_t barrier, int arrivals) {
  emulation::init_barrier(barrier, arrivals);
}
inline void barrier_arrive(uint32_t barrier) { emulation::arrive(barrier); }
inline void barrier_arrive_after_copies(uint32_t barrier) {
  emulation::arrive_after_copies(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulation::wait_for_phase(barrier, parity);
}
inline void named_sync(int barrier, int threads) { emulation::sync_threads(barrier, threads); }
template <int kRegisters>
void give_up_registers() {}
template <int kRegisters>
void take_registers() {}

}  // namespace specfused::ptx
