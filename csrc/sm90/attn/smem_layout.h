// SPDX-License-Identifier: Apache-2.0
// Where the elements of K, V and Q are in shared memory, and the descriptors by which wgmma finds
// them. Host and device: tests/test_attn_select.py checks one against the other.
//
// A block of 16-bit elements, rows x head_dim, is cut into chunks of 64 elements. A chunk is
// [rows][128 bytes], with 16-byte part c of row r at part c ^ (r % 8): the canonical layout with
// 128-byte swizzle, in which the hardware flips address bits 4-6 by bits 7-9. So a chunk must begin
// at a multiple of 1024 bytes. One layout serves K (its K elements, head_dim, side by side) and V
// (its N elements, head_dim, side by side).
#pragma once

#include "../../common.h"

namespace specfused::sm90 {

constexpr int kChunkElements = 64;
constexpr int kChunkRowBytes = 128;
constexpr int kSwizzleAtomBytes = 8 * kChunkRowBytes;

// Byte of 16-byte part `part` (of all parts of a row) of row `row` of a block with `rows` rows.
SPECFUSED_HD constexpr uint32_t block_offset(int row, int part, int rows) {
  return static_cast<uint32_t>(part / 8 * rows * kChunkRowBytes + row * kChunkRowBytes +
                               (((part % 8) ^ (row % 8)) << 4));
}

// PTX ISA, matrix descriptor of wgmma, all in units of 16 bytes: bits 0-13 address, 16-29 leading
// and 32-45 stride dimension byte offset, 49-51 base offset (0: aligned), 62-63 swizzle, 1 = 128 B.
SPECFUSED_HD constexpr uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes,
                                                  uint32_t stride_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// 16 elements of head_dim from d on of all rows (K of a tile, or 64 rows of Q). Stride: from eight
// rows to the next eight. The leading offset has no meaning in this layout; 1 by convention. The
// step is added to the address behind the shift, so that all d share what was computed of a block.
SPECFUSED_HD constexpr uint64_t row_descriptor(uint32_t block, int d, int rows) {
  const int step = d / kChunkElements * rows * kChunkRowBytes + d % kChunkElements * 2;
  return matrix_descriptor(block, 16, kSwizzleAtomBytes) + (step >> 4);
}

// 16 rows (tokens of V) from `row` on, all of head_dim. Leading: from a chunk to the next; stride:
// from eight rows to the next eight.
SPECFUSED_HD constexpr uint64_t column_descriptor(uint32_t block, int row, int rows) {
  const int step = row * kChunkRowBytes;
  return matrix_descriptor(block, rows * kChunkRowBytes, kSwizzleAtomBytes) + (step >> 4);
}

}  // namespace specfused::sm90
