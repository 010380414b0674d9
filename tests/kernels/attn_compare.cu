// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "attn_compare.h"

namespace specfused::checks {
namespace {

// The rows that differ by more than they may, and the first of them.
struct Differences {
  int rows = 0;
  size_t first = 0;
  double worst = 0, worst_lse = 0;
};

double or_large(double error) { return std::isnan(error) ? 1e9 : error; }

std::string where(const AttnCase& c, const AttnCase::HostCopy& want, const Vec<char>& out,
                  float lse, size_t row) {
  const int heads = c.shape.num_q_heads;
  const int64_t first = static_cast<int64_t>(row) * c.shape.head_dim;
  int worst = 0;
  double largest = -1;
  for (int d = 0; d < c.shape.head_dim; ++d) {
    const double is = element_to_float(out.data(), first + d, c.shape.dtype);
    const double error =
        or_large(std::abs(is - element_to_float(want.out.data(), first + d, c.shape.dtype)));
    if (error > largest) {
      largest = error;
      worst = d;
    }
  }
  char text[200];
  std::snprintf(text, sizeof text,
                "request %zu row %zu head %zu: out[%d] is %.5g, not %.5g; LSE is %.6g, not %.6g",
                row / heads / c.shape.num_rows, row / heads % c.shape.num_rows, row % heads, worst,
                element_to_float(out.data(), first + worst, c.shape.dtype),
                element_to_float(want.out.data(), first + worst, c.shape.dtype), lse,
                want.lse[row]);
  return text;
}

}  // namespace

void attend_on_cpu(const AttnParams& p) {
  const int64_t units = int64_t{p.bs} * p.num_q_heads;
  const int64_t threads = std::min<int64_t>(std::max(1u, std::thread::hardware_concurrency()), 32);
  std::vector<std::thread> pool;
  for (int64_t t = 0; t < threads; ++t) {
    pool.emplace_back([&p, begin = units * t / threads, end = units * (t + 1) / threads] {
      p.tree_words == nullptr ? cpu::decode_attn(p, begin, end) : cpu::verify_attn(p, begin, end);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

// Relative distance of each output row, absolute distance of each LSE. A NaN is a large distance.
void check_values(const AttnCase& c, const AttnCase::HostCopy& want, const std::string& what) {
  const Vec<char> out = c.sets[0].out.get();
  const Vec<float> lse = c.lse.get();
  const DType dtype = c.shape.dtype;
  const double bound = dtype == DType::kBFloat16 ? 1e-2 : dtype == DType::kFloat16 ? 2e-3 : 2e-5;
  const double lse_bound = dtype == DType::kFloat32 ? 1e-4 : 2e-3;
  Differences found;
  for (size_t row = 0; row < lse.size(); ++row) {
    double difference = 0, size = 0;
    for (int d = 0; d < c.shape.head_dim; ++d) {
      const int64_t at = static_cast<int64_t>(row) * c.shape.head_dim + d;
      const double is = element_to_float(out.data(), at, dtype);
      const double should = element_to_float(want.out.data(), at, dtype);
      difference += (is - should) * (is - should);
      size += should * should;
    }
    const double error = or_large(std::sqrt(size > 0 ? difference / size : difference));
    const double lse_error = or_large(std::abs(double{lse[row]} - want.lse[row]));
    found.worst = std::max(found.worst, error);
    found.worst_lse = std::max(found.worst_lse, lse_error);
    if (error < bound && lse_error < lse_bound) continue;
    if (found.rows++ == 0) found.first = row;
  }
  if (found.rows == 0) return;
  expect(false, "%s: %d of %zu rows differ, out by %.3g, LSE by %.3g; first %s", what.c_str(),
         found.rows, lse.size(), found.worst, found.worst_lse,
         where(c, want, out, lse[found.first], found.first).c_str());
}

KernelClass class_of(const AttnShape& shape, int num_rows) {
  int kernel_class;
  CUDA_OK(smxx::attn_kernel_class(num_rows * shape.group(), shape.head_dim, &kernel_class));
  return static_cast<KernelClass>(kernel_class);
}

const char* class_name(KernelClass kernel_class) {
  static const char* const kNames[] = {"few", "many", "wgmma", "wgmma_wide"};
  return kNames[static_cast<int>(kernel_class)];
}

}  // namespace specfused::checks
