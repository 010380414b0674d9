// SPDX-License-Identifier: Apache-2.0
// The likeliest tokens of each row of the draft model's logits, and their softmax probabilities.
//
// One CTA: one slice of one row, its logits in registers as 64-bit keys (the value, then the lower
// index). Each warp takes its topk largest keys out, one after the other; warp 0 those of all
// warps. The last CTA of a row does the same with the keys of all slices. Sums are those of the
// slices, in slice order: from the vocabulary alone, so a row has the same bits in every batch.
// grid = rows x slices. Shared memory: topk keys, a maximum and a sum of each warp.
#include "../../launch.h"
#include "../../ptx/sync.cuh"
#include "../commit/row_stats.cuh"

namespace specfused::smxx {
namespace {

constexpr int kWarps = kStatsThreads / 32;
constexpr int kBlockKeys = static_cast<int>(kRowBlock) / kStatsThreads;  // of a thread
constexpr float kLog2E = 1.4426950408889634f;

struct WarpBest {
  uint64_t keys[kWarps][kMaxTopk];
  float2 stats[kWarps];  // largest value, sum of exp(x - largest)
  bool last;
};

// NaN is the least likely of all. Behind the vocabulary there is nothing: key 0.
__device__ __forceinline__ uint64_t key_of(float value, uint32_t index, int64_t vocab) {
  return index < vocab ? argmax_key(value == value ? value : -INFINITY, index) : 0;
}

template <int kKeys>
__device__ __forceinline__ uint64_t largest_of(const uint64_t (&keys)[kKeys]) {
  uint64_t best = keys[0];
#pragma unroll
  for (int i = 1; i < kKeys; ++i) best = max_of(best, keys[i]);
  return best;
}

// The topk largest keys of a warp, in order: lane i gets number i.
template <int kKeys>
__device__ __forceinline__ uint64_t warp_best(uint64_t (&keys)[kKeys], int topk) {
  const int lane = threadIdx.x % 32;
  uint64_t mine = largest_of(keys);
  uint64_t result = 0;
#pragma unroll 1
  for (int i = 0; i < topk; ++i) {
    const uint64_t best = warp_max(mine);
    if (lane == i) result = best;
    if (mine != best || best == 0) continue;
#pragma unroll
    for (int k = 0; k < kKeys; ++k) keys[k] = keys[k] == best ? 0 : keys[k];
    mine = largest_of(keys);
  }
  return result;
}

// The same of a CTA, for warp 0. Ends without a barrier behind the reads of `best`.
template <int kKeys>
__device__ __forceinline__ uint64_t block_best(uint64_t (&keys)[kKeys], int topk, WarpBest& best) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const uint64_t of_warp = warp_best(keys, topk);
  if (lane < topk) best.keys[warp][lane] = of_warp;
  __syncthreads();
  if (warp > 0) return 0;
  uint64_t candidates[kWarps * kMaxTopk / 32];
#pragma unroll
  for (int i = 0; i < kWarps * kMaxTopk / 32; ++i) {
    const int at = lane + 32 * i;
    candidates[i] = at % kMaxTopk < topk ? best.keys[at / kMaxTopk][at % kMaxTopk] : 0;
  }
  return warp_best(candidates, topk);
}

__device__ __forceinline__ float exp_of(float difference) {
  return ptx::exp2_approx(difference * kLog2E);
}

// Sum of what others summed up over their own largest values.
__device__ __forceinline__ float rescaled(const float2& stats, float largest) {
  return stats.y > 0 ? stats.y * exp_of(stats.x - largest) : 0;
}

struct Slices {
  uint64_t* counters;  // [rows]
  uint64_t* keys;      // [rows, slices, topk]
  float2* stats;       // [rows, slices]

  __device__ __forceinline__ Slices(const DraftTopkParams& p, int slices) {
    auto* base = static_cast<char*>(p.workspace);
    counters = reinterpret_cast<uint64_t*>(base);
    keys = reinterpret_cast<uint64_t*>(base + kDraftCounterBytes);
    stats = reinterpret_cast<float2*>(keys + p.num_rows * slices * p.topk);
  }
};

// Keys of all blocks of a slice: those of the block at hand and the best of those before, which
// lanes 0..topk-1 hold.
template <class T, bool kSums>
__device__ __forceinline__ void take_slice(const DraftTopkParams& p, const T* logits, int slice,
                                           const Slices& to, int64_t cell, WarpBest& best) {
  const int64_t length = slice_length(p.vocab);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  uint64_t of_warp = 0;
  float largest = -INFINITY;
  float sum = 0;
#pragma unroll 1
  for (int64_t block = 0; block < length; block += kRowBlock) {
    using S = Share<T>;
    const int64_t at = slice * length + block + warp * (kRowBlock / kWarps) + lane * S::kVector;
    S share;
    if (logits != nullptr) {
      share.load(logits, at, p.vocab);
    } else {
      share.load(nullptr, 0, 0);
    }
    float values[S::kElements];
#pragma unroll
    for (int u = 0; u < S::kVectors; ++u) {
      unpack(share.bits[u], values + u * S::kVector, static_cast<const T*>(nullptr));
    }
    if constexpr (kSums) {
      float above = argmax_value(warp_max(of_warp));  // of no key a NaN, which fmaxf leaves out
#pragma unroll
      for (float x : values) above = fmaxf(above, x);
      for (int step = 16; step > 0; step /= 2)
        above = fmaxf(above, __shfl_xor_sync(~0u, above, step));
      // Not of nothing, and not of infinite ones, whose sums nobody reads.
      if (above > -INFINITY && above < INFINITY) {
        sum *= exp_of(largest - above);
#pragma unroll
        for (float x : values) sum += x == x ? exp_of(x - above) : 0;
        largest = above;
      }
    }
    uint64_t keys[kBlockKeys + 1];
#pragma unroll
    for (int i = 0; i < kBlockKeys; ++i) {
      const auto index = static_cast<uint32_t>(at + S::offset(i / S::kVector) + i % S::kVector);
      keys[i] = key_of(values[i], index, p.vocab);
    }
    keys[kBlockKeys] = of_warp;
    of_warp = warp_best(keys, p.topk);
  }
  if constexpr (kSums) {
    sum = warp_sum(sum);
    if (lane == 0) best.stats[warp] = make_float2(largest, sum);
  }
  uint64_t keys[1] = {of_warp};
  const uint64_t key = block_best(keys, p.topk, best);
  if (warp > 0) return;
  if (lane < p.topk) to.keys[cell * p.topk + lane] = key;
  if constexpr (kSums) {
    float2 stats = lane < kWarps ? best.stats[lane] : make_float2(-INFINITY, 0);
    float all = stats.x;
    for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, step));
    const float total = warp_sum(rescaled(stats, all));
    if (lane == 0) to.stats[cell] = make_float2(all, total);
  }
}

// All threads of the row's last CTA: from the slices to the result.
template <bool kSums>
__device__ __forceinline__ void finish_row(const DraftTopkParams& p, int64_t row, int slices,
                                           const Slices& from, WarpBest& best) {
  constexpr int kKeys = kMaxSlices * kMaxTopk / kStatsThreads;
  const int lane = threadIdx.x % 32;
  uint64_t keys[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int at = threadIdx.x + i * kStatsThreads;
    const bool there = at < slices * p.topk;
    keys[i] = there ? __ldcg(from.keys + row * slices * p.topk + at) : 0;
  }
  const uint64_t key = block_best(keys, p.topk, best);
  if (threadIdx.x >= 32) return;
  const float largest = argmax_value(__shfl_sync(~0u, key, 0));
  float sum = 0;
  if constexpr (kSums) {
    float part = 0;
#pragma unroll
    for (int i = 0; i < kMaxSlices / 32; ++i) {
      const int slice = lane + 32 * i;
      if (slice < slices) part += rescaled(__ldcg(from.stats + row * slices + slice), largest);
    }
    sum = warp_sum(part);
  }
  if (lane >= p.topk) return;
  const int64_t token = argmax_index(key);
  p.topk_index[row * p.topk + lane] = p.token_map == nullptr ? token : p.token_map[token];
  if constexpr (kSums) {
    const float certain = largest > 0 && lane == 0 ? 1.0f : 0.0f;
    p.topk_p[row * p.topk + lane] =
        isinf(largest) ? certain : exp_of(argmax_value(key) - largest) / sum;
  }
}

template <class T, bool kSums>
__global__ __launch_bounds__(kStatsThreads) void draft_topk_kernel(
    const __grid_constant__ DraftTopkParams p) {
  __shared__ WarpBest best;
  const int slices = num_slices(p.vocab);
  const int64_t row = blockIdx.x / slices;
  const int slice = static_cast<int>(blockIdx.x % slices);
  const Slices all(p, slices);
  const int64_t source = p.rows == nullptr ? row : p.rows[row];
  const bool there = source >= 0 && source < p.num_logits_rows;
  const T* logits =
      there ? static_cast<const T*>(p.logits) + source * p.stride_logits_row : nullptr;
  take_slice<T, kSums>(p, logits, slice, all, row * slices + slice, best);
  __syncthreads();
  if (threadIdx.x == 0) {
    best.last = ptx::add_acq_rel(all.counters + row, 1) + 1 == static_cast<uint64_t>(slices);
    if (best.last) ptx::store_relaxed(all.counters + row, 0);
  }
  __syncthreads();
  if (best.last) finish_row<kSums>(p, row, slices, all, best);
}

template <class T>
void launch(const DraftTopkParams& p, unsigned ctas, cudaStream_t stream) {
  if (p.topk_p != nullptr) {
    draft_topk_kernel<T, true><<<ctas, kStatsThreads, 0, stream>>>(p);
  } else {
    draft_topk_kernel<T, false><<<ctas, kStatsThreads, 0, stream>>>(p);
  }
}

}  // namespace

int run_draft_topk(const DraftTopkParams& p, void* stream) {
  if (p.num_rows <= 0) return cudaSuccess;
  const int64_t ctas = p.num_rows * num_slices(p.vocab);
  if (p.topk < 1 || p.topk > kMaxTopk || p.topk > p.vocab || p.num_rows > kMaxDraftRows) {
    return cudaErrorInvalidValue;
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (p.logits_dtype) {
    case DType::kFloat32:
      launch<float>(p, static_cast<unsigned>(ctas), cuda_stream);
      break;
    case DType::kBFloat16:
      launch<__nv_bfloat16>(p, static_cast<unsigned>(ctas), cuda_stream);
      break;
    case DType::kFloat16:
      launch<__half>(p, static_cast<unsigned>(ctas), cuda_stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace specfused::smxx
