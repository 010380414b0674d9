// SPDX-License-Identifier: Apache-2.0
// Addresses of rows, and loads through L2 only, left out by predicate: many of them can be in
// flight without branches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace specfused::ptx {

// base + row * row_bytes in one instruction.
__device__ __forceinline__ const void* row_address(const void* base, uint32_t row,
                                                   uint32_t row_bytes) {
  const void* address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(row_bytes), "l"(base));
  return address;
}

// {x, y} where not valid.
__device__ __forceinline__ float2 load_cg_if(bool valid, const float2* from, float x, float y) {
  float2 value = make_float2(x, y);
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.s32 valid, %3, 0;\n"
      "@valid ld.global.cg.v2.f32 {%0, %1}, [%2];\n"
      "}"
      : "+f"(value.x), "+f"(value.y)
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
  return value;
}

// Zeros where not valid.
__device__ __forceinline__ float4 load_cg_if(bool valid, const float4* from) {
  float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.s32 valid, %5, 0;\n"
      "@valid ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
  return value;
}

}  // namespace specfused::ptx
