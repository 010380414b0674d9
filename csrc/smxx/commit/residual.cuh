// SPDX-License-Identifier: Apache-2.0
// Rows as distributions, the sampled walk over them, and what the last row keeps for the bonus.
#pragma once

#include "decision.cuh"
#include "row_stats.cuh"

namespace specfused::smxx {

// Shared memory of one request's sampled step.
struct Sampled {
  Walk walk;
  float coins[kMaxWindow];
  float scale;                // of logits
  float largest[kMaxWindow];  // logit of each row; not finite: the row cannot be used
  float inv_sum[kMaxWindow];  // 1 / sum exp((x - largest) / temperature)
  uint32_t argmax[kMaxWindow];
  int32_t parent[kMaxWindow];
  float target[kMaxWindow];  // probability of a node's token in its parent's row; < 0: unusable
  float draft[kMaxWindow];
  int32_t rejected[kMaxWindow];
  int32_t num_rejected;
  int32_t likeliest;  // of the rejected, or -1
  bool invalid;
  // Of the slice at hand.
  int32_t num_removed;
  uint32_t removed[kMaxWindow];
  float warp_sums[kCommitThreads / 32];
};

// What the residual launch leaves per request and slice.
struct SliceMass {
  float mass;
  int32_t invalid;
};

struct SampleWorkspace {
  uint64_t* keys;     // [rows, slices]
  float* sums;        // [rows, slices]
  SliceMass* masses;  // [bs, slices]

  SPECFUSED_HD SampleWorkspace(const CommitParams& p, int slices) {
    const int64_t cells = static_cast<int64_t>(p.bs) * p.width * slices;
    keys = static_cast<uint64_t*>(p.workspace);
    sums = reinterpret_cast<float*>(keys + cells);
    masses = reinterpret_cast<SliceMass*>(keys + 2 * cells);
  }
};

// T: element of the logits; float with kProbs, where the rows are probabilities themselves.
template <class T, bool kProbs>
struct TargetRows {
  const CommitParams& p;
  const Sampled& s;
  int64_t first;
  int request;

  __device__ __forceinline__ bool usable(int node) const {
    return kProbs || isfinite(s.largest[node]);
  }

  // Below 0: cannot be used.
  __device__ __forceinline__ float prob(int node, int64_t token) const {
    if constexpr (kProbs) {
      const float x = p.target_probs[(first + node) * p.stride_target_probs_row + token];
      return is_weight(x) ? x : -1;
    } else {
      const T* logits = static_cast<const T*>(p.logits) + (first + node) * p.stride_logits_row;
      return exp2f((as_float(logits[token]) - s.largest[node]) * s.scale) * s.inv_sum[node];
    }
  }

  __device__ __forceinline__ const float* draft_row(int node) const {
    return p.draft_probs + request * p.stride_draft_probs_request + node * p.stride_draft_probs_row;
  }

  __device__ __forceinline__ float read_target(int node, int child) const {
    const int64_t token = s.walk.draft_tokens[child];
    if (!usable(node)) return -1;
    return token >= 0 && token < p.vocab ? prob(node, token) : 0;
  }

  __device__ __forceinline__ float read_draft(int node, int child) const {
    const int64_t token = s.walk.draft_tokens[child];
    return token >= 0 && token < p.vocab ? draft_row(node)[token] : 0;
  }

  // A child of two nodes, which only broken links have, is read again.
  SPECFUSED_HD float target(int node, int child) const {
#ifdef __CUDA_ARCH__
    return s.parent[child] == node ? s.target[child] : read_target(node, child);
#else
    return -1;
#endif
  }

  SPECFUSED_HD float draft(int node, int child) const {
#ifdef __CUDA_ARCH__
    return s.parent[child] == node ? s.draft[child] : read_draft(node, child);
#else
    return 0;
#endif
  }
};

// Largest logit and sum of every row, from their slices. A warp per row.
__device__ __forceinline__ void load_rows(const CommitParams& p, int64_t first, int slices,
                                          Sampled& s) {
  const SampleWorkspace from(p, slices);
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < p.width; i += kCommitThreads / 32) {
    const int64_t at = (first + i) * slices + lane;
    const uint64_t mine = lane < slices ? from.keys[at] : 0;
    const float mass = lane < slices ? from.sums[at] : 0;
    const uint64_t key = warp_max(mine);
    const float largest = argmax_value(key);
    const float sum =
        warp_sum(mass > 0 ? mass * exp2f((argmax_value(mine) - largest) * s.scale) : 0);
    if (lane == 0) {
      s.largest[i] = largest;
      s.inv_sum[i] = 1 / sum;
      s.argmax[i] = argmax_index(key);
    }
  }
}

// All threads; ends behind a barrier with the walk and what it rejected at its last node.
template <class T, bool kProbs>
__device__ __forceinline__ void walk_sampled(const CommitParams& p, int request, int slices,
                                             Sampled& s) {
  const int64_t first = static_cast<int64_t>(request) * p.width;
  const TargetRows<T, kProbs> rows{p, s, first, request};
  load_walk(p, first, s.walk);
  for (int i = threadIdx.x; i < p.width; i += kCommitThreads) {
    s.coins[i] = p.coins[first + i];
    s.parent[i] = INT32_MAX;
  }
  if (threadIdx.x == 0 && !kProbs) s.scale = exponent_scale(p.temperatures[request]);
  __syncthreads();
  if constexpr (!kProbs) load_rows(p, first, slices, s);
  // The probabilities of all drafted tokens at once: the walk would wait for each in turn.
  for (int node = threadIdx.x; node < p.width; node += kCommitThreads) {
    int64_t child = s.walk.is_chain ? node + 1 : s.walk.next_token[node];
    for (int64_t floor = node; child > floor && child < p.width;) {
      atomicMin(&s.parent[child], node);
      floor = child;
      child = s.walk.is_chain ? -1 : s.walk.next_sibling[child];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.width; i += kCommitThreads) {
    if (s.parent[i] == INT32_MAX) continue;
    s.target[i] = rows.read_target(s.parent[i], i);
    if (p.draft_probs != nullptr) s.draft[i] = rows.read_draft(s.parent[i], i);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    SampledAccept<float, TargetRows<T, kProbs>> accept{rows,
                                                       s.walk.draft_tokens,
                                                       s.coins,
                                                       p.threshold_single,
                                                       max_of(p.threshold_acc, 1e-9f),
                                                       p.draft_probs != nullptr,
                                                       s.rejected};
    take_walk(p, s.walk, accept);
    s.num_rejected = accept.num_rejected;
    s.likeliest = accept.likeliest;
    s.invalid = accept.invalid;
  }
  __syncthreads();
}

// The last row's distribution without what was rejected.
template <class T, bool kProbs>
class Residual {
 public:
  __device__ __forceinline__ Residual(const TargetRows<T, kProbs>& rows, int node)
      : rows_(rows), node_(node) {
    if (rows.p.draft_probs != nullptr && rows.s.num_rejected > 0) draft_ = rows.draft_row(node);
  }

  // All threads, with a barrier on both sides: lists the rejected tokens of a slice.
  __device__ __forceinline__ void enter(int64_t begin, int64_t end, Sampled& s) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      int removed = 0;
      for (int i = 0; i < s.num_rejected && rows_.p.draft_probs == nullptr; ++i) {
        const int64_t token = s.walk.draft_tokens[s.rejected[i]];
        if (token >= begin && token < end) s.removed[removed++] = static_cast<uint32_t>(token);
      }
      s.num_removed = removed;
    }
    __syncthreads();
  }

  // Of a token in the slice that was entered. `invalid` is set where it cannot be used.
  __device__ __forceinline__ float operator()(int64_t token, bool& invalid) const {
    const float p = rows_.prob(node_, token);
    if constexpr (kProbs) invalid = invalid || p < 0;
    if (draft_ != nullptr) return residual(p, draft_[token]);
    for (int i = 0; i < rows_.s.num_removed; ++i) {
      if (rows_.s.removed[i] == token) return 0;
    }
    return p > 0 ? p : 0;
  }

 private:
  const TargetRows<T, kProbs>& rows_;
  int node_;
  const float* draft_ = nullptr;
};

// All threads: the mass of tokens [begin, end), added up in a fixed order.
template <class Weights>
__device__ __forceinline__ float slice_mass(const Weights& weights, int64_t begin, int64_t end,
                                            Sampled& s, bool& invalid) {
  weights.enter(begin, end, s);
  float mass = 0;
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x; i < end; i += kCommitThreads) mass += weights(i, invalid);
  mass = warp_sum(mass);
  if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = mass;
  __syncthreads();
  float total = 0;
  for (float x : s.warp_sums) total += x;
  return total;
}

}  // namespace specfused::smxx
