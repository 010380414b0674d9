// SPDX-License-Identifier: Apache-2.0
// Stores the step's new K/V rows into their slots, before any row of the step attends.
#include <cstring>

#include "../launch.h"

namespace specfused::cpu {

void store_rows(const AttnParams& p) {
  if (p.k_new == nullptr) return;
  const int64_t bytes = int64_t{p.head_dim} * dtype_bytes(p.dtype);
  const int64_t element = dtype_bytes(p.dtype);
  for (int request = 0; request < p.bs; ++request) {
    const KvWindow window = p.table.window(request);
    if (window.width == 0) continue;
    for (int i = 0; i < p.num_rows; ++i) {
      const int64_t row = int64_t{request} * p.num_rows + i;
      const int64_t slot = p.out_cache_loc[row * p.stride_out_cache_loc];
      if (!window.in_pool(slot)) continue;
      for (int h = 0; h < p.num_kv_heads; ++h) {
        const int64_t k_at = slot * p.stride_k_slot + h * p.stride_k_head;
        const int64_t v_at = slot * p.stride_v_slot + h * p.stride_v_head;
        const int64_t k_from = row * p.stride_k_new_row + h * p.stride_k_new_head;
        const int64_t v_from = row * p.stride_v_new_row + h * p.stride_v_new_head;
        std::memcpy(static_cast<char*>(p.k_cache) + k_at * element,
                    static_cast<const char*>(p.k_new) + k_from * element, bytes);
        std::memcpy(static_cast<char*>(p.v_cache) + v_at * element,
                    static_cast<const char*>(p.v_new) + v_from * element, bytes);
      }
    }
  }
}

}  // namespace specfused::cpu
