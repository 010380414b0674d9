// SPDX-License-Identifier: Apache-2.0
// Attention in float32. Two launches: one stores the step's new rows, one warp per (row, query
// head) then attends them, 32 positions at a time: lane = position for the softmax, lane = d for O.
#include <cuda_runtime.h>
#include <math_constants.h>

#include "float32.cuh"

namespace specfused::smxx {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxDimsPerLane = 256 / 32;

__global__ __launch_bounds__(kThreads) void store_rows_kernel(
    const __grid_constant__ AttnParams p) {
  const int64_t row = blockIdx.x;
  const int head = blockIdx.y;
  const KvWindow window = p.table.window(static_cast<int>(row / p.num_rows));
  const int64_t slot = p.out_cache_loc[row * p.stride_out_cache_loc];
  if (window.width == 0 || !window.in_pool(slot)) return;
  const float* k =
      static_cast<const float*>(p.k_new) + row * p.stride_k_new_row + head * p.stride_k_new_head;
  const float* v =
      static_cast<const float*>(p.v_new) + row * p.stride_v_new_row + head * p.stride_v_new_head;
  float* k_to = static_cast<float*>(p.k_cache) + slot * p.stride_k_slot + head * p.stride_k_head;
  float* v_to = static_cast<float*>(p.v_cache) + slot * p.stride_v_slot + head * p.stride_v_head;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    k_to[d] = k[d];
    v_to[d] = v[d];
  }
}

template <bool kVerify>
__global__ __launch_bounds__(kThreads) void attend_float32_kernel(
    const __grid_constant__ AttnParams p) {
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int num_rows = kVerify ? p.num_rows : 1;
  if (unit >= static_cast<int64_t>(p.bs) * num_rows * p.num_q_heads) return;
  const int head = static_cast<int>(unit % p.num_q_heads);
  const int64_t row = unit / p.num_q_heads;
  const int request = static_cast<int>(row / num_rows);
  const int step_row = static_cast<int>(row % num_rows);
  const KvWindow window = p.table.window(request);
  if (window.width == 0) return;
  TreeWord word = kSingleNode;
  if (kVerify) {
    word = p.tree_words == nullptr
               ? chain_word(step_row)
               : static_cast<TreeWord>(p.tree_words[request * p.stride_words + step_row]);
  }
  const int kv_head = head / (p.num_q_heads / p.num_kv_heads);
  const float* q = static_cast<const float*>(p.q) + row * p.stride_q_row + head * p.stride_q_head;
  const float* k = static_cast<const float*>(p.k_cache) + kv_head * p.stride_k_head;
  const float* v = static_cast<const float*>(p.v_cache) + kv_head * p.stride_v_head;

  float o[kMaxDimsPerLane] = {};
  float max = -CUDART_INF_F;
  float sum = 0.0f;
  for (int64_t first = 0; first < window.end(); first += 32) {
    const int64_t position = first + lane;
    const bool visible =
        position < window.committed ||
        (position < window.end() && sees(word, static_cast<int>(position - window.committed)));
    const int64_t slot = visible ? window.slot(position) : 0;
    float score = -CUDART_INF_F;
    if (visible) {
      const float* key = k + slot * p.stride_k_slot;
      float dot = 0.0f;
      for (int d = 0; d < p.head_dim; ++d) dot = fmaf(q[d], key[d], dot);
      score = dot * p.sm_scale;
    }
    float tile_max = score;
    for (int step = 16; step > 0; step /= 2) {
      tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, step));
    }
    const float new_max = fmaxf(max, tile_max);
    const float shift = new_max == -CUDART_INF_F ? 0.0f : new_max;
    const float rescale = expf(max - shift);
    const float weight = visible ? expf(score - shift) : 0.0f;
    max = new_max;
    sum = sum * rescale + weight;
#pragma unroll
    for (int i = 0; i < kMaxDimsPerLane; ++i) o[i] *= rescale;
    uint32_t lanes = __ballot_sync(~0u, visible);
    for (; lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(lanes) - 1;
      const float w = __shfl_sync(~0u, weight, source);
      const float* value = v + __shfl_sync(~0u, slot, source) * p.stride_v_slot;
#pragma unroll
      for (int i = 0; i < kMaxDimsPerLane; ++i) {
        if (i * 32 < p.head_dim) o[i] = fmaf(w, value[i * 32 + lane], o[i]);
      }
    }
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  float* out = static_cast<float*>(p.out) + row * p.stride_out_row + head * p.stride_out_head;
#pragma unroll
  for (int i = 0; i < kMaxDimsPerLane; ++i) {
    if (i * 32 < p.head_dim) out[i * 32 + lane] = sum == 0.0f ? 0.0f : o[i] / sum;
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[row * p.num_q_heads + head] = sum == 0.0f ? -CUDART_INF_F : max + logf(sum);
  }
}

template <bool kVerify>
int run(const AttnParams& p, void* stream) {
  if (p.head_dim % 32 != 0 || p.head_dim > 32 * kMaxDimsPerLane) return cudaErrorInvalidValue;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int64_t rows = static_cast<int64_t>(p.bs) * p.num_rows;
  if (p.k_new != nullptr) {
    const dim3 grid(static_cast<unsigned>(rows), p.num_kv_heads);
    store_rows_kernel<<<grid, kThreads, 0, cuda_stream>>>(p);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  const int64_t ctas = ceil_div<int64_t>(rows * p.num_q_heads, kWarps);
  attend_float32_kernel<kVerify><<<static_cast<unsigned>(ctas), kThreads, 0, cuda_stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int run_verify_float32(const AttnParams& p, void* stream) { return run<true>(p, stream); }
int run_decode_float32(const AttnParams& p, void* stream) { return run<false>(p, stream); }

}  // namespace specfused::smxx
