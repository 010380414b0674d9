// SPDX-License-Identifier: Apache-2.0
// wgmma, mma.sync and ldmatrix, see tensor.h.
#include "tensor.h"

#include <algorithm>
#include <deque>

#include "../../csrc/cpu/element.h"
#include "copies.h"
#include "fibers.h"

namespace emulation {
namespace {

constexpr int kRows = 16;  // of a warp
constexpr int kDepth = 16;
constexpr int kMaxColumns = 256;

using Fragment = float[kRows][kDepth];

// A product of all lanes, or the end of a group.
struct Step {
  bool end_of_group;
  Product lanes[kWarpSize];
  long fence_time;
};

struct WarpQueue {
  std::deque<Step> steps;
  int groups = 0;
};
WarpQueue queues[kMaxWarps];

float widen(Type type, uint16_t bits) {
  using namespace specfused::cpu;
  return type == Type::kBFloat16 ? float(BFloat16{bits}) : float(Float16{bits});
}

// Lane l of A: rows l / 4 and l / 4 + 8, columns from l % 4 * 2 and that + 8, two in a register.
float from_registers(Type type, int row, int column, const uint32_t* const (&lanes)[kWarpSize]) {
  const uint32_t pair = lanes[row % 8 * 4 + column % 8 / 2][row / 8 + column / 8 * 2];
  return widen(type, static_cast<uint16_t>(pair >> (column % 2 * 16)));
}

// Of a row of eight columns of C: the same places, two columns in two registers.
float& accumulator(float* const (&lanes)[kWarpSize], int row, int column) {
  return lanes[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
}

// An operand in shared memory, in the layout with 128-byte swizzle: rows of 128 bytes.
struct Operand {
  uint32_t address, leading, stride;
  Type type;
  long fence_time;

  Operand(uint64_t descriptor, Type element, long fence)
      : address(bytes(descriptor, 0)),
        leading(bytes(descriptor, 16)),
        stride(bytes(descriptor, 32)),
        type(element),
        fence_time(fence) {
    if (descriptor >> 62 != 1) fail("only the 128-byte swizzle is modelled", descriptor >> 62);
    if ((descriptor >> 49 & 7) != 0) fail("only base offset 0 is modelled");
  }

  static uint32_t bytes(uint64_t descriptor, int bit) {
    return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4;
  }

  // Eight elements from `offset` bytes on: the hardware flips address bits 4-6 by bits 7-9.
  void read(uint32_t offset, float (&values)[8]) const {
    const uint32_t at = address + offset;
    const uint16_t* data = read_by_async_proxy(at ^ (at >> 7 & 7) << 4, fence_time);
    for (int i = 0; i < 8; ++i) values[i] = widen(type, data[i]);
  }

  // The eight elements of a row from column `k` on, where the columns are side by side.
  void row(int row, int k, float (&values)[8]) const {
    read(row / 8 * stride + row % 8 * 128 + k * 2, values);
  }

  // The eight elements of column `k` from row `row` on, where the rows are side by side.
  void column(int row, int k, float (&values)[8]) const {
    read(row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128, values);
  }
};

void read_a(const Step& step, int warp, Fragment& a) {
  const Product& product = step.lanes[0];
  if (product.a == nullptr) {
    const Operand operand(product.a_descriptor, product.type, step.fence_time);
    float values[8];
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kDepth; k += 8) {
        operand.row(warp % 4 * kRows + row, k, values);
        std::copy_n(values, 8, &a[row][k]);
      }
    }
    return;
  }
  const uint32_t* registers[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) registers[i] = step.lanes[i].a;
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kDepth; ++k) a[row][k] = from_registers(product.type, row, k, registers);
  }
}

void read_b(const Step& step, float (&b)[kDepth][kMaxColumns]) {
  const Product& product = step.lanes[0];
  const Operand operand(product.b_descriptor, product.type, step.fence_time);
  float values[8];
  if (product.b_transposed) {
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < product.columns; n += 8) {
        operand.column(n, k, values);
        std::copy_n(values, 8, &b[k][n]);
      }
    }
  } else {
    for (int n = 0; n < product.columns; ++n) {
      for (int k = 0; k < kDepth; k += 8) {
        operand.row(n, k, values);
        for (int i = 0; i < 8; ++i) b[k + i][n] = values[i];
      }
    }
  }
}

void run(const Step& step, int warp) {
  static Fragment a;
  static float b[kDepth][kMaxColumns];
  read_a(step, warp, a);
  read_b(step, b);
  const Product& product = step.lanes[0];
  float* d[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) d[i] = step.lanes[i].d;
  for (int row = 0; row < kRows; ++row) {
    float sums[kMaxColumns];
    for (int n = 0; n < product.columns; ++n) sums[n] = product.add ? accumulator(d, row, n) : 0;
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < product.columns; ++n) sums[n] += a[row][k] * b[k][n];
    }
    for (int n = 0; n < product.columns; ++n) accumulator(d, row, n) = sums[n];
  }
}

void run_first(int warp) {
  WarpQueue& queue = queues[warp];
  if (queue.steps.front().end_of_group) {
    --queue.groups;
  } else {
    run(queue.steps.front(), warp);
  }
  queue.steps.pop_front();
  progress();
}

}  // namespace

void start_product(Product product) {
  together(product, [](Product* const(&lanes)[kWarpSize]) {
    Step step{false, {}, proxy_fence_time(thread())};
    for (int i = 0; i < kWarpSize; ++i) {
      const Product& first = *lanes[0];
      const Product& other = step.lanes[i] = *lanes[i];
      if (other.b_descriptor != first.b_descriptor || other.a_descriptor != first.a_descriptor ||
          other.add != first.add) {
        fail("lanes give different descriptors to one wgmma", i);
      }
      step.fence_time = std::min(step.fence_time, proxy_fence_time(warp() * kWarpSize + i));
    }
    queues[warp()].steps.push_back(step);
  });
}

void commit_products() {
  int nothing = 0;
  together(nothing, [](auto&) {
    queues[warp()].steps.push_back({true, {}, 0});
    ++queues[warp()].groups;
  });
}

void wait_for_products(int pending_groups) {
  together(pending_groups, [=](auto&) {
    while (queues[warp()].groups > pending_groups) run_first(warp());
  });
}

void expect_no_products() {
  for (int i = 0; i < kMaxWarps; ++i) {
    if (!queues[i].steps.empty()) fail("a CTA ended with wgmma in flight, warp", i);
  }
}

void tensor_engine(bool all) {
  for (int i = 0; i < num_threads() / kWarpSize; ++i) {
    if (queues[i].steps.empty()) continue;
    size_t budget = all ? queues[i].steps.size() : random_below(4) == 0 ? random_below(12) : 0;
    for (; budget > 0 && !queues[i].steps.empty(); --budget) run_first(i);
  }
}

void multiply_16x8x16(Type type, float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  struct Lane {
    Type type;
    float* c;
    const uint32_t* a;
    uint32_t b[2];
  } mine{type, c, a, {b0, b1}};
  together(mine, [](Lane* const(&lanes)[kWarpSize]) {
    float* sums[kWarpSize];
    const uint32_t* rows[kWarpSize];
    for (int i = 0; i < kWarpSize; ++i) {
      sums[i] = lanes[i]->c;
      rows[i] = lanes[i]->a;
    }
    const Type type = lanes[0]->type;
    float b[kDepth][8];
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < 8; ++n) {
        const uint32_t pair = lanes[n * 4 + k % 8 / 2]->b[k / 8];
        b[k][n] = widen(type, static_cast<uint16_t>(pair >> (k % 2 * 16)));
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kDepth; ++k) {
        const float x = from_registers(type, row, k, rows);
        for (int n = 0; n < 8; ++n) accumulator(sums, row, n) += x * b[k][n];
      }
    }
  });
}

void load_matrices(uint32_t* r, uint32_t address, bool transposed) {
  struct Lane {
    uint32_t* r;
    uint32_t address;
    bool transposed;
  } mine{r, address, transposed};
  together(mine, [](Lane* const(&lanes)[kWarpSize]) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const uint16_t* rows[8];
      for (int i = 0; i < 8; ++i) {
        const uint32_t from = lanes[matrix * 8 + i]->address;
        if (from % 16 != 0) fail("ldmatrix is not aligned", from);
        rows[i] = static_cast<const uint16_t*>(shared_pointer(from, 16));
      }
      for (int i = 0; i < kWarpSize; ++i) {
        const int x = i / 4;
        const int y = i % 4 * 2;
        const uint32_t low = lanes[0]->transposed ? rows[y][x] : rows[x][y];
        const uint32_t high = lanes[0]->transposed ? rows[y + 1][x] : rows[x][y + 1];
        lanes[i]->r[matrix] = low | high << 16;
      }
    }
  });
}

}  // namespace emulation
