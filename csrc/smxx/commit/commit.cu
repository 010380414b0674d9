// SPDX-License-Identifier: Apache-2.0
// commit and compact. With logits, a first launch finds the maximum of each slice of each row.
//
// Then grid = (parts, requests). One CTA: load the request's tree and targets to shared memory,
// walk (each CTA of a request does, that costs less than a launch), move the rows of its part of
// the KV buffers. The CTA of part 0 also writes the decision.
#include <cuda_runtime.h>

#include "../../launch.h"
#include "argmax.cuh"
#include "move_rows.cuh"

namespace specfused::smxx {
namespace {

constexpr int kCommitThreads = 128;

// CTAs per request: one buffer each at small batches, a few thousand CTAs in all at large ones.
int move_parts(int num_buffers, int bs) {
  return min_of(max_of(num_buffers, 1), max_of(2048 / bs, 1));
}

struct Walk {
  int64_t next_token[kMaxWindow];
  int64_t next_sibling[kMaxWindow];
  int64_t draft_tokens[kMaxWindow];
  int64_t targets[kMaxWindow];
  int32_t path[kMaxWindow];
  int32_t num_correct_drafts;
};

__device__ __forceinline__ void load_walk(const CommitParams& p, int64_t first, int splits,
                                          Walk& walk) {
  for (int i = threadIdx.x; i < p.width; i += kCommitThreads) {
    walk.draft_tokens[i] = p.draft_tokens[first + i];
    if (p.next_token != nullptr) {
      walk.next_token[i] = p.next_token[first + i];
      walk.next_sibling[i] = p.next_sibling[first + i];
    }
    if (p.targets != nullptr) walk.targets[i] = p.targets[first + i];
  }
  if (p.targets == nullptr) {
    const auto* keys = static_cast<const uint64_t*>(p.workspace);
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < p.width; i += kCommitThreads / 32) {
      uint64_t key = 0;
      for (int s = lane; s < splits; s += 32) key = max_of(key, keys[(first + i) * splits + s]);
      for (int step = 16; step > 0; step /= 2) {
        key = max_of(key, __shfl_xor_sync(~0u, key, step));
      }
      if (lane == 0) walk.targets[i] = argmax_index(key);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void write_decision(const CommitParams& p, int request,
                                               const Walk& walk) {
  const int64_t first = static_cast<int64_t>(request) * p.width;
  const int correct = walk.num_correct_drafts;
  for (int j = threadIdx.x; j < p.max_path; j += kCommitThreads) {
    const int64_t at = static_cast<int64_t>(request) * p.max_path + j;
    const bool on_path = j <= correct;
    p.accept_index[at] = on_path ? static_cast<int32_t>(first + walk.path[j]) : -1;
    p.accept_tokens[at] = on_path ? static_cast<int32_t>(walk.targets[walk.path[j]]) : -1;
  }
  if (threadIdx.x == 0) {
    p.num_correct_drafts[request] = correct;
    p.accept_lens[request] = correct + 1;
    p.bonus_tokens[request] = static_cast<int32_t>(walk.targets[walk.path[correct]]);
    p.new_seq_lens[request] = slide(p.seq_lens[request], correct + 1);
  }
}

__global__ __launch_bounds__(kCommitThreads) void commit_kernel(
    const __grid_constant__ CommitParams p, int splits) {
  __shared__ Walk walk;
  __shared__ MoveList moves;
  const int request = blockIdx.y;
  const int64_t first = static_cast<int64_t>(request) * p.width;
  load_walk(p, first, splits, walk);
  if (threadIdx.x == 0) {
    const bool chain = p.next_token == nullptr;
    walk.num_correct_drafts = walk_greedy(
        chain ? nullptr : walk.next_token, chain ? nullptr : walk.next_sibling, walk.draft_tokens,
        walk.targets, p.width, min_of(p.max_path, kMaxWindow), walk.path);
  }
  __syncthreads();
  if (blockIdx.x == 0) write_decision(p, request, walk);
  if (p.kv.num_buffers == 0) return;
  list_moves(
      p.kv, p.out_cache_loc + first, p.width, walk.num_correct_drafts + 1,
      [&](int j) { return walk.path[j]; }, moves);
  move_rows(p.kv, blockIdx.x, gridDim.x, moves);
}

__global__ __launch_bounds__(kCommitThreads) void compact_kernel(
    const __grid_constant__ CompactParams p) {
  __shared__ MoveList moves;
  const int request = blockIdx.y;
  const int64_t first = static_cast<int64_t>(request) * p.width;
  const int32_t* index = p.accept_index + static_cast<int64_t>(request) * p.max_path;
  list_moves(
      p.kv, p.out_cache_loc + first, p.width, min_of(p.accept_lens[request], p.max_path),
      [&](int j) { return index[j] - first; }, moves);
  move_rows(p.kv, blockIdx.x, gridDim.x, moves);
}

template <class T>
void launch_argmax(const CommitParams& p, int64_t rows, int splits, cudaStream_t stream) {
  const dim3 grid(splits, static_cast<unsigned>(rows));
  argmax_kernel<T><<<grid, kArgmaxThreads, 0, stream>>>(static_cast<const T*>(p.logits),
                                                        p.stride_logits_row, p.vocab,
                                                        static_cast<uint64_t*>(p.workspace));
}

}  // namespace

int run_commit(const CommitParams& p, void* stream) {
  if (p.bs <= 0) return cudaSuccess;
  if (p.width < 1 || p.width > kMaxWindow || p.max_path < 1) return cudaErrorInvalidValue;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int64_t rows = static_cast<int64_t>(p.bs) * p.width;
  const int splits = p.targets != nullptr ? 1 : argmax_splits(rows, p.vocab);
  if (p.targets == nullptr) {
    if (p.workspace == nullptr || p.vocab < 1 || rows > 65535) return cudaErrorInvalidValue;
    if (p.logits_dtype == DType::kFloat32) {
      launch_argmax<float>(p, rows, splits, cuda_stream);
    } else if (p.logits_dtype == DType::kBFloat16) {
      launch_argmax<__nv_bfloat16>(p, rows, splits, cuda_stream);
    } else {
      launch_argmax<__half>(p, rows, splits, cuda_stream);
    }
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(move_parts(p.kv.num_buffers, p.bs), p.bs);
  commit_kernel<<<grid, kCommitThreads, 0, cuda_stream>>>(p, splits);
  return cudaGetLastError();
}

int run_compact(const CompactParams& p, void* stream) {
  if (p.bs <= 0 || p.kv.num_buffers == 0) return cudaSuccess;
  if (p.width < 1 || p.width > kMaxWindow) return cudaErrorInvalidValue;
  const dim3 grid(move_parts(p.kv.num_buffers, p.bs), p.bs);
  compact_kernel<<<grid, kCommitThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace specfused::smxx
