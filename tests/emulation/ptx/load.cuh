// SPDX-License-Identifier: Apache-2.0
// csrc/ptx/load.cuh on the emulator.
#pragma once

#include "emulation/device.h"

namespace specfused::ptx {

inline float2 load_cg_if(bool valid, const float2* from, float x, float y) {
  return valid ? *from : make_float2(x, y);
}
inline float4 load_cg_if(bool valid, const float4* from) {
  return valid ? *from : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

}  // namespace specfused::ptx
