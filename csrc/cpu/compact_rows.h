// SPDX-License-Identifier: Apache-2.0
// Moves one request's accepted rows to the front of its window: KV of every buffer, hidden states.
#pragma once

#include <cstring>

#include "../params.h"

namespace specfused::cpu {

// slots: the request's W window slots. accept_index: flat node ids; `first` is that of the root.
// Ascending, in place: see row_moves in kv_window.h for why no row is read after it was written.
inline void compact_rows(const KvTable& kv, const int64_t* slots, const int32_t* accept_index,
                         int count, int width, int64_t first) {
  const auto in_pool = [&](int64_t s) { return s >= 0 && s < kv.num_slots; };
  for (int j = 1; j < count && j < width; ++j) {
    const int64_t from = accept_index[j] - first;
    if (from < j || from >= width || !row_moves(int(from), j)) continue;
    if (!in_pool(slots[from]) || !in_pool(slots[j])) continue;
    for (int b = 0; b < kv.num_buffers; ++b) {
      char* base = reinterpret_cast<char*>(kv.ptrs[b]);
      const int64_t bytes = kv.row_bytes[b];
      if (base == nullptr || bytes <= 0) continue;
      std::memcpy(base + slots[j] * bytes, base + slots[from] * bytes, bytes);
    }
  }
}

// path: the nodes of the accepted rows; row j of the request comes from row path[j], in place.
inline void compact_hidden(const CommitParams& p, const int32_t* path, int count, int64_t first) {
  char* rows = p.hidden_states + first * p.stride_hidden_bytes;
  for (int j = 1; j < count; ++j) {
    if (!row_moves(path[j], j)) continue;
    std::memcpy(rows + j * p.stride_hidden_bytes, rows + path[j] * p.stride_hidden_bytes,
                p.hidden_row_bytes);
  }
}

}  // namespace specfused::cpu
