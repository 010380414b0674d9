// SPDX-License-Identifier: Apache-2.0
// csrc/ptx/load.cuh on the emulator.
#pragma once

#include "emulation/device.h"

namespace specfused::ptx {

inline const void* row_address(const void* base, uint32_t row, uint32_t row_bytes) {
  return static_cast<const char*>(base) + uint64_t{row} * row_bytes;
}
inline float2 load_cg_if(bool valid, const float2* from, float x, float y) {
  return valid ? *from : make_float2(x, y);
}
inline float4 load_cg_if(bool valid, const float4* from) {
  return valid ? *from : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

}  // namespace specfused::ptx
