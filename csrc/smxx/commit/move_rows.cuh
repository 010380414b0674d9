// SPDX-License-Identifier: Apache-2.0
// Accepted KV rows to the front of the window, for one request, in every buffer of the table.
//
// The moves ascend and no target lies behind its source (kv_window.h), so one thread may move its
// bytes of all rows in order, in place. Each thread loads kBatch rows before it stores them.
#pragma once

#include "../../params.h"

namespace specfused::smxx {

struct MoveList {
  int32_t count;
  int64_t from[kMaxWindow];  // slots
  int64_t to[kMaxWindow];
};

// All threads of the CTA; ends behind a barrier. nodes(j): column of path row j, for j < count.
template <class Nodes>
__device__ __forceinline__ void list_moves(const KvTable& kv, const int64_t* slots, int width,
                                           int count, Nodes nodes, MoveList& list) {
  if (threadIdx.x < 32) {
    int listed = 0;
    for (int first = 0; first < min_of(count, width); first += 32) {
      const int j = first + static_cast<int>(threadIdx.x);
      bool moves = false;
      int64_t from = 0;
      int64_t to = 0;
      if (j >= 1 && j < count && j < width) {
        const int64_t node = nodes(j);
        if (node >= j && node < width && row_moves(static_cast<int>(node), j)) {
          from = slots[node];
          to = slots[j];
          moves = from >= 0 && from < kv.num_slots && to >= 0 && to < kv.num_slots;
        }
      }
      const uint32_t lanes = __ballot_sync(~0u, moves);
      if (moves) {
        const int place = listed + __popc(lanes & ((1u << threadIdx.x) - 1));
        list.from[place] = from;
        list.to[place] = to;
      }
      listed += __popc(lanes);
    }
    if (threadIdx.x == 0) list.count = listed;
  }
  __syncthreads();
}

template <class Vector>
__device__ __forceinline__ void move_buffer(char* base, int64_t row_bytes, const MoveList& list) {
  constexpr int kBatch = 8;
  for (int64_t at = threadIdx.x * sizeof(Vector); at < row_bytes;
       at += blockDim.x * sizeof(Vector)) {
    char* column = base + at;
    for (int first = 0; first < list.count; first += kBatch) {
      Vector rows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < list.count) {
          rows[i] = *reinterpret_cast<const Vector*>(column + list.from[first + i] * row_bytes);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < list.count) {
          *reinterpret_cast<Vector*>(column + list.to[first + i] * row_bytes) = rows[i];
        }
      }
    }
  }
}

// Buffers part, part + parts, ... of the table.
__device__ __forceinline__ void move_rows(const KvTable& kv, int part, int parts,
                                          const MoveList& list) {
  if (list.count == 0) return;
  for (int b = part; b < kv.num_buffers; b += parts) {
    char* base = reinterpret_cast<char*>(kv.ptrs[b]);
    const int64_t row_bytes = kv.row_bytes[b];
    const uint64_t alignment = static_cast<uint64_t>(kv.ptrs[b]) | static_cast<uint64_t>(row_bytes);
    if (alignment % 16 == 0) {
      move_buffer<int4>(base, row_bytes, list);
    } else if (alignment % 4 == 0) {
      move_buffer<int>(base, row_bytes, list);
    } else {
      move_buffer<char>(base, row_bytes, list);
    }
  }
}

}  // namespace specfused::smxx
