// SPDX-License-Identifier: Apache-2.0
#include "attn_compare.h"

namespace specfused::checks {
namespace {

__global__ void compare_kernel(const char* a, const char* b, int64_t n, int* differ) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    if (a[i] != b[i]) *differ = 1;
  }
}

// Everything that a launch may write and others may see: outputs, KV pools, counters.
struct Memory {
  const char* name;
  char* data;
  size_t size;
};

std::vector<Memory> written_memory(AttnCase& c) {
  std::vector<Memory> all;
  for (AttnCase::Set& set : c.sets) {
    all.push_back({"out", set.out.data(), set.out.size()});
    all.push_back({"K", set.k.data(), set.k.size()});
    all.push_back({"V", set.v.data(), set.v.size()});
  }
  all.push_back({"LSE", reinterpret_cast<char*>(c.lse.data()), c.lse.size() * sizeof(float)});
  all.push_back({"counters", c.workspace.data(), kCounterBytes});
  return all;
}

class Snapshot {
 public:
  explicit Snapshot(AttnCase& c) : memory_(written_memory(c)), copies_(memory_.size()) {
    differ_.resize(memory_.size());
    for (size_t i = 0; i < memory_.size(); ++i) {
      copies_[i].resize(memory_[i].size);
      copy(copies_[i].data(), memory_[i].data, memory_[i].size);
    }
  }

  void restore() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      copy(memory_[i].data, copies_[i].data(), memory_[i].size);
    }
  }

  // Names of what is not as it was, or "".
  std::string differences() {
    differ_.set_bytes(0);
    for (size_t i = 0; i < memory_.size(); ++i) {
      compare_kernel<<<256, 256>>>(memory_[i].data, copies_[i].data(), memory_[i].size,
                                   differ_.data() + i);
      CUDA_OK(cudaGetLastError());
    }
    const Vec<int> differ = differ_.get();
    std::string names;
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (differ[i] != 0) names += std::string(names.empty() ? "" : ", ") + memory_[i].name;
    }
    return names;
  }

 private:
  static void copy(char* to, const char* from, size_t size) {
    CUDA_OK(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, nullptr));
  }

  std::vector<Memory> memory_;
  std::vector<Dev<char>> copies_;
  Dev<int> differ_;
};

// Two launches in a row, of two sets of data: the second may start before the first has ended.
void launch_both(AttnCase& c, uint32_t seed) {
  CUDA_OK(smxx::set_delay_seed(seed));
  c.launch(1, nullptr);
  c.launch(0, nullptr);
  CUDA_OK(cudaDeviceSynchronize());
}

int check(const AttnShape& shape, int seeds, Random& random) {
  const std::string what = doing = shape.name();
  AttnCase c(shape, random, 2);
  AttnCase::HostCopy want = c.host_copy(0);
  cpu::store_rows(want.params);
  attend_on_cpu(want.params);
  c.launch_plan(nullptr);
  for (const int set : {0, 1}) c.clear_out(set);
  const Snapshot before(c);
  launch_both(c, 0);
  check_values(c, want, what);
  expect(!shape.store || (c.sets[0].k.get() == want.k && c.sets[0].v.get() == want.v),
         "%s: caches differ from the stored rows", what.c_str());
  Snapshot undelayed(c);
  for (int seed = 1; seed <= seeds; ++seed) {
    doing = what + " under delays of seed " + std::to_string(seed);
    before.restore();
    launch_both(c, static_cast<uint32_t>(seed));
    const std::string names = undelayed.differences();
    expect(names.empty(), "%s: other bits in %s", doing.c_str(), names.c_str());
  }
  CUDA_OK(smxx::set_delay_seed(0));
  return seeds;
}

std::vector<AttnShape> delay_shapes() {
  constexpr DType kBf16 = DType::kBFloat16;
  std::vector<AttnShape> shapes;
  for (const int d : {64, 128, 256}) {
    shapes.push_back({32, 8, d, 1, {1024}});
    shapes.push_back({8, 2, d, 4, {300, 64, 1900}, kBf16, 0, true, false, 16});
    shapes.push_back({32, 8, d, 16, {1024}});
    shapes.push_back({8, 2, d, 64, {0, 1, 63, 64, 65, 127, 128, 500}, kBf16, 0, true});
  }
  shapes.push_back({8, 1, 128, 1, {9000}});
  shapes.push_back({32, 8, 128, 8, {2500}, kBf16, 37});
  // More segments than one CTA has in its table, hardly any of them split.
  shapes.push_back({8, 2, 128, 4, Vec<int64_t>(130, 150), kBf16, 0, false, true});
  shapes.push_back({8, 2, 128, 16, {0, 3, 100, 64, 700, 1}, DType::kFloat16, 1});
  shapes.push_back({14, 2, 128, 16, {5000, 0, 1000, 64, 1}});
  // More CTAs than fit: owners of shares of the combine give up.
  shapes.push_back({16, 4, 128, 16, {6000, 100}, kBf16, 1000});
  shapes.push_back({32, 8, 128, 64, {1024}, kBf16, 0, true});
  shapes.push_back({4, 1, 128, 64, {2500, 100}, kBf16, 3, false, true, 16});
  return shapes;
}

}  // namespace

void check_delays(const Options& options, Groups& groups) {
  for (const AttnShape& shape : delay_shapes()) {
    groups.run("delays/" + shape.name(),
               [&](Random& random) { return check(shape, options.delays, random); });
  }
}

}  // namespace specfused::checks
