// SPDX-License-Identifier: Apache-2.0
// One request's walk in shared memory, the decision it comes to, and the rows that then move.
//
// Every CTA of a request walks: that costs less than a launch. CTA 0 writes the decision, the
// others move rows. What a mover needs besides the walk is loaded beside the tree, so that loads
// that wait for each other are two: the tree, then the rows.
#pragma once

#include "move_rows.cuh"

namespace specfused::smxx {

constexpr int kCommitThreads = 128;
constexpr int kCommitCtasPerSm = 8;  // 64 registers

struct Walk {
  int64_t next_token[kMaxWindow];
  int64_t next_sibling[kMaxWindow];
  int64_t draft_tokens[kMaxWindow];
  int64_t slots[kMaxWindow];
  int32_t path[kMaxWindow];
  int32_t num_correct_drafts;
  bool is_chain;
  MoveList kv_moves;
  MoveList hidden_moves;
};

// What CTA 0 needs for its outputs.
struct Bonus {
  int64_t token;
  bool invalid;
};

// Needs a barrier behind it.
__device__ __forceinline__ void load_walk(const CommitParams& p, int64_t first, Walk& walk) {
  ptx::delay(0);
  for (int i = threadIdx.x; i < p.width; i += kCommitThreads) {
    walk.draft_tokens[i] = p.draft_tokens[first + i];
    if (p.next_token != nullptr) {
      walk.next_token[i] = p.next_token[first + i];
      walk.next_sibling[i] = p.next_sibling[first + i];
    }
    if (p.out_cache_loc != nullptr) walk.slots[i] = p.out_cache_loc[first + i];
  }
  if (threadIdx.x == 0) walk.is_chain = p.next_token == nullptr;
}

// One thread.
template <class Accept>
__device__ __forceinline__ void take_walk(const CommitParams& p, Walk& walk, Accept& accept) {
  walk.num_correct_drafts = walk_tree(walk.is_chain ? nullptr : walk.next_token, walk.next_sibling,
                                      p.width, min_of(p.max_path, kMaxWindow), walk.path, accept);
}

__device__ __forceinline__ void write_decision(const CommitParams& p, int request, const Walk& walk,
                                               const Bonus& bonus) {
  const int64_t first = static_cast<int64_t>(request) * p.width;
  const int correct = walk.num_correct_drafts;
  const int64_t committed = p.seq_lens[request];
  const auto emitted = [&](int j) {
    return static_cast<int32_t>(j < correct ? walk.draft_tokens[walk.path[j + 1]] : bonus.token);
  };
  ptx::delay(0);
  __syncthreads();  // new_seq_lens may be seq_lens
  ptx::delay(0);
  for (int j = threadIdx.x; j < p.max_path; j += kCommitThreads) {
    const int64_t at = static_cast<int64_t>(request) * p.max_path + j;
    const bool on_path = j <= correct;
    p.accept_index[at] = on_path ? static_cast<int32_t>(first + walk.path[j]) : -1;
    p.accept_tokens[at] = on_path ? emitted(j) : -1;
  }
  for (int j = threadIdx.x; j < p.width; j += kCommitThreads) {
    if (p.next_token_ids != nullptr) {
      const int32_t token = j <= correct ? emitted(j) : 0;
      if (p.token_ids_are_int32) {
        static_cast<int32_t*>(p.next_token_ids)[first + j] = token;
      } else {
        static_cast<int64_t*>(p.next_token_ids)[first + j] = token;
      }
    }
    if (p.positions != nullptr) p.positions[first + j] = committed + j;
  }
  if (threadIdx.x == 0) {
    p.num_correct_drafts[request] = correct;
    p.accept_lens[request] = correct + 1;
    p.bonus_tokens[request] = static_cast<int32_t>(bonus.token);
    p.new_seq_lens[request] = slide(committed, correct + 1);
    if (p.select_index != nullptr) p.select_index[request] = first + correct;
    if (p.window_ends != nullptr) p.window_ends[request] = committed + p.width;
    if (p.invalid_logits != nullptr) p.invalid_logits[request] = bonus.invalid;
  }
}

// Units of a request, and CTAs that move them: one unit each at small batches; at large ones as
// many CTAs as are resident at once, because a CTA that comes later walks when the others have
// moved. A chain and a single row move nothing.
SPECFUSED_HD int num_units(const CommitParams& p) {
  return p.kv.num_buffers + num_hidden_pieces(p);
}

constexpr int kSms = 132;  // of an H200

inline int num_movers(const CommitParams& p, int ctas_per_sm) {
  if (p.next_token == nullptr || p.width == 1) return 0;
  return min_of(num_units(p), max_of(ctas_per_sm * kSms / p.bs - 1, 1));
}

// All CTAs of a launch, `per_request` each; 0: more than a grid can have. In x alone: the other
// dimensions end at 65535.
inline unsigned grid_of(int64_t bs, int64_t per_request) {
  return bs * per_request <= INT32_MAX ? static_cast<unsigned>(bs * per_request) : 0;
}

// The CTAs that decide come first: where they draw as well, they take longest.
struct CtaOfRequest {
  int request;
  int part;
  int parts;

  __device__ __forceinline__ explicit CtaOfRequest(int bs)
      : request(blockIdx.x % bs), part(blockIdx.x / bs), parts(gridDim.x / bs) {}
};

class Mover {
 public:
  // Loads the addresses of its first unit.
  __device__ __forceinline__ Mover(const CommitParams& p, int64_t first, int part, int parts)
      : p_(p), first_(first), at_(part), parts_(parts) {
    if (part >= 0 && part < num_units(p)) next_ = unit(part);
  }

  // All threads, behind the walk and a barrier.
  __device__ __forceinline__ void run(Walk& walk) {
    ptx::delay(0);
    const int count = walk.num_correct_drafts + 1;
    const auto nodes = [&](int j) { return static_cast<int64_t>(walk.path[j]); };
    if (threadIdx.x < 32) {
      const auto slot = [&](int column) {
        const int64_t s = walk.slots[column];
        return s < p_.kv.num_slots ? s : -1;
      };
      if (p_.kv.num_buffers > 0) list_moves(p_.width, count, nodes, slot, walk.kv_moves);
    } else if (threadIdx.x < 64) {
      const auto row = [](int column) { return static_cast<int64_t>(column); };
      if (p_.hidden_states != nullptr) {
        list_moves(p_.width, count, nodes, row, walk.hidden_moves);
      }
    }
    __syncthreads();
    while (at_ < num_units(p_)) {
      const MoveUnit now = next_;
      const MoveList& list = at_ < p_.kv.num_buffers ? walk.kv_moves : walk.hidden_moves;
      at_ += parts_;
      if (at_ < num_units(p_)) next_ = unit(at_);
      ptx::delay(at_);
      now.move(list);
    }
  }

 private:
  __device__ __forceinline__ MoveUnit unit(int i) const {
    const int buffers = p_.kv.num_buffers;
    return i < buffers ? kv_unit(p_.kv, i) : hidden_unit(p_, first_, i - buffers);
  }

  const CommitParams& p_;
  int64_t first_;
  int at_;
  int parts_;
  MoveUnit next_ = {};
};

}  // namespace specfused::smxx
