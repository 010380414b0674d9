// SPDX-License-Identifier: Apache-2.0
// Tensor cores: wgmma, which runs at any time up to the wait that covers it, and the instructions
// of a warp that end at once (mma.sync, ldmatrix). Sums are in fp32, one after the other.
//
// Descriptors and fragments are decoded as the PTX ISA has them, from registers and shared memory
// as they are when the product runs: what is changed too early or read too early gives wrong
// results. Each warp of a warpgroup runs its own 16 rows on its own.
#pragma once

#include <cstdint>

namespace emulation {

enum class Type { kBFloat16, kFloat16 };

// What one lane gives to wgmma.m64nNk16. Everything but d and a must be the same in all lanes.
struct Product {
  Type type;
  int columns;        // N
  float* d;           // N / 2 registers
  const uint32_t* a;  // 4 registers; null: a_descriptor
  uint64_t a_descriptor;
  uint64_t b_descriptor;
  bool b_transposed;  // the N elements of B are side by side, else its K
  bool add;           // to d
};

void start_product(Product product);
void commit_products();
void wait_for_products(int pending_groups);
void expect_no_products();
void tensor_engine(bool all);

void multiply_16x8x16(Type type, float* c, const uint32_t* a, uint32_t b0, uint32_t b1);
void load_matrices(uint32_t* r, uint32_t address, bool transposed);

}  // namespace emulation
