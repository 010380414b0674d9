// SPDX-License-Identifier: Apache-2.0
// Boolean masks of either layout -> tree words.
#include "../launch.h"

namespace specfused::cpu {

// A cell outside the mask reads as false, so a FULL_MASK whose lengths do not fit cannot crash.
void tree_words_from_mask(const uint8_t* mask, int64_t mask_numel, const int64_t* committed,
                          int32_t bs, int32_t width, int64_t* words) {
  int64_t before = 0;
  for (int64_t r = 0; r < bs; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      const int64_t at = committed == nullptr ? qlen_only_offset(r, i, width)
                                              : full_mask_offset(before, committed[r], r, i, width);
      const int64_t cells = at < 0 ? 0 : min_of<int64_t>(mask_numel - at, width);
      words[r * width + i] =
          static_cast<int64_t>(cells > 0 ? word_from_mask(mask + at, int(cells)) : TreeWord{0});
    }
    if (committed != nullptr) before += committed[r];
  }
}

}  // namespace specfused::cpu
