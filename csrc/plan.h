// SPDX-License-Identifier: Apache-2.0
// The split plan: which CTA attends which KV tiles. From lengths only, never
// from the rows of a step.
//
// A unit is one (request, KV head). Its KV is cut into tiles of kTileTokens
// positions anchored at 0. The last tile of a unit, the tail, also holds the
// window, however many columns a step gives it, so the same lengths give the
// same splits in both modes. All tiles of all units form one line, request
// major, then head, then tile; CTA i takes tiles [i * per_cta, (i + 1) *
// per_cta) of it (stream-K, arXiv 2301.03598; FlashMLA balances its requests
// the same way). A unit that crosses CTA borders is split; its parts are
// combined in split order.
//
// As a tensor (int32): header[kPlanHeader], tile_begin[bs + 1],
// first_request[num_ctas].
#pragma once

#include "common.h"

namespace specfused {

constexpr int kTileTokens = 64;
// Parts of one tile cost less to combine than a CTA costs for a second tile, see bench/NOTES.md.
constexpr int kMinTilesPerCta = 1;
constexpr int kPlanHeader = 4;  // {total tiles, tiles per CTA, bs, num_kv_heads}

SPECFUSED_HD int64_t plan_numel(int64_t bs, int64_t num_ctas) {
  return kPlanHeader + bs + 1 + num_ctas;
}

// Tiles of one unit with `committed` rows before the window. A request that cannot be served
// (negative length) still owns one tile, which its CTA skips.
SPECFUSED_HD int32_t num_tiles(int64_t committed) {
  return committed < 0 ? 1 : static_cast<int32_t>(committed / kTileTokens) + 1;
}

// A run of tiles of one unit, owned by one CTA.
struct Segment {
  int32_t request;
  int32_t kv_head;
  int32_t tile_begin;
  int32_t tile_end;    // tile_begin < tile_end
  int32_t split;       // index of this part within its unit
  int32_t num_splits;  // parts of the unit; 1: no combine
  bool tail;           // this segment holds the window
};

struct PlanView {
  const int32_t* data;

  SPECFUSED_HD int32_t total_tiles() const { return data[0]; }
  SPECFUSED_HD int32_t tiles_per_cta() const { return data[1]; }
  SPECFUSED_HD int32_t bs() const { return data[2]; }
  SPECFUSED_HD int32_t num_kv_heads() const { return data[3]; }
  // Tiles of the line before request r's first unit.
  SPECFUSED_HD int32_t tile_begin(int32_t r) const { return data[kPlanHeader + r]; }
  SPECFUSED_HD int32_t first_request(int32_t cta) const {
    return data[kPlanHeader + bs() + 1 + cta];
  }

  // The segment that starts at `line` (a tile of the whole line) in the range that ends at
  // `line_end`; `request` must hold that tile.
  SPECFUSED_HD Segment segment(int32_t line, int32_t line_end, int32_t request) const {
    const int32_t begin = tile_begin(request);
    const int32_t tiles = (tile_begin(request + 1) - begin) / num_kv_heads();
    Segment s;
    s.request = request;
    s.kv_head = (line - begin) / tiles;
    const int32_t unit_begin = begin + s.kv_head * tiles;
    s.tile_begin = line - unit_begin;
    s.tile_end = min_of(line_end - unit_begin, tiles);
    const int32_t first_cta = unit_begin / tiles_per_cta();
    s.split = line / tiles_per_cta() - first_cta;
    s.num_splits = (unit_begin + tiles - 1) / tiles_per_cta() - first_cta + 1;
    s.tail = s.tile_end == tiles;
    return s;
  }
};

// Fills the plan on one thread. The device version (smxx/plan.cu) gives the same integers.
inline void make_plan(const int64_t* seq_lens, int64_t seq_lens_offset, int32_t bs,
                      int32_t num_kv_heads, int32_t num_ctas, int32_t* plan) {
  int32_t* begin = plan + kPlanHeader;
  begin[0] = 0;
  for (int32_t r = 0; r < bs; ++r) {
    begin[r + 1] =
        begin[r] + num_kv_heads * num_tiles(committed_length(seq_lens[r], seq_lens_offset));
  }
  const int32_t total = begin[bs];
  const int32_t per_cta = max_of(ceil_div(total, num_ctas), kMinTilesPerCta);
  plan[0] = total;
  plan[1] = per_cta;
  plan[2] = bs;
  plan[3] = num_kv_heads;
  int32_t* first = begin + bs + 1;
  int32_t r = 0;
  for (int32_t cta = 0; cta < num_ctas; ++cta) {
    const int64_t line = int64_t{cta} * per_cta;
    while (r < bs && begin[r + 1] <= line) ++r;
    first[cta] = r;  // bs: this CTA has nothing to do
  }
}

}  // namespace specfused
