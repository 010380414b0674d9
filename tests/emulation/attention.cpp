// SPDX-License-Identifier: Apache-2.0
// One attention step on the emulator, compared with the CPU implementation.
//
//   attention SEED DTYPE HEAD_DIM STAGES WIDTH GROUP KV_HEADS CTAS STORE WINDOW_SLOTS
//             LENGTH...
//
// Exit status: 0 right, 1 wrong results, 2 the kernel broke a rule of the hardware.
#include "emulation/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "csrc/cpu/element.h"
#include "csrc/launch.h"
#include "csrc/workspace.h"
#include "emulation/fibers.h"

namespace specfused {
namespace {

constexpr uint16_t kNan = 0xffff;  // in both types

struct Shape {
  DType dtype;
  int head_dim, stages, width, group, kv_heads, ctas;
  bool store, window_slots;
  std::vector<int64_t> lengths;

  int bs() const { return static_cast<int>(lengths.size()); }
  int q_heads() const { return group * kv_heads; }
  int rows() const { return width * group; }  // of a KV head
};

std::mt19937_64 generator;

using Values = std::vector<uint16_t>;

float widen(DType dtype, uint16_t bits) {
  return dtype == DType::kFloat16 ? float(cpu::Float16{bits}) : float(cpu::BFloat16{bits});
}

void draw(DType dtype, uint16_t* values, int64_t n) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < n; ++i) {
    const float value = normal(generator);
    values[i] = dtype == DType::kFloat16 ? cpu::Float16::round(value).bits
                                         : cpu::BFloat16::round(value).bits;
  }
}

Values drawn(DType dtype, int64_t n) {
  Values values(n);
  draw(dtype, values.data(), n);
  return values;
}

template <class T>
std::vector<T> shuffled(int64_t n, T first) {
  std::vector<T> values(n);
  std::iota(values.begin(), values.end(), first);
  std::shuffle(values.begin(), values.end(), generator);
  return values;
}

// Random data in shuffled slots. Column width - 2 is seen by nobody, not even by its own row; slots
// that nobody may read hold NaNs.
struct Case {
  const Shape& shape;
  int64_t max_context, num_slots;
  Values q, k, v, k_new, v_new, out;
  std::vector<float> lse;
  std::vector<int64_t> words, pool, window_slots;
  std::vector<int32_t> table, plan;
  std::vector<char> workspace;

  explicit Case(const Shape& s) : shape(s) {
    const int64_t longest = *std::max_element(s.lengths.begin(), s.lengths.end());
    max_context = longest + s.width;
    num_slots = 5 + s.bs() * s.width;
    for (const int64_t length : s.lengths) num_slots += length;
    const int64_t rows = int64_t{s.bs()} * s.width;
    const int64_t row = int64_t{s.kv_heads} * shape.head_dim;
    q = drawn(s.dtype, rows * s.q_heads() * shape.head_dim);
    out.assign(q.size(), kNan);
    lse.assign(rows * s.q_heads(), NAN);
    if (s.store) {
      k_new = drawn(s.dtype, rows * row);
      v_new = drawn(s.dtype, rows * row);
    }
    draw_trees();
    fill_slots(row);
    plan.resize(plan_numel(s.bs(), s.ctas));
    make_plan(s.lengths.data(), 0, s.bs(), s.kv_heads, s.ctas, plan.data());
    workspace.assign(attn_workspace_bytes(s.ctas, s.rows(), s.head_dim, s.dtype), '\xff');
    std::fill_n(workspace.begin(), kCounterBytes, 0);
  }

  void draw_trees() {
    const int width = shape.width;
    words.assign(int64_t{shape.bs()} * width, 1);
    for (int r = 0; r < shape.bs(); ++r) {
      int64_t* word = &words[int64_t{r} * width];
      for (int i = 1; i < width; ++i) word[i] = word[generator() % i] | int64_t(node_bit(i));
      if (width <= 3) continue;
      for (int i = 0; i < width; ++i) word[i] &= ~int64_t(node_bit(width - 2));
      word[width - 2] |= 1;
    }
  }

  void fill_slots(int64_t row) {
    pool = shuffled<int64_t>(shape.bs(), 0);
    k.assign(num_slots * row, kNan);
    v.assign(num_slots * row, kNan);
    table.assign(shape.bs() * max_context, 0);
    const auto ids = shuffled<int32_t>(num_slots - 1, 1);
    size_t next = 0;
    for (int r = 0; r < shape.bs(); ++r) {
      const int64_t committed = shape.lengths[r];
      for (int64_t p = 0; p < committed + shape.width; ++p) {
        const int32_t slot = ids[next++];
        const int64_t column = p - committed;
        if (column >= 0) window_slots.push_back(slot);
        if (column < 0 || !shape.window_slots) table[pool[r] * max_context + p] = slot;
        const bool unseen = shape.width > 3 && column == shape.width - 2;
        if (column >= 0 && (unseen || shape.store)) continue;
        draw(shape.dtype, &k[slot * row], row);
        draw(shape.dtype, &v[slot * row], row);
      }
    }
  }

  AttnParams params() {
    AttnParams p{};
    p.q = q.data();
    p.k_cache = k.data();
    p.v_cache = v.data();
    if (shape.store) {
      p.k_new = k_new.data();
      p.v_new = v_new.data();
      p.out_cache_loc = window_slots.data();
    }
    p.tree_words = shape.width == 1 ? nullptr : words.data();
    p.out = out.data();
    p.lse = lse.data();
    p.plan = plan.data();
    p.workspace = workspace.data();
    p.table.req_to_token = table.data();
    p.table.req_pool_indices = pool.data();
    p.table.seq_lens = shape.lengths.data();
    p.table.window_slots = shape.window_slots ? window_slots.data() : nullptr;
    p.table.stride_req_to_token = p.table.max_context = max_context;
    p.table.stride_window_slots = p.stride_words = shape.width;
    p.table.num_reqs = p.bs = shape.bs();
    p.table.num_slots = num_slots;
    p.table.width = p.num_rows = shape.width;
    p.stride_q_row = p.stride_out_row = int64_t{shape.q_heads()} * shape.head_dim;
    p.stride_k_slot = p.stride_v_slot = int64_t{shape.kv_heads} * shape.head_dim;
    p.stride_k_new_row = p.stride_v_new_row = p.stride_k_slot;
    p.stride_q_head = p.stride_out_head = p.stride_k_head = p.stride_v_head = shape.head_dim;
    p.stride_k_new_head = p.stride_v_new_head = shape.head_dim;
    p.stride_out_cache_loc = 1;
    p.num_q_heads = shape.q_heads();
    p.num_kv_heads = shape.kv_heads;
    p.head_dim = shape.head_dim;
    p.num_ctas = shape.ctas;
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    p.dtype = shape.dtype;
    return p;
  }
};

// Distance of each row relative to its size, and of each LSE; a NaN is a large one.
bool compare(const Case& is, const Case& should) {
  const Shape& s = is.shape;
  const double bound = s.dtype == DType::kBFloat16 ? 1e-2 : 2e-3;
  const auto or_large = [](double x) { return std::isnan(x) ? 1e9 : x; };
  double worst = 0, worst_lse = 0;
  for (size_t row = 0; row < is.lse.size(); ++row) {
    double difference = 0, size = 0;
    for (int d = 0; d < s.head_dim; ++d) {
      const double x = widen(s.dtype, is.out[row * s.head_dim + d]);
      const double y = widen(s.dtype, should.out[row * s.head_dim + d]);
      difference += (x - y) * (x - y);
      size += y * y;
    }
    worst = std::max(worst, or_large(std::sqrt(difference / size)));
    worst_lse = std::max(worst_lse, or_large(std::abs(double{is.lse[row]} - should.lse[row])));
  }
  const auto counters = is.workspace.begin();
  const bool clean = std::all_of(counters, counters + kCounterBytes, [](char c) { return c == 0; });
  std::printf("out differs by %.3g, LSE by %.3g, counters %s zero\n", worst, worst_lse,
              clean ? "are" : "are not");
  return worst < bound && worst_lse < 2e-3 && is.k == should.k && is.v == should.v && clean;
}

int run(const Shape& shape, uint64_t seed) {
  generator.seed(seed);
  Case is(shape);
  Case should = is;
  emulation::set_seed(generator());
  const int error = emulation::launch_attention(is.params(), shape.stages);
  if (error != 0) {
    std::printf("the launch failed\n");
    return emulation::kBrokenRule;
  }
  const AttnParams p = should.params();
  const int64_t units = int64_t{p.bs} * p.num_q_heads;
  cpu::store_rows(p);
  shape.width == 1 ? cpu::decode_attn(p, 0, units) : cpu::verify_attn(p, 0, units);
  return compare(is, should) ? 0 : 1;
}

}  // namespace
}  // namespace specfused

int main(int argc, char** argv) {
  using namespace specfused;
  constexpr int kFirstLength = 11;
  if (argc <= kFirstLength) {
    std::printf("see the first lines of attention.cpp\n");
    return emulation::kBrokenRule;
  }
  std::vector<int64_t> a;
  for (int i = 1; i < argc; ++i) a.push_back(std::atoll(argv[i]));
  Shape shape;
  shape.dtype = static_cast<DType>(a[1]);
  int* const sizes[] = {&shape.head_dim, &shape.stages,   &shape.width,
                        &shape.group,    &shape.kv_heads, &shape.ctas};
  for (int i = 0; i < 6; ++i) *sizes[i] = static_cast<int>(a[2 + i]);
  shape.store = a[8] != 0;
  shape.window_slots = a[9] != 0;
  shape.lengths.assign(a.begin() + kFirstLength - 1, a.end());
  return run(shape, static_cast<uint64_t>(a[0]));
}
