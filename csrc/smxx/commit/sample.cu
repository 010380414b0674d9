// SPDX-License-Identifier: Apache-2.0
// Sampled commit: up to three launches, each of which fills the GPU.
//
//   logits                  row stats -> walk, draw, move
//   target_probs            residual  -> walk, draw, move
//   logits and draft_probs  row stats -> residual -> walk, draw, move
//
// Row stats read every row once. Whoever needs the walk takes it again: it reads only the
// probabilities of the drafted tokens. The draw picks a slice of the last row by the slices' masses
// and reads that slice alone. All sums have a fixed order that the vocabulary decides.
#include <cuda_runtime.h>

#include "residual.cuh"
#include "sample.h"

namespace specfused::smxx {
namespace {

// grid = slices * requests: mass of each slice of the last row's residual.
template <class T, bool kProbs>
__global__ __launch_bounds__(kCommitThreads) void residual_kernel(
    const __grid_constant__ CommitParams p, int slices, int64_t length) {
  __shared__ Sampled s;
  const int request = blockIdx.x / slices;
  const int64_t begin = blockIdx.x % slices * length;
  walk_sampled<T, kProbs>(p, request, slices, s);
  const int last = s.walk.path[s.walk.num_correct_drafts];
  const TargetRows<T, kProbs> rows{p, s, static_cast<int64_t>(request) * p.width, request};
  SliceMass out{0, 0};
  if (rows.usable(last)) {
    bool invalid = false;
    out.mass = slice_mass(Residual<T, kProbs>(rows, last), begin,
                          min_of<int64_t>(begin + length, p.vocab), s, invalid);
    out.invalid = __syncthreads_or(invalid);
  }
  if (threadIdx.x == 0) SampleWorkspace(p, slices).masses[blockIdx.x] = out;
}

struct Draw {
  float mass[kMaxSampleSlices];  // of each slice
  int32_t slice;                 // that holds the coin; -1: there is no mass
  float before;                  // mass of the slices before it
  float limit;                   // the token is the first whose running mass is above
  float warp_ends[kCommitThreads / 32];
  int32_t thread;
  int64_t token;
};

// Thread 0: the slice that the coin falls into. Undershoot ends in the last token that has mass.
__device__ __forceinline__ void pick_slice(float coin, int slices, Draw& d) {
  float total = 0;
  for (int i = 0; i < slices; ++i) total += d.mass[i];
  d.limit = coin * total;
  d.slice = -1;
  float running = 0;
  for (int i = 0; i < slices; ++i) {
    if (!(d.mass[i] > 0)) continue;
    d.slice = i;
    d.before = running;
    running += d.mass[i];
    if (running > d.limit) return;
  }
  d.limit = INFINITY;
}

// All threads: the token of the slice at which the running mass exceeds the limit, to d.token. Each
// thread has a run of consecutive tokens.
template <class Weights>
__device__ __forceinline__ void pick_token(const Weights& weights, int64_t begin, int64_t end,
                                           Sampled& s, Draw& d) {
  weights.enter(begin, end, s);
  const int64_t run = ceil_div<int64_t>(end - begin, kCommitThreads);
  const int64_t mine = min_of<int64_t>(begin + threadIdx.x * run, end);
  const int64_t mine_end = min_of<int64_t>(mine + run, end);
  bool invalid = false;
  float mass = 0;
#pragma unroll 4
  for (int64_t i = mine; i < mine_end; ++i) mass += weights(i, invalid);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  float until = mass;  // inclusive over the warp
  for (int step = 1; step < 32; step *= 2) {
    const float below = __shfl_up_sync(~0u, until, step);
    if (lane >= step) until += below;
  }
  if (lane == 31) d.warp_ends[warp] = until;
  if (threadIdx.x == 0) d.thread = -1;
  __syncthreads();
  float before = d.before;
  for (int w = 0; w < warp; ++w) before += d.warp_ends[w];
  // The first that exceeds the limit; where rounding leaves none, the last that has mass.
  const bool hit = mass > 0 && before + until > d.limit;
  const int code = hit        ? 2 * kCommitThreads - static_cast<int>(threadIdx.x)
                   : mass > 0 ? static_cast<int>(threadIdx.x)
                              : -1;
  atomicMax(&d.thread, code);
  __syncthreads();
  if (d.thread < 0 || d.thread != code) return;
  float running = before + (until - mass);
  for (int64_t i = mine; i < mine_end; ++i) {
    const float w = weights(i, invalid);
    if (!(w > 0)) continue;
    d.token = i;
    running += w;
    if (running > d.limit) break;
  }
}

// All threads of CTA 0.
template <class T, bool kProbs>
__device__ __forceinline__ Bonus draw_bonus(const CommitParams& p, int request, int slices,
                                            int64_t length, bool has_masses, Sampled& s, Draw& d) {
  const int64_t first = static_cast<int64_t>(request) * p.width;
  const TargetRows<T, kProbs> rows{p, s, first, request};
  const int last = s.walk.path[s.walk.num_correct_drafts];
  if (!rows.usable(last)) return {s.argmax[last], true};
  const Residual<T, kProbs> weights(rows, last);
  const SampleWorkspace from(p, slices);
  bool invalid = false;
  const int i = threadIdx.x;
  if (i < slices && has_masses) {
    const SliceMass slice = from.masses[request * slices + i];
    d.mass[i] = slice.mass;
    invalid = slice.invalid != 0;
  } else if (i < slices) {
    const int64_t at = (first + last) * slices + i;
    const float sum = from.sums[at];
    const float largest = argmax_value(from.keys[at]);
    d.mass[i] = sum > 0 ? sum * exp2f((largest - s.largest[last]) * s.scale) * s.inv_sum[last] : 0;
  }
  invalid = __syncthreads_or(invalid);
  // Slices that lost tokens, added up again without them: a difference would leave the rounding.
  uint32_t changed = 0;
  for (int r = 0; r < s.num_rejected && !has_masses; ++r) {
    const int64_t token = s.walk.draft_tokens[s.rejected[r]];
    if (token >= 0 && token < p.vocab) changed |= 1u << (token / length);
  }
  for (; changed != 0; changed &= changed - 1) {
    const int slice = __ffs(changed) - 1;
    const float mass = slice_mass(weights, slice * length,
                                  min_of<int64_t>((slice + 1) * length, p.vocab), s, invalid);
    if (threadIdx.x == 0) d.mass[slice] = mass;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    pick_slice(p.coins_final[request], slices, d);
    // No mass: the likeliest of those that took it all, so the token has a probability above 0.
    d.token = s.likeliest >= 0 ? s.walk.draft_tokens[s.likeliest] : kProbs ? 0 : s.argmax[last];
  }
  __syncthreads();
  if (d.slice >= 0) {
    const int64_t begin = d.slice * length;
    pick_token(weights, begin, min_of<int64_t>(begin + length, p.vocab), s, d);
  }
  __syncthreads();
  return {d.token, s.invalid || invalid};
}

// grid = (1 + movers, requests).
template <class T, bool kProbs>
__global__ __launch_bounds__(kCommitThreads, kCommitCtasPerSm) void sampled_commit_kernel(
    const __grid_constant__ CommitParams p, int slices, int64_t length, bool has_masses) {
  __shared__ Sampled s;
  __shared__ Draw d;
  const int request = blockIdx.y;
  Mover mover(p, static_cast<int64_t>(request) * p.width, static_cast<int>(blockIdx.x) - 1,
              gridDim.x - 1);
  walk_sampled<T, kProbs>(p, request, slices, s);
  if (blockIdx.x > 0) {
    mover.run(s.walk);
    return;
  }
  const Bonus bonus = draw_bonus<T, kProbs>(p, request, slices, length, has_masses, s, d);
  write_decision(p, request, s.walk, bonus);
}

template <class T, bool kProbs>
cudaError_t launch(const CommitParams& p, int slices, cudaStream_t stream) {
  const int64_t length = slice_length(p.vocab, slices);
  const bool has_masses = kProbs || p.draft_probs != nullptr;
  if (has_masses) {
    residual_kernel<T, kProbs>
        <<<static_cast<unsigned>(p.bs * slices), kCommitThreads, 0, stream>>>(p, slices, length);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(1 + num_movers(p), p.bs);
  sampled_commit_kernel<T, kProbs>
      <<<grid, kCommitThreads, 0, stream>>>(p, slices, length, has_masses);
  return cudaGetLastError();
}

}  // namespace

int run_sampled_commit(const CommitParams& p, void* stream) {
  if (p.workspace == nullptr || p.vocab < 1) return cudaErrorInvalidValue;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int slices = sample_slices(p.vocab);
  if (p.logits == nullptr) return launch<float, true>(p, slices, cuda_stream);
  const SampleWorkspace to(p, slices);
  const cudaError_t error =
      launch_row_stats</*kSums=*/true>(p, slices, to.keys, to.sums, cuda_stream);
  if (error != cudaSuccess) return error;
  switch (p.logits_dtype) {
    case DType::kFloat32:
      return launch<float, false>(p, slices, cuda_stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16, false>(p, slices, cuda_stream);
    default:
      return launch<__half, false>(p, slices, cuda_stream);
  }
}

}  // namespace specfused::smxx
