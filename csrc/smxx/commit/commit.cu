// SPDX-License-Identifier: Apache-2.0
// Greedy commit, and compact. With logits, a first launch finds the largest of each slice of each
// row. sample.cu has the sampled commit.
#include <cuda_runtime.h>

#include "../../launch.h"
#include "decision.cuh"
#include "row_stats.cuh"
#include "sample.h"

namespace specfused::smxx {
namespace {

struct Targets {
  int64_t token[kMaxWindow];
  bool valid[kMaxWindow];
};

__device__ __forceinline__ void load_targets(const CommitParams& p, int64_t first, int slices,
                                             Targets& targets) {
  if (p.targets != nullptr) {
    for (int i = threadIdx.x; i < p.width; i += kCommitThreads) {
      targets.token[i] = p.targets[first + i];
      targets.valid[i] = true;
    }
    return;
  }
  const auto* keys = static_cast<const uint64_t*>(p.workspace);
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < p.width; i += kCommitThreads / 32) {
    uint64_t key = 0;
    for (int s = lane; s < slices; s += 32) key = max_of(key, keys[(first + i) * slices + s]);
    key = warp_max(key);
    if (lane == 0) {
      targets.token[i] = argmax_index(key);
      targets.valid[i] = isfinite(argmax_value(key));
    }
  }
}

struct TargetOf {
  const int64_t* token;
  SPECFUSED_HD int64_t operator()(int node) const { return token[node]; }
};

// grid = (1 + movers, requests).
__global__ __launch_bounds__(kCommitThreads, kCommitCtasPerSm) void commit_kernel(
    const __grid_constant__ CommitParams p, int slices) {
  __shared__ Walk walk;
  __shared__ Targets targets;
  const int request = blockIdx.y;
  const int64_t first = static_cast<int64_t>(request) * p.width;
  Mover mover(p, first, static_cast<int>(blockIdx.x) - 1, gridDim.x - 1);
  load_walk(p, first, walk);
  load_targets(p, first, slices, targets);
  __syncthreads();
  if (threadIdx.x == 0) {
    GreedyAccept<TargetOf> accept{walk.draft_tokens, {targets.token}};
    take_walk(p, walk, accept);
  }
  __syncthreads();
  if (blockIdx.x > 0) {
    mover.run(walk);
    return;
  }
  Bonus bonus{targets.token[walk.path[walk.num_correct_drafts]], false};
  for (int j = 0; j <= walk.num_correct_drafts; ++j) {
    bonus.invalid = bonus.invalid || !targets.valid[walk.path[j]];
  }
  write_decision(p, request, walk, bonus);
}

__global__ __launch_bounds__(kCommitThreads, kCommitCtasPerSm) void compact_kernel(
    const __grid_constant__ CompactParams p) {
  __shared__ MoveList moves;
  const int request = blockIdx.y;
  const int64_t first = static_cast<int64_t>(request) * p.width;
  if (threadIdx.x < 32) {
    const int32_t* index = p.accept_index + static_cast<int64_t>(request) * p.max_path;
    const int64_t* slots = p.out_cache_loc + first;
    const auto slot = [&](int column) {
      return slots[column] < p.kv.num_slots ? slots[column] : -1;
    };
    list_moves(
        p.width, min_of(p.accept_lens[request], p.max_path),
        [&](int j) { return index[j] - first; }, slot, moves);
  }
  __syncthreads();
  for (int b = blockIdx.x; b < p.kv.num_buffers; b += gridDim.x) kv_unit(p.kv, b).move(moves);
}

}  // namespace

int run_commit(const CommitParams& p, void* stream) {
  if (p.bs <= 0) return cudaSuccess;
  if (p.width < 1 || p.width > kMaxWindow || p.max_path < 1) return cudaErrorInvalidValue;
  if (p.coins != nullptr) return run_sampled_commit(p, stream);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  int slices = 1;
  if (p.targets == nullptr) {
    slices = argmax_splits(static_cast<int64_t>(p.bs) * p.width, p.vocab);
    const cudaError_t error = launch_row_stats</*kSums=*/false>(
        p, slices, static_cast<uint64_t*>(p.workspace), nullptr, cuda_stream);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(1 + num_movers(p), p.bs);
  commit_kernel<<<grid, kCommitThreads, 0, cuda_stream>>>(p, slices);
  return cudaGetLastError();
}

int run_compact(const CompactParams& p, void* stream) {
  if (p.bs <= 0 || p.kv.num_buffers == 0) return cudaSuccess;
  if (p.width < 1 || p.width > kMaxWindow) return cudaErrorInvalidValue;
  const dim3 grid(min_of(p.kv.num_buffers, max_of(2048 / p.bs, 1)), p.bs);
  compact_kernel<<<grid, kCommitThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace specfused::smxx
