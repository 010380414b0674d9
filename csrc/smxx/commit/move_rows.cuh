// SPDX-License-Identifier: Apache-2.0
// Accepted rows to the front, for one request: KV in every buffer of the table, hidden states.
//
// The moves ascend and no target lies behind its source (kv_window.h), so one thread may move its
// bytes of all rows in order, in place. Each thread loads kBatch rows before it stores them.
#pragma once

#include "../../params.h"
#include "../../ptx/delay.cuh"

namespace specfused::smxx {

struct MoveList {
  int32_t count;
  int64_t from[kMaxWindow];  // rows
  int64_t to[kMaxWindow];
};

// All threads of one warp. nodes(j): column of path row j, for j < count. row_of(column): the row
// of a column, or -1 where it has none.
template <class Nodes, class RowOf>
__device__ __forceinline__ void list_moves(int width, int count, Nodes nodes, RowOf row_of,
                                           MoveList& list) {
  const int lane = threadIdx.x % 32;
  int listed = 0;
  for (int first = 0; first < min_of(count, width); first += 32) {
    const int j = first + lane;
    int64_t from = -1;
    int64_t to = -1;
    if (j >= 1 && j < count && j < width) {
      const int64_t node = nodes(j);
      if (node >= j && node < width && row_moves(static_cast<int>(node), j)) {
        from = row_of(static_cast<int>(node));
        to = row_of(j);
      }
    }
    const bool moves = from >= 0 && to >= 0;
    const uint32_t lanes = __ballot_sync(~0u, moves);
    if (moves) {
      const int place = listed + __popc(lanes & ((1u << lane) - 1));
      list.from[place] = from;
      list.to[place] = to;
    }
    listed += __popc(lanes);
  }
  if (lane == 0) list.count = listed;
}

template <class Vector>
__device__ __forceinline__ void move_vectors(char* base, int64_t bytes, int64_t stride,
                                             const MoveList& list) {
  constexpr int kBatch = 4;
  for (int64_t at = threadIdx.x * sizeof(Vector); at < bytes; at += blockDim.x * sizeof(Vector)) {
    char* column = base + at;
    for (int first = 0; first < list.count; first += kBatch) {
      Vector rows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < list.count) {
          rows[i] = *reinterpret_cast<const Vector*>(column + list.from[first + i] * stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < list.count) {
          *reinterpret_cast<Vector*>(column + list.to[first + i] * stride) = rows[i];
        }
      }
    }
  }
}

// Bytes of rows that one CTA moves: all of one KV buffer's rows, or a piece of the hidden rows.
struct MoveUnit {
  char* base;
  int64_t bytes;  // of each row
  int64_t stride;

  __device__ __forceinline__ void move(const MoveList& list) const {
    const uint64_t alignment = reinterpret_cast<uint64_t>(base) | static_cast<uint64_t>(bytes) |
                               static_cast<uint64_t>(stride);
    if (alignment % 16 == 0) {
      move_vectors<int4>(base, bytes, stride, list);
    } else if (alignment % 4 == 0) {
      move_vectors<int>(base, bytes, stride, list);
    } else {
      move_vectors<char>(base, bytes, stride, list);
    }
  }
};

__device__ __forceinline__ MoveUnit kv_unit(const KvTable& kv, int buffer) {
  const int64_t bytes = kv.row_bytes[buffer];
  return {reinterpret_cast<char*>(kv.ptrs[buffer]), bytes, bytes};
}

// Hidden rows are long (3 x 4096 elements of EAGLE-3) and only one buffer: in pieces.
constexpr int64_t kHiddenPiece = 2048;

SPECFUSED_HD int num_hidden_pieces(const CommitParams& p) {
  if (p.hidden_states == nullptr) return 0;
  return static_cast<int>(ceil_div<int64_t>(p.hidden_row_bytes, kHiddenPiece));
}

__device__ __forceinline__ MoveUnit hidden_unit(const CommitParams& p, int64_t first, int piece) {
  const int64_t at = piece * kHiddenPiece;
  return {p.hidden_states + first * p.stride_hidden_bytes + at,
          min_of<int64_t>(kHiddenPiece, p.hidden_row_bytes - at), p.stride_hidden_bytes};
}

}  // namespace specfused::smxx
