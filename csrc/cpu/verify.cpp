// SPDX-License-Identifier: Apache-2.0
// Spec variant on the CPU: num_rows rows per request, each with its tree word. decode.cpp beside
// this file is the non-spec variant.
#include "../launch.h"
#include "attend.h"

namespace specfused::cpu {

void verify_attn(const AttnParams& p, int64_t begin, int64_t end) {
  with_element(p.dtype, [&](auto element) {
    Scratch scratch;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int request = int(unit / p.num_q_heads);
      const int head = int(unit % p.num_q_heads);
      const KvWindow window = p.table.window(request);
      if (window.width == 0) continue;
      for (int i = 0; i < p.num_rows; ++i) {
        const TreeWord word = p.tree_words == nullptr
                                  ? chain_word(i)
                                  : TreeWord(p.tree_words[request * p.stride_words + i]);
        const int64_t row = int64_t{request} * p.num_rows + i;
        attend_row<decltype(element)>(p, window, word, row, head, scratch);
      }
    }
  });
}

}  // namespace specfused::cpu
