// SPDX-License-Identifier: Apache-2.0
// Non-spec variant on the CPU: one row per request, which sees the committed rows and itself.
// verify.cpp beside this file is the spec variant.
#include "../launch.h"
#include "attend.h"

namespace specfused::cpu {

void decode_attn(const AttnParams& p, int64_t begin, int64_t end) {
  with_element(p.dtype, [&](auto element) {
    Scratch scratch;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int request = int(unit / p.num_q_heads);
      const int head = int(unit % p.num_q_heads);
      const KvWindow window = p.table.window(request);
      if (window.width == 0) continue;
      attend_row<decltype(element)>(p, window, kSingleNode, request, head, scratch);
    }
  });
}

}  // namespace specfused::cpu
