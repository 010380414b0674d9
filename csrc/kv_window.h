// SPDX-License-Identifier: Apache-2.0
// The KV window: where a request's KV rows are, in both modes. Nothing else in the project defines
// it.
//
//   position   0 ............ C-1 | C .......... C+W-1 | C+W ...
//   slots      committed KV       | the window          | reserve (the engine's)
//
// C = committed length before the step, W = rows of the step: num_draft_tokens in spec mode (node 0
// is the root, the last emitted token), 1 in non-spec mode. A step writes row i to the slot at C+i.
// Commit moves the accepted path p_0 = 0 < p_1 < ... to columns 0, 1, ...; the window slides by
// C += accept_lens. No other difference exists between the modes, so a switch moves nothing.
#pragma once

#include "common.h"

namespace specfused {

struct KvWindow {
  const int32_t* row;           // req_to_token[request]: row[p] is the slot of position p
  const int64_t* window_slots;  // slots of columns 0..width-1, or null: row[C + column]
  int64_t committed;            // C
  int32_t width;                // columns of the window that rows of this step may see
  int64_t num_slots;            // rows of the pool

  SPECFUSED_HD int64_t end() const { return committed + width; }

  // Slot of a committed position (p < C) or of window column p - C (p >= C). A slot id outside the
  // pool reads as slot 0, the engine's dummy row: garbage for this request, harmless for others.
  SPECFUSED_HD int64_t slot(int64_t position) const {
    const int64_t s = position < committed || window_slots == nullptr
                          ? static_cast<int64_t>(row[position])
                          : window_slots[position - committed];
    return in_pool(s) ? s : 0;
  }

  SPECFUSED_HD bool in_pool(int64_t slot_id) const {
    return static_cast<uint64_t>(slot_id) < static_cast<uint64_t>(num_slots);
  }
};

// Rotary position of a node: its column is C + i, its position C + depth(i).
SPECFUSED_HD int64_t node_position(int64_t committed, int depth) { return committed + depth; }

// The window slides over what was accepted (bonus token's predecessor rows, root included).
SPECFUSED_HD int64_t slide(int64_t committed, int accept_lens) { return committed + accept_lens; }

// Compaction: accepted path row j comes from column path[j] and goes to column j. Because path is
// strictly increasing from 0, path[j] >= j: an ascending in-place move never reads what it wrote,
// and row j moves only if path[j] != j (a chain moves nothing).
SPECFUSED_HD bool row_moves(int from_column, int to_column) { return from_column != to_column; }

// A request of the batch as the kernels see it, or an empty one (width 0) when its index or length
// cannot be right: such a row (padding, a recycled request) reads nothing and writes nothing.
struct WindowTable {
  const int32_t* req_to_token;      // [num_reqs, max_context]
  const int64_t* req_pool_indices;  // [bs]
  const int64_t* seq_lens;          // [bs]; C = seq_lens[r] + seq_lens_offset
  const int64_t* window_slots;      // [bs, width] or null: columns follow C in req_to_token
  int64_t stride_req_to_token;      // elements between rows of req_to_token
  int64_t stride_window_slots;      // elements between rows of window_slots
  int64_t num_reqs;                 // rows of req_to_token
  int64_t max_context;              // columns of req_to_token
  int64_t num_slots;                // rows of the KV pool
  int64_t seq_lens_offset;          // 0 verify, -1 decode on a plain server, -W after a write
  int32_t width;                    // window columns

  SPECFUSED_HD KvWindow window(int request) const {
    const int64_t index = req_pool_indices[request];
    const int64_t committed = committed_length(seq_lens[request], seq_lens_offset);
    const int64_t last = window_slots == nullptr ? committed + width : committed;
    const bool valid = index >= 0 && index < num_reqs && committed >= 0 && last <= max_context;
    KvWindow w;
    w.row = req_to_token + (valid ? index : 0) * stride_req_to_token;
    w.window_slots =
        window_slots == nullptr ? nullptr : window_slots + request * stride_window_slots;
    w.committed = valid ? committed : 0;
    w.width = valid ? width : 0;
    w.num_slots = num_slots;
    return w;
  }
};

}  // namespace specfused
