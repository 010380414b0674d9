// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <numeric>

#include "../../csrc/cpu/element.h"
#include "attn_case.h"

namespace specfused::checks {
namespace {

// About normal: a sum of four uniform numbers.
__device__ float random_value(uint64_t i, uint64_t seed) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  float sum = 0;
  for (int part = 0; part < 4; ++part) sum += static_cast<float>((x >> (16 * part)) & 0xffff);
  return (sum * (1.0f / 65536) - 2.0f) * 1.7320508f;
}

template <class T>
__global__ void fill_kernel(T* data, int64_t n, uint64_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    data[i] = T(random_value(i, seed));
  }
}

void fill(Dev<char>& data, int64_t elements, DType dtype, Random& random) {
  data.resize(elements * dtype_bytes(dtype));
  if (elements == 0) return;
  const uint64_t seed = random.engine();
  const int grid = static_cast<int>(std::min<int64_t>(ceil_div<int64_t>(elements, 256), 2048));
  if (dtype == DType::kBFloat16) {
    fill_kernel<<<grid, 256>>>(reinterpret_cast<__nv_bfloat16*>(data.data()), elements, seed);
  } else if (dtype == DType::kFloat16) {
    fill_kernel<<<grid, 256>>>(reinterpret_cast<__half*>(data.data()), elements, seed);
  } else {
    fill_kernel<<<grid, 256>>>(reinterpret_cast<float*>(data.data()), elements, seed);
  }
  CUDA_OK(cudaGetLastError());
}

// 0xff in every byte is a NaN in each of the three types.
__global__ void poison_kernel(char* rows, const uint8_t* used, int64_t num_slots,
                              int64_t row_bytes) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_slots * row_bytes;
       i += step) {
    if (!used[i / row_bytes]) rows[i] = static_cast<char>(0xff);
  }
}

template <class T>
const T* data_or_null(const Vec<T>& values) {
  return values.empty() ? nullptr : values.data();
}

}  // namespace

std::string AttnShape::name() const {
  static const char* const kTypes[] = {"bf16", "fp16", "fp32"};
  const int64_t tokens = std::accumulate(seq_lens.begin(), seq_lens.end(), int64_t{0});
  char text[160];
  std::snprintf(text, sizeof text, "bs%d tokens%lld W%d hq%d hkv%d d%d %s ctas%d%s%s%s", bs(),
                static_cast<long long>(tokens), num_rows, num_q_heads, num_kv_heads, head_dim,
                kTypes[static_cast<int>(dtype)], num_ctas, store ? " store" : "",
                window_slots ? " window_slots" : "", page > 1 ? " pages" : "");
  return text;
}

AttnCase::AttnCase(const AttnShape& wanted, Random& random, int num_sets, bool poison,
                   int64_t capacity)
    : shape(wanted), sets(num_sets) {
  int64_t longest = capacity;
  int64_t total = 0;  // pages
  for (const int64_t length : shape.seq_lens) {
    longest = std::max(longest, length);
    const int64_t rows = (capacity > 0 ? capacity : length) + shape.num_rows;
    total += ceil_div<int64_t>(rows, shape.page);
  }
  max_context = longest + shape.num_rows;
  num_slots = (1 + total + 37) * shape.page;  // the first page and the last ones are nobody's
  if (shape.dtype != DType::kFloat32) {
    num_ctas = shape.num_ctas;
    if (num_ctas == 0) CUDA_OK(smxx::attn_num_ctas(shape.head_dim, &num_ctas));
    plan.resize(plan_numel(shape.bs(), num_ctas));
  }
  seq_lens.put(shape.seq_lens);
  req_pool_indices_host.resize(shape.bs());
  std::iota(req_pool_indices_host.begin(), req_pool_indices_host.end(), int64_t{0});
  std::shuffle(req_pool_indices_host.begin(), req_pool_indices_host.end(), random.engine);
  req_pool_indices.put(req_pool_indices_host);
  draw_trees(random);
  const int rows = shape.num_rows * shape.group();
  workspace.resize(attn_workspace_bytes(num_ctas, rows, shape.head_dim, shape.dtype));
  if (poison) workspace.set_bytes(0xff);
  if (workspace.size() > 0) CUDA_OK(cudaMemset(workspace.data(), 0, kCounterBytes));
  lse.resize(int64_t{shape.bs()} * shape.num_rows * shape.num_q_heads);
  for (Set& set : sets) make_set(set, random, poison, capacity);
  CUDA_OK(cudaDeviceSynchronize());
}

// Column W - 2 is seen by nobody; the row of that node sees the root instead.
void AttnCase::draw_trees(Random& random) {
  const int width = shape.num_rows;
  tree_words_host.assign(int64_t{shape.bs()} * width, 1);
  for (int r = 0; r < shape.bs(); ++r) {
    int64_t* words = &tree_words_host[int64_t{r} * width];
    for (int i = 1; i < width; ++i) words[i] = words[random.below(i)] | int64_t(node_bit(i));
    if (width <= 3) continue;
    for (int i = 0; i < width; ++i) words[i] &= ~static_cast<int64_t>(node_bit(width - 2));
    words[width - 2] |= 1;
  }
  tree_words.put(tree_words_host);
}

void AttnCase::make_set(Set& set, Random& random, bool poison, int64_t capacity) {
  const int bs = shape.bs();
  const int width = shape.num_rows;
  const int64_t q_elements = int64_t{bs} * width * shape.num_q_heads * shape.head_dim;
  fill(set.q, q_elements, shape.dtype, random);
  fill(set.k, num_slots * shape.row_elements(), shape.dtype, random);
  fill(set.v, num_slots * shape.row_elements(), shape.dtype, random);
  set.out.resize(set.q.size());
  if (shape.store) {
    fill(set.k_new, int64_t{bs} * width * shape.row_elements(), shape.dtype, random);
    fill(set.v_new, int64_t{bs} * width * shape.row_elements(), shape.dtype, random);
  }
  Vec<int32_t> pages(num_slots / shape.page - 1);
  std::iota(pages.begin(), pages.end(), 1);
  std::shuffle(pages.begin(), pages.end(), random.engine);
  Vec<int32_t> table(bs * max_context, 0);
  Vec<uint8_t> used(num_slots, capacity > 0);
  set.window_slots_host.assign(int64_t{bs} * width, 0);
  int64_t next = 0;
  for (int r = 0; r < bs; ++r) {
    const int64_t committed = capacity > 0 ? capacity : shape.seq_lens[r];
    int32_t* row = &table[req_pool_indices_host[r] * max_context];
    next = ceil_div<int64_t>(next, shape.page) * shape.page;
    for (int64_t p = 0; p < committed + width; ++p) {
      const auto slot =
          static_cast<int32_t>(pages[next / shape.page] * shape.page + next % shape.page);
      ++next;
      const int64_t column = p - committed;
      if (column >= 0) set.window_slots_host[int64_t{r} * width + column] = slot;
      // With slots of their own the table's columns behind C are nobody's.
      row[p] = column >= 0 && shape.window_slots ? 0 : slot;
      const bool unseen = width > 3 && column == width - 2;
      // What the launch stores itself must not be there before.
      if (column < 0 || (!unseen && !shape.store)) used[slot] = 1;
    }
  }
  set.req_to_token.put(table);
  set.window_slots.put(set.window_slots_host);
  if (!poison || capacity > 0) return;
  const Dev<uint8_t> used_slots(used);
  const int64_t row_bytes = shape.row_elements() * dtype_bytes(shape.dtype);
  for (Dev<char>* cache : {&set.k, &set.v}) {
    poison_kernel<<<1024, 256>>>(cache->data(), used_slots.data(), num_slots, row_bytes);
  }
  CUDA_OK(cudaDeviceSynchronize());
}

AttnParams AttnCase::params(int index) const {
  const Set& set = sets[index];
  AttnParams p{};
  p.q = set.q.data();
  p.k_cache = set.k.data();
  p.v_cache = set.v.data();
  if (shape.store) {
    p.k_new = set.k_new.data();
    p.v_new = set.v_new.data();
    p.out_cache_loc = set.window_slots.data();
  }
  p.tree_words = shape.num_rows == 1 ? nullptr : tree_words.data();
  p.out = set.out.data();
  p.lse = lse.data();
  p.plan = plan.data();
  p.workspace = workspace.data();
  p.table.req_to_token = set.req_to_token.data();
  p.table.req_pool_indices = req_pool_indices.data();
  p.table.seq_lens = seq_lens.data();
  p.table.window_slots = shape.window_slots ? set.window_slots.data() : nullptr;
  p.table.stride_req_to_token = p.table.max_context = max_context;
  p.table.stride_window_slots = shape.num_rows;
  p.table.num_reqs = p.bs = shape.bs();
  p.table.num_slots = num_slots;
  p.table.width = p.num_rows = shape.num_rows;
  p.stride_q_row = p.stride_out_row = int64_t{shape.num_q_heads} * shape.head_dim;
  p.stride_k_slot = p.stride_v_slot = shape.row_elements();
  p.stride_k_new_row = p.stride_v_new_row = shape.row_elements();
  p.stride_q_head = p.stride_out_head = p.stride_k_head = p.stride_v_head = shape.head_dim;
  p.stride_k_new_head = p.stride_v_new_head = shape.head_dim;
  p.stride_out_cache_loc = 1;
  p.stride_words = shape.num_rows;
  p.num_q_heads = shape.num_q_heads;
  p.num_kv_heads = shape.num_kv_heads;
  p.head_dim = shape.head_dim;
  p.num_ctas = num_ctas;
  p.sm_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  p.dtype = shape.dtype;
  return p;
}

AttnCase::HostCopy AttnCase::host_copy(int index) const {
  const Set& set = sets[index];
  HostCopy h;
  h.q = set.q.get();
  h.k = set.k.get();
  h.v = set.v.get();
  h.k_new = set.k_new.get();
  h.v_new = set.v_new.get();
  h.out.resize(set.out.size());
  h.lse.resize(lse.size());
  h.req_to_token = set.req_to_token.get();
  h.seq_lens = shape.seq_lens;
  h.req_pool_indices = req_pool_indices_host;
  h.tree_words = tree_words_host;
  h.window_slots = set.window_slots_host;
  AttnParams& p = h.params = params(index);
  p.q = h.q.data();
  p.k_cache = h.k.data();
  p.v_cache = h.v.data();
  p.k_new = data_or_null(h.k_new);
  p.v_new = data_or_null(h.v_new);
  p.out_cache_loc = shape.store ? h.window_slots.data() : nullptr;
  p.tree_words = shape.num_rows == 1 ? nullptr : h.tree_words.data();
  p.out = h.out.data();
  p.lse = h.lse.data();
  p.plan = nullptr;
  p.workspace = nullptr;
  p.table.req_to_token = h.req_to_token.data();
  p.table.req_pool_indices = h.req_pool_indices.data();
  p.table.seq_lens = h.seq_lens.data();
  p.table.window_slots = shape.window_slots ? h.window_slots.data() : nullptr;
  return h;
}

void AttnCase::set_seq_lens(const Vec<int64_t>& lengths) {
  shape.seq_lens = lengths;
  seq_lens.put(lengths);
}

void AttnCase::launch_plan(cudaStream_t stream) const {
  if (num_ctas == 0) return;  // float32 has no plan
  CUDA_OK(smxx::run_plan(seq_lens.data(), 0, shape.bs(), shape.num_kv_heads, num_ctas, plan.data(),
                         stream));
}

void AttnCase::launch(int set, cudaStream_t stream) const {
  const AttnParams p = params(set);
  CUDA_OK(shape.num_rows == 1 ? smxx::run_decode_attn(p, stream)
                              : smxx::run_verify_attn(p, stream));
}

void AttnCase::clear_out(int set) {
  sets[set].out.set_bytes(0xff);
  lse.set_bytes(0xff);
  CUDA_OK(cudaDeviceSynchronize());
}

float element_to_float(const char* data, int64_t index, DType dtype) {
  return cpu::with_element(dtype, [&](auto element) {
    std::memcpy(&element, data + index * int64_t{sizeof element}, sizeof element);
    return static_cast<float>(element);
  });
}

void float_to_element(float value, char* data, int64_t index, DType dtype) {
  cpu::with_element(dtype, [&](auto element) {
    element = decltype(element)::round(value);
    std::memcpy(data + index * int64_t{sizeof element}, &element, sizeof element);
  });
}

}  // namespace specfused::checks
