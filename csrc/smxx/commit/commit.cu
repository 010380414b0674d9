// SPDX-License-Identifier: Apache-2.0
// Greedy commit, and compact. With logits, a first launch finds the largest logits of every row.
// sample.cu has the sampled commit.
#include <cuda_runtime.h>

#include "../../launch.h"
#include "decision.cuh"
#include "launch_early.cuh"
#include "row_stats.cuh"
#include "sample.h"

namespace specfused::smxx {
namespace {

struct Targets {
  int64_t token[kMaxWindow];
  bool valid[kMaxWindow];
};

__device__ __forceinline__ void load_targets(const CommitParams& p, int64_t first, int keys_per_row,
                                             Targets& targets) {
  if (p.targets != nullptr) {
    for (int i = threadIdx.x; i < p.width; i += kCommitThreads) {
      targets.token[i] = p.targets[first + i];
      targets.valid[i] = true;
    }
    return;
  }
  ptx::delay(0);
  ptx::wait_for_previous_grid();
  ptx::delay(0);
  // A warp per row, the keys of kBatch rows in flight.
  constexpr int kBatch = 4;
  constexpr int kWarps = kCommitThreads / 32;
  const auto* keys = static_cast<const uint64_t*>(p.workspace);
  const int lane = threadIdx.x % 32;
  for (int begin = threadIdx.x / 32; begin < p.width; begin += kBatch * kWarps) {
    uint64_t seen[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t row = begin + i * kWarps;
#pragma unroll
      for (int u = 0; u < kMaxSlices / 32; ++u) {
        const int k = lane + 32 * u;
        const bool exists = row < p.width && k < keys_per_row;
        if (exists) seen[i] = max_of(seen[i], keys[(first + row) * keys_per_row + k]);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = begin + i * kWarps;
      if (row >= p.width) break;
      const uint64_t key = warp_max(seen[i]);
      if (lane == 0) {
        targets.token[row] = argmax_index(key);
        targets.valid[row] = isfinite(argmax_value(key));
      }
    }
  }
}

struct TargetOf {
  const int64_t* token;
  SPECFUSED_HD int64_t operator()(int node) const { return token[node]; }
};

// grid = requests x (1 + movers).
__global__ __launch_bounds__(kCommitThreads, kCommitCtasPerSm) void commit_kernel(
    const __grid_constant__ CommitParams p, int keys_per_row) {
  __shared__ Walk walk;
  __shared__ Targets targets;
  const CtaOfRequest cta(p.bs);
  const int64_t first = static_cast<int64_t>(cta.request) * p.width;
  Mover mover(p, first, cta.part - 1, cta.parts - 1);
  load_walk(p, first, walk);
  load_targets(p, first, keys_per_row, targets);
  ptx::delay(0);
  __syncthreads();
  if (threadIdx.x == 0) {
    GreedyAccept<TargetOf> accept{walk.draft_tokens, {targets.token}};
    take_walk(p, walk, accept);
  }
  __syncthreads();
  if (cta.part > 0) {
    mover.run(walk);
    return;
  }
  Bonus bonus{targets.token[walk.path[walk.num_correct_drafts]], false};
  for (int j = 0; j <= walk.num_correct_drafts; ++j) {
    bonus.invalid = bonus.invalid || !targets.valid[walk.path[j]];
  }
  write_decision(p, cta.request, walk, bonus);
}

__global__ __launch_bounds__(kCommitThreads, kCommitCtasPerSm) void compact_kernel(
    const __grid_constant__ CompactParams p) {
  __shared__ MoveList moves;
  const CtaOfRequest cta(p.bs);
  const int64_t first = static_cast<int64_t>(cta.request) * p.width;
  if (threadIdx.x < 32) {
    const int32_t* index = p.accept_index + static_cast<int64_t>(cta.request) * p.max_path;
    const int64_t* slots = p.out_cache_loc + first;
    const auto slot = [&](int column) {
      return slots[column] < p.kv.num_slots ? slots[column] : -1;
    };
    list_moves(
        p.width, min_of(p.accept_lens[cta.request], p.max_path),
        [&](int j) { return index[j] - first; }, slot, moves);
  }
  __syncthreads();
  for (int b = cta.part; b < p.kv.num_buffers; b += cta.parts) kv_unit(p.kv, b).move(moves);
}

}  // namespace

int run_commit(const CommitParams& p, void* stream) {
  if (p.bs <= 0) return cudaSuccess;
  if (p.width < 1 || p.width > kMaxWindow || p.max_path < 1) return cudaErrorInvalidValue;
  if (p.coins != nullptr) return run_sampled_commit(p, stream);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const unsigned grid = grid_of(p.bs, 1 + num_movers(p, kCommitCtasPerSm));
  if (grid == 0) return cudaErrorInvalidValue;
  if (p.targets != nullptr) {
    commit_kernel<<<grid, kCommitThreads, 0, cuda_stream>>>(p, 0);
    return cudaGetLastError();
  }
  const cudaError_t error = launch_row_stats</*kSums=*/false>(
      p, {static_cast<uint64_t*>(p.workspace), nullptr, nullptr}, cuda_stream);
  if (error != cudaSuccess) return error;
  return launch_early(commit_kernel, grid, kCommitThreads, cuda_stream, p, stats_ctas_per_row(p));
}

int run_compact(const CompactParams& p, void* stream) {
  if (p.bs <= 0 || p.kv.num_buffers == 0) return cudaSuccess;
  if (p.width < 1 || p.width > kMaxWindow) return cudaErrorInvalidValue;
  const unsigned grid = grid_of(p.bs, min_of(p.kv.num_buffers, max_of(2048 / p.bs, 1)));
  if (grid == 0) return cudaErrorInvalidValue;
  compact_kernel<<<grid, kCommitThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace specfused::smxx
