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
  // Of the tokens that a warp has at hand.
  int32_t num_removed[kCommitThreads / 32];
  uint32_t removed[kCommitThreads / 32][kMaxWindow];
};

// What the residual launch leaves per request and part of a row.
struct PartMass {
  float mass;
  int32_t invalid;
};

struct SampleWorkspace {
  RowStats stats;    // of [rows, slices]
  PartMass* masses;  // [bs, slices, kSliceParts]

  SPECFUSED_HD SampleWorkspace(const CommitParams& p, int slices) {
    const int64_t cells = static_cast<int64_t>(p.bs) * p.width * slices;
    masses = static_cast<PartMass*>(p.workspace);
    stats.keys = reinterpret_cast<uint64_t*>(masses + int64_t{p.bs} * slices * kSliceParts);
    stats.parts = reinterpret_cast<float*>(stats.keys + cells);
    stats.sums = stats.parts + cells * kSliceParts;
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

  __device__ __forceinline__ const T* row(int node) const {
    if constexpr (kProbs) {
      return p.target_probs + (first + node) * p.stride_target_probs_row;
    } else {
      return static_cast<const T*>(p.logits) + (first + node) * p.stride_logits_row;
    }
  }

  // Of an element of the row. Below 0: cannot be used.
  __device__ __forceinline__ float prob(int node, T x) const {
    if constexpr (kProbs) {
      return is_weight(x) ? x : -1;
    } else {
      return exp2f((as_float(x) - s.largest[node]) * s.scale) * s.inv_sum[node];
    }
  }

  __device__ __forceinline__ const float* draft_row(int node) const {
    return p.draft_probs + request * p.stride_draft_probs_request + node * p.stride_draft_probs_row;
  }

  __device__ __forceinline__ float read_target(int node, int child) const {
    const int64_t token = s.walk.draft_tokens[child];
    if (!usable(node)) return -1;
    return token >= 0 && token < p.vocab ? prob(node, row(node)[token]) : 0;
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

// Largest logit and sum of every row, from its slices: a warp per row, kBatch rows in flight.
struct RowBatch {
  static constexpr int kBatch = 4;
  static constexpr int kPerLane = kMaxSlices / 32;
  static constexpr int kRows = kBatch * kCommitThreads / 32;

  uint64_t keys[kBatch][kPerLane];
  float sums[kBatch][kPerLane];

  __device__ static __forceinline__ int row(int begin, int i) {
    return begin + i * (kCommitThreads / 32) + threadIdx.x / 32;
  }

  __device__ __forceinline__ void load(const CommitParams& p, int64_t first, int slices,
                                       int begin) {
    const RowStats from = SampleWorkspace(p, slices).stats;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const int slice = threadIdx.x % 32 + 32 * k;
        const bool exists = row(begin, i) < p.width && slice < slices;
        const int64_t cell = (first + row(begin, i)) * slices + slice;
        keys[i][k] = exists ? from.keys[cell] : 0;
        sums[i][k] = exists ? from.sums[cell] : 0;
      }
    }
  }

  __device__ __forceinline__ void reduce(int width, int begin, Sampled& s, float scale) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (row(begin, i) >= width) return;
      uint64_t key = keys[i][0];
      for (int k = 1; k < kPerLane; ++k) key = max_of(key, keys[i][k]);
      key = warp_max(key);
      const float largest = argmax_value(key);
      float sum = 0;
      for (int k = 0; k < kPerLane; ++k) {
        const float rescale = exp2f((argmax_value(keys[i][k]) - largest) * scale);
        sum += sums[i][k] > 0 ? sums[i][k] * rescale : 0;
      }
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0) {
        s.largest[row(begin, i)] = largest;
        s.inv_sum[row(begin, i)] = 1 / sum;
        s.argmax[row(begin, i)] = argmax_index(key);
      }
    }
  }
};

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
  const float scale = kProbs ? 1 : exponent_scale(p.temperatures[request]);
  if (threadIdx.x == 0) s.scale = scale;
  ptx::delay(0);
  ptx::wait_for_previous_grid();
  ptx::delay(0);
  if constexpr (!kProbs) {
    for (int begin = 0; begin < p.width; begin += RowBatch::kRows) {
      RowBatch batch;
      batch.load(p, first, slices, begin);
      batch.reduce(p.width, begin, s, scale);
    }
  }
  __syncthreads();
  ptx::delay(0);
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
  ptx::delay(0);
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
      : rows_(rows), node_(node), target_(rows.row(node)) {
    if (rows.p.draft_probs != nullptr && rows.s.num_rejected > 0) draft_ = rows.draft_row(node);
  }

  // All threads of a warp: lists the rejected tokens among [begin, end).
  __device__ __forceinline__ void enter(uint32_t begin, uint32_t end, Sampled& s) const {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int rejected = rows_.p.draft_probs == nullptr ? s.num_rejected : 0;
    int listed = 0;
    __syncwarp();
    for (int i = lane; i - lane < rejected; i += 32) {
      const int64_t token = i < rejected ? s.walk.draft_tokens[s.rejected[i]] : -1;
      const bool here = token >= begin && token < end;
      const uint32_t lanes = __ballot_sync(~0u, here);
      if (here) {
        const int place = listed + __popc(lanes & ((1u << lane) - 1));
        s.removed[warp][place] = static_cast<uint32_t>(token);
      }
      listed += __popc(lanes);
    }
    if (lane == 0) s.num_removed[warp] = listed;
    __syncwarp();
  }

  // What the weight of a token is made of, so that several can be on their way.
  struct Loaded {
    T target;
    float draft;
  };

  __device__ __forceinline__ Loaded load(uint32_t token) const {
    return {target_[token], draft_ != nullptr ? draft_[token] : 0};
  }

  // `invalid` is set where the token cannot be used.
  __device__ __forceinline__ float weight(const Loaded& x, bool& invalid) const {
    const float p = rows_.prob(node_, x.target);
    if constexpr (kProbs) invalid = invalid || p < 0;
    if (draft_ != nullptr) return residual(p, x.draft);
    return p > 0 ? p : 0;
  }

  // Which of the tokens first + u * kStep, u < 32, are listed: bit u.
  template <int kStep>
  __device__ __forceinline__ uint32_t removed_of(uint32_t first) const {
    const int warp = threadIdx.x / 32;
    uint32_t bits = 0;
    for (int i = 0; i < rows_.s.num_removed[warp]; ++i) {
      const uint32_t distance = rows_.s.removed[warp][i] - first;  // large for one in front
      const bool one = distance < 32 * kStep && distance % kStep == 0;
      bits |= (one ? 1u : 0u) << (distance / kStep % 32);
    }
    return bits;
  }

 private:
  const TargetRows<T, kProbs>& rows_;
  int node_;
  const T* target_;
  const float* draft_ = nullptr;
};

// f(i, weight) of the indices first, first + kStep, .. that are below end, in this order; kFlight
// of them are loaded at once.
template <int kFlight, int kStep, class Weights, class F>
__device__ __forceinline__ void for_weights(const Weights& weights, uint32_t first, uint32_t end,
                                            bool& invalid, F f) {
  for (uint32_t at = first; at < end; at += kFlight * kStep) {
    typename Weights::Loaded loaded[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (at + u * kStep < end) loaded[u] = weights.load(at + u * kStep);
    }
    const uint32_t removed = weights.template removed_of<kStep>(at);
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (at + u * kStep >= end) break;
      const float w = weights.weight(loaded[u], invalid);
      f(at + u * kStep, (removed >> u & 1) != 0 ? 0 : w);
    }
  }
}

// All threads of a warp: the mass of tokens [begin, end), added up in a fixed order.
template <class Weights>
__device__ __forceinline__ float mass_of(const Weights& weights, uint32_t begin, uint32_t end,
                                         Sampled& s, bool& invalid) {
  weights.enter(begin, end, s);
  float mass = 0;
  for_weights<8, 32>(weights, begin + threadIdx.x % 32, end, invalid,
                     [&](uint32_t, float w) { mass += w; });
  return warp_sum(mass);
}

}  // namespace specfused::smxx
