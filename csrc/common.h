// SPDX-License-Identifier: Apache-2.0
// What every header of the core shares: host/device qualifiers, element types, the error type.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SPECFUSED_HD __host__ __device__ __forceinline__
#else
#define SPECFUSED_HD inline
#endif

namespace specfused {

enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

SPECFUSED_HD int dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rows of one step: a tree word has one bit per window column, so 64 is the widest window.
constexpr int kMaxWindow = 64;

// Most candidates that draft_topk picks of a row.
constexpr int kMaxTopk = 16;

// Longest context that a table may have. What claims to be longer is a mistake, and bounding it
// keeps every sum of lengths and tiles inside its type.
constexpr int64_t kMaxContext = int64_t{1} << 23;

// C of a request from the engine's length and the step's convention; -1 if it cannot be one.
SPECFUSED_HD int64_t committed_length(int64_t seq_len, int64_t seq_lens_offset) {
  const bool sane = seq_len >= 0 && seq_len <= kMaxContext;
  const int64_t committed = sane ? seq_len + seq_lens_offset : -1;
  return committed >= 0 && committed <= kMaxContext ? committed : -1;
}

template <class T>
SPECFUSED_HD T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
SPECFUSED_HD T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
SPECFUSED_HD T max_of(T a, T b) {
  return a > b ? a : b;
}

}  // namespace specfused
