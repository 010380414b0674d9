// SPDX-License-Identifier: Apache-2.0
#include "attn_compare.h"

namespace specfused::checks {
namespace {

// All elements of q, or of the V rows that may be read, to one value.
void set_all(Dev<char>& data, float value, DType dtype) {
  Vec<char> host = data.get();
  for (int64_t i = 0; i < static_cast<int64_t>(host.size()) / dtype_bytes(dtype); ++i) {
    const float before = element_to_float(host.data(), i, dtype);
    if (before == before) float_to_element(value, host.data(), i, dtype);  // poison stays
  }
  data.put(host);
}

// Row i sees one window column and nothing else: its LSE is one score, its output one row of V.
void see_one_column(AttnCase& c) {
  const int width = c.shape.num_rows;
  for (int i = 0; i < static_cast<int>(c.tree_words_host.size()); ++i) {
    const int column = (i % width * 7 + 3) % width;
    // Nobody sees column W - 2, see draw_trees.
    c.tree_words_host[i] = static_cast<int64_t>(node_bit(column == width - 2 ? 0 : column));
  }
  c.tree_words.put(c.tree_words_host);
}

void compare(AttnCase& c, const std::string& what) {
  doing = what + " " + c.shape.name();
  AttnCase::HostCopy want = c.host_copy(0);
  attend_on_cpu(want.params);
  c.clear_out(0);
  c.launch_plan(nullptr);
  c.launch(0, nullptr);
  CUDA_OK(cudaDeviceSynchronize());
  check_values(c, want, "[" + what + "] " + c.shape.name());
}

}  // namespace

int probe_steps(DType dtype, int head_dim, int num_rows, Random& random) {
  int cases = 0;
  const auto with = [&](Vec<int64_t> seq_lens, int num_ctas, const char* what, auto&& prepare) {
    AttnShape shape{4, 1, head_dim, num_rows, std::move(seq_lens), dtype, num_ctas};
    AttnCase c(shape, random);
    prepare(c);
    compare(c, what);
    ++cases;
  };
  with({0}, 1, "one column each, so LSE = S and out = a row of V", see_one_column);
  with({41}, 1, "Q = 0, so out = mean of V; one tile or two",
       [&](AttnCase& c) { set_all(c.sets[0].q, 0.0f, dtype); });
  with({41}, 1, "V = 1, so out = 1 whatever S is",
       [&](AttnCase& c) { set_all(c.sets[0].v, 1.0f, dtype); });
  with({0}, 1, "window alone", [](AttnCase&) {});
  with({63}, 1, "two tiles", [](AttnCase&) {});
  with({700}, 1, "more tiles than stages, one split", [](AttnCase&) {});
  with({0, 3, 100, 64, 700, 1}, 1, "many segments of one CTA", [](AttnCase&) {});
  with({700}, 2, "two splits", [](AttnCase&) {});
  with({700}, 12, "a split for each tile", [](AttnCase&) {});
  return cases;
}

}  // namespace specfused::checks
