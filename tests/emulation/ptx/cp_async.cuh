// SPDX-License-Identifier: Apache-2.0
// csrc/ptx/cp_async.cuh on the emulator.
#pragma once

#include "emulation/copies.h"
#include "emulation/device.h"

namespace specfused::ptx {

inline uint32_t smem_address(const void* pointer) { return emulation::shared_address(pointer); }
inline void cp_async_16(uint32_t dst, const void* src, bool valid) {
  emulation::copy(dst, src, 16, valid);
}
inline uint64_t evict_first_policy() { return 0; }
inline void cp_async_16(uint32_t dst, const void* src, bool valid, uint64_t) {
  cp_async_16(dst, src, valid);
}
inline void cp_async_4(uint32_t dst, const void* src) { emulation::copy(dst, src, 4, true); }
inline void cp_async_8(uint32_t dst, const void* src) { emulation::copy(dst, src, 8, true); }
inline void cp_async_commit() { emulation::commit_copies(); }
inline void cp_async_wait(int pending) { emulation::wait_for_copies(pending <= 0 ? 0 : 1); }

}  // namespace specfused::ptx
