// SPDX-License-Identifier: Apache-2.0
// bf16, fp16 and fp32 elements on the host: widen to float, round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common.h"

namespace specfused::cpu {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct BFloat16 {
  uint16_t bits;
  explicit operator float() const { return bits_to_float(uint32_t{bits} << 16); }
  static BFloat16 round(float value) {
    const uint32_t u = float_to_bits(value);
    if (value != value) return {static_cast<uint16_t>((u >> 16) | 0x40)};  // keep a NaN a NaN
    return {static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
  }
};

struct Float16 {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t exponent = (bits >> 10) & 31;
    const uint32_t mantissa = bits & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal or zero: exact
    return sign != 0 ? -magnitude : magnitude;
  }
  static Float16 round(float value) {
    const uint32_t u = float_to_bits(value);
    const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000);
    const uint32_t magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to inf
    if (magnitude <
        0x38800000u) {  // subnormal: adding 0.5 leaves multiples of 2^-24 in the low bits
      const float shifted = bits_to_float(magnitude) + 0.5f;
      return {static_cast<uint16_t>(sign | (float_to_bits(shifted) - float_to_bits(0.5f)))};
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
  }
};

struct Float32 {
  float value;
  explicit operator float() const { return value; }
  static Float32 round(float value) { return {value}; }
};

// Calls f with a value of the element type.
template <class F>
decltype(auto) with_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(Float16{});
    default:
      return f(Float32{});
  }
}

}  // namespace specfused::cpu
