// SPDX-License-Identifier: Apache-2.0
// Sampled commit: up to three launches, each of which fills the GPU.
//
//   logits                  row stats -> walk, draw, move
//   target_probs            residual  -> walk, draw, move
//   logits and draft_probs  row stats -> residual -> walk, draw, move
//
// Row stats read every row once. Whoever needs the walk takes it again: it reads only the
// probabilities of the drafted tokens. The draw picks a part of the last row by the parts' masses
// and reads that part alone. All sums have a fixed order that the vocabulary decides.
#include <cuda_runtime.h>

#include "launch_early.cuh"
#include "residual.cuh"
#include "sample.h"

namespace specfused::smxx {
namespace {

constexpr int kMaxParts = kMaxSlices * kSliceParts;
constexpr int kSampledCtasPerSm = 7;  // 72 registers
constexpr int kCommitWarps = kCommitThreads / 32;

// grid = requests x slices: the masses of a slice's parts in the last row's residual.
template <class T, bool kProbs>
__global__ __launch_bounds__(kCommitThreads) void residual_kernel(
    const __grid_constant__ CommitParams p, int slices, uint32_t part_length) {
  __shared__ Sampled s;
  ptx::delay(0);
  ptx::allow_next_grid();
  const int request = blockIdx.x / slices;
  const int slice = blockIdx.x % slices;
  walk_sampled<T, kProbs>(p, request, slices, s);
  const int last = s.walk.path[s.walk.num_correct_drafts];
  const TargetRows<T, kProbs> rows{p, s, static_cast<int64_t>(request) * p.width, request};
  const Residual<T, kProbs> weights(rows, last);
  PartMass* out = SampleWorkspace(p, slices).masses + int64_t{request} * slices * kSliceParts;
  for (int i = threadIdx.x / 32; i < kSliceParts; i += kCommitWarps) {
    const uint32_t part = slice * kSliceParts + i;
    const uint32_t begin = min_of<uint32_t>(part * part_length, p.vocab);
    const uint32_t end = min_of<uint32_t>(begin + part_length, p.vocab);
    bool invalid = false;
    const float mass = rows.usable(last) ? mass_of(weights, begin, end, s, invalid) : 0;
    invalid = __any_sync(~0u, invalid);
    ptx::delay(part);
    if (threadIdx.x % 32 == 0) out[part] = {mass, invalid};
  }
}

struct Draw {
  float mass[kMaxParts];      // of each part of the last row
  float changed[kMaxWindow];  // of the part of a rejected token without those; -1: see another
  float warp_ends[kCommitWarps];
  int32_t thread;
  int32_t picked;
  float before;  // mass of what is before the picked one
  float limit;   // the token is the first at which the running mass is above
};

// Masses of parts, as weights.
struct PartMasses {
  using Loaded = float;
  const float* mass;
  __device__ __forceinline__ float load(uint32_t part) const { return mass[part]; }
  __device__ __forceinline__ float weight(float x, bool&) const { return x; }
  template <int kStep>
  __device__ __forceinline__ uint32_t removed_of(uint32_t) const {
    return 0;
  }
};

// All threads: to d.picked the first of [begin, end) at which the running weight, d.before in front
// of them, exceeds the limit; where rounding leaves none, the last that has weight; where none has,
// d.picked stays. Each thread has a run of consecutive ones. Where of_total, the limit is relative.
template <class Weights>
__device__ __forceinline__ void pick(const Weights& weights, uint32_t begin, uint32_t end,
                                     float limit, bool of_total, Draw& d) {
  const uint32_t run = ceil_div<uint32_t>(end - begin, kCommitThreads);
  const uint32_t mine = min_of(begin + threadIdx.x * run, end);
  const uint32_t mine_end = min_of(mine + run, end);
  bool invalid = false;
  float mass = 0;
  for_weights<4, 1>(weights, mine, mine_end, invalid, [&](uint32_t, float w) { mass += w; });
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
  float total = 0;
  for (int w = 0; w < kCommitWarps; ++w) {
    if (w < warp) before += d.warp_ends[w];
    total += d.warp_ends[w];
  }
  if (of_total) limit *= total;
  const bool hit = mass > 0 && before + until > limit;
  const int code = hit        ? 2 * kCommitThreads - static_cast<int>(threadIdx.x)
                   : mass > 0 ? static_cast<int>(threadIdx.x)
                              : -1;
  ptx::delay(0);
  atomicMax(&d.thread, code);
  __syncthreads();
  if (d.thread >= 0 && d.thread == code) {
    float running = before + (until - mass);
    bool found = false;
    for_weights<4, 1>(weights, mine, mine_end, invalid, [&](uint32_t i, float w) {
      if (found || !(w > 0)) return;
      d.picked = i;
      d.before = running;
      running += w;
      found = running > limit;
    });
    d.limit = found ? limit : INFINITY;  // rounding ends in the last token of the last part
  }
  __syncthreads();
}

// All threads of CTA 0.
template <class T, bool kProbs>
__device__ __forceinline__ Bonus draw_bonus(const CommitParams& p, int request, int slices,
                                            uint32_t part_length, bool has_masses, Sampled& s,
                                            Draw& d) {
  const int64_t first = static_cast<int64_t>(request) * p.width;
  const TargetRows<T, kProbs> rows{p, s, first, request};
  const int last = s.walk.path[s.walk.num_correct_drafts];
  if (!rows.usable(last)) return {s.argmax[last], true};
  const Residual<T, kProbs> weights(rows, last);
  const SampleWorkspace from(p, slices);
  const int parts = slices * kSliceParts;
  bool invalid = false;
  constexpr int kPerThread = kMaxParts / kCommitThreads;
  float mass[kPerThread];
  float largest[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * kCommitThreads;
    if (i >= parts) continue;
    if (has_masses) {
      const PartMass part = from.masses[int64_t{request} * parts + i];
      mass[k] = part.mass;
      invalid = invalid || part.invalid != 0;
    } else {
      const int64_t row = first + last;
      mass[k] = from.stats.parts[row * parts + i];
      largest[k] = argmax_value(from.stats.keys[row * slices + i / kSliceParts]);
    }
  }
  // Parts that lost tokens, added up again without them: a difference would leave the rounding. A
  // warp each; of several tokens of one part the first has it.
  const int rejected = has_masses ? 0 : s.num_rejected;
  const auto rejected_part = [&](int r) {
    const int64_t token = s.walk.draft_tokens[s.rejected[r]];
    const bool known = token >= 0 && token < p.vocab;
    return known ? static_cast<int>(static_cast<uint32_t>(token) / part_length) : -1;
  };
  for (int r = threadIdx.x / 32; r < rejected; r += kCommitWarps) {
    const int part = rejected_part(r);
    bool repeated = part < 0;
    for (int i = threadIdx.x % 32; i < r; i += 32) repeated = repeated || rejected_part(i) == part;
    if (__any_sync(~0u, repeated)) {
      if (threadIdx.x % 32 == 0) d.changed[r] = -1;
      continue;
    }
    const uint32_t begin = part * part_length;
    const uint32_t end = min_of<uint32_t>(begin + part_length, p.vocab);
    const float left = mass_of(weights, begin, end, s, invalid);
    if (threadIdx.x % 32 == 0) d.changed[r] = left;
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * kCommitThreads;
    if (i >= parts) continue;
    if (!has_masses) {
      const float rescale = exp2f((largest[k] - s.largest[last]) * s.scale) * s.inv_sum[last];
      mass[k] = mass[k] > 0 ? mass[k] * rescale : 0;
    }
    d.mass[i] = mass[k];
  }
  if (threadIdx.x == 0) {
    d.before = 0;
    d.picked = -1;
  }
  ptx::delay(0);
  invalid = __syncthreads_or(invalid);
  if (threadIdx.x < rejected && d.changed[threadIdx.x] >= 0) {
    d.mass[rejected_part(threadIdx.x)] = d.changed[threadIdx.x];
  }
  __syncthreads();
  pick(PartMasses{d.mass}, 0, parts, p.coins_final[request], /*of_total=*/true, d);
  const int part = d.picked;
  // No mass: the likeliest of those that took it all, so the token has a probability above 0.
  int64_t token = s.likeliest >= 0 ? s.walk.draft_tokens[s.likeliest] : kProbs ? 0 : s.argmax[last];
  if (part >= 0) {
    __syncthreads();
    if (threadIdx.x == 0) d.picked = -1;
    const uint32_t begin = part * part_length;
    const uint32_t end = min_of<uint32_t>(begin + part_length, p.vocab);
    weights.enter(begin, end, s);
    pick(weights, begin, end, d.limit, /*of_total=*/false, d);
    if (d.picked >= 0) token = d.picked;
  }
  return {token, s.invalid || invalid};
}

// grid = requests x (1 + movers).
template <class T, bool kProbs>
__global__ __launch_bounds__(kCommitThreads, kSampledCtasPerSm) void sampled_commit_kernel(
    const __grid_constant__ CommitParams p, int slices, uint32_t part_length, bool has_masses) {
  __shared__ Sampled s;
  __shared__ Draw d;
  const CtaOfRequest cta(p.bs);
  Mover mover(p, static_cast<int64_t>(cta.request) * p.width, cta.part - 1, cta.parts - 1);
  walk_sampled<T, kProbs>(p, cta.request, slices, s);
  if (cta.part > 0) {
    mover.run(s.walk);
    return;
  }
  const Bonus bonus = draw_bonus<T, kProbs>(p, cta.request, slices, part_length, has_masses, s, d);
  write_decision(p, cta.request, s.walk, bonus);
}

template <class T, bool kProbs>
cudaError_t launch(const CommitParams& p, int slices, cudaStream_t stream) {
  const auto part_length = static_cast<uint32_t>(slice_length(p.vocab) / kSliceParts);
  const bool has_masses = kProbs || p.draft_probs != nullptr;
  const unsigned grid = grid_of(p.bs, 1 + num_movers(p, kSampledCtasPerSm));
  if (grid == 0) return cudaErrorInvalidValue;
  if (has_masses) {
    const unsigned residual_grid = grid_of(p.bs, slices);
    if (residual_grid == 0) return cudaErrorInvalidValue;
    cudaError_t error;
    if constexpr (kProbs) {  // the first launch: what it reads may come from the grid in front
      residual_kernel<T, kProbs>
          <<<residual_grid, kCommitThreads, 0, stream>>>(p, slices, part_length);
      error = cudaGetLastError();
    } else {
      error = launch_early(residual_kernel<T, kProbs>, residual_grid, kCommitThreads, stream, p,
                           slices, part_length);
    }
    if (error != cudaSuccess) return error;
  }
  return launch_early(sampled_commit_kernel<T, kProbs>, grid, kCommitThreads, stream, p, slices,
                      part_length, has_masses);
}

}  // namespace

int run_sampled_commit(const CommitParams& p, void* stream) {
  if (p.workspace == nullptr || p.vocab < 1) return cudaErrorInvalidValue;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int slices = num_slices(p.vocab);
  if (p.logits == nullptr) return launch<float, true>(p, slices, cuda_stream);
  const cudaError_t error =
      launch_row_stats</*kSums=*/true>(p, SampleWorkspace(p, slices).stats, cuda_stream);
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
