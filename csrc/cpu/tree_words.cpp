// SPDX-License-Identifier: Apache-2.0
// Boolean masks of either layout -> tree words.
#include "../launch.h"

namespace specfused::cpu {

// A cell outside the mask reads as false: a FULL_MASK whose lengths do not fit it cannot crash.
void tree_words_from_mask(const uint8_t* mask, int64_t mask_numel, const int64_t* committed,
                          int32_t bs, int32_t width, int64_t* words) {
  int64_t before = 0;
  for (int64_t r = 0; r < bs; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      const int64_t at = committed == nullptr ? qlen_only_offset(r, i, width)
                                              : full_mask_offset(before, committed[r], r, i, width);
      const bool inside = at >= 0 && at + width <= mask_numel;
      words[r * width + i] =
          static_cast<int64_t>(inside ? word_from_mask(mask + at, width) : TreeWord{0});
    }
    if (committed != nullptr) before += committed[r];
  }
}

}  // namespace specfused::cpu
