// SPDX-License-Identifier: Apache-2.0
// One attention step with random data on the device: shuffled slots, random trees, and NaN in every
// slot that no row may see.
#pragma once

#include "check.h"

namespace specfused::checks {

struct AttnShape {
  int num_q_heads, num_kv_heads, head_dim;
  int num_rows;           // W; 1: decode_attn
  Vec<int64_t> seq_lens;  // committed lengths
  DType dtype = DType::kBFloat16;
  int num_ctas = 0;           // of the plan; 0: the device's
  bool store = false;         // the launch stores the step's new rows
  bool window_slots = false;  // window columns have slots of their own
  int page = 1;               // slots side by side

  int bs() const { return static_cast<int>(seq_lens.size()); }
  int group() const { return num_q_heads / num_kv_heads; }
  int64_t row_elements() const { return int64_t{num_kv_heads} * head_dim; }
  std::string name() const;
};

struct AttnCase {
  // Q, caches and out of one launch. Timings rotate over several so that caches are cold.
  struct Set {
    Dev<char> q, k, v, k_new, v_new, out;
    Dev<int32_t> req_to_token;
    Dev<int64_t> window_slots;
    Vec<int64_t> window_slots_host;  // [bs, W]
  };

  AttnShape shape;
  int64_t max_context, num_slots;
  int num_ctas = 0;
  Dev<int64_t> seq_lens, req_pool_indices, tree_words;
  Dev<int32_t> plan;
  Dev<float> lse;
  Dev<char> workspace;
  std::vector<Set> sets;
  Vec<int64_t> tree_words_host, req_pool_indices_host;

  // poison: NaN in unused slots and in the workspace; not for timings, and not for initcheck, which
  // looks for reads of what was never written. capacity: room for any lengths up to it, so that
  // seq_lens may change; then no slot is poisoned.
  AttnCase(const AttnShape& shape, Random& random, int num_sets = 1, bool poison = true,
           int64_t capacity = 0);

  AttnParams params(int set) const;
  // The same arguments with copies in host memory, for the CPU implementation.
  struct HostCopy {
    AttnParams params;
    Vec<char> q, k, v, k_new, v_new, out;
    Vec<int32_t> req_to_token;
    Vec<int64_t> seq_lens, req_pool_indices, tree_words, window_slots, out_cache_loc;
    Vec<float> lse;
  };
  HostCopy host_copy(int set) const;

  void set_seq_lens(const Vec<int64_t>& lengths);
  void launch_plan(cudaStream_t stream) const;
  void launch(int set, cudaStream_t stream) const;
  void clear_out(int set);

 private:
  void draw_trees(Random& random);
  void make_set(Set& set, Random& random, bool poison, int64_t capacity);
};

float element_to_float(const char* data, int64_t index, DType dtype);
void float_to_element(float value, char* data, int64_t index, DType dtype);

}  // namespace specfused::checks
