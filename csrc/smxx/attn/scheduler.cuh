// SPDX-License-Identifier: Apache-2.0
// From plan entry to segments: a small table in shared memory, and cursors that walk its tiles.
//
// Three cursors walk the same tiles: slot indices first, then the KV loads, then the math. They
// share the table, so a segment's metadata is read from global memory once, by one warp, for eight
// units at a time, and KV loads run ahead across segment borders.
#pragma once

#include "traits.cuh"

namespace specfused::smxx {

// One 64-bit word per split unit and row tile in the workspace, found by the unit's first CTA.
// Bits 0-11: CTAs of the unit that have arrived with their part; 12-23: those that have started;
// 24-31: owners of shares that have seen all arrive; 32-63: owners that gave up, see combine.cuh.
// The last CTA to use it leaves it at zero.
constexpr uint64_t kArrived = 1;
constexpr uint64_t kStarted = uint64_t{1} << 12;
constexpr uint64_t kSeen = uint64_t{1} << 24;
constexpr int kGaveUpBit = 32;
static_assert(kAttnMaxCtas < 1 << 12);

__device__ __forceinline__ uint64_t* unit_word(void* workspace, int first_cta, int row_tile) {
  return static_cast<uint64_t*>(workspace) + first_cta * kMaxRowTiles + row_tile;
}

// Both positive.
__device__ __forceinline__ int quotient(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// Of `fold` neighbours as one: what a plan for so many times fewer CTAs would say.
__device__ __forceinline__ PlanEntry read_plan_entry(const AttnParams& p, int fold, int cta) {
  const PlanView plan{p.plan};
  PlanEntry entry;
  entry.cta = cta;
  entry.first_request = p.plan[kPlanHeader + p.bs + 1 + cta * fold];
  entry.tiles_per_cta = plan.tiles_per_cta() * fold;
  const int32_t total = plan.total_tiles();
  entry.line_begin = min_of(cta * entry.tiles_per_cta, total);
  entry.line_end = min_of(entry.line_begin + entry.tiles_per_cta, total);
  return entry;
}

// One request per lane of a warp, from `first` on.
struct LaneRequest {
  int first;
  int begin;  // of its tiles in the line
  int tiles;  // of each of its units
  KvWindow window;

  __device__ __forceinline__ void read(const AttnParams& p, int first_request) {
    first = first_request;
    const int request = min_of(first + static_cast<int>(threadIdx.x % 32), p.bs - 1);
    const PlanView plan{p.plan};
    begin = plan.tile_begin(request);
    const int end = plan.tile_begin(request + 1);
    window = p.table.window(request);
    tiles = max_of(quotient(end - begin, p.num_kv_heads), 1);
  }

  // Are the requests of the next kSegmentBatch units from one of `request` on here?
  __device__ __forceinline__ bool hold(const AttnParams& p, int request) const {
    return request + kSegmentBatch <= first + 32 || p.bs <= first + 32;
  }
};

// Appends the next units' segments to the table; units of requests that cannot be served are left
// out. All lanes of one warp call it. The first call starts from the plan entry's first request.
// Returns how many segments the table got in total; at the end of the line that stops to grow.
template <class Shared>
__device__ __forceinline__ int fill_segments(const AttnParams& p, const AttnLaunch& launch,
                                             Shared& shared, bool first_call) {
  const int lane = threadIdx.x % 32;
  const int heads = p.num_kv_heads;
  PlanEntry entry;
  LaneRequest requests;
  int filled = 0;
  int unit = 0;
  bool more = true;
  if (first_call) {
    // Read together with the entry, in the hope that its requests are among the first.
    requests.read(p, 0);
    entry = read_plan_entry(p, launch.fold, blockIdx.y);
    if (lane == 0) shared.entry = entry;
    if (lane < 2) {
      shared.pending[lane].num_splits = 0;
      shared.seen[lane] = 0;
    }
    more = entry.first_request < p.bs && entry.line_begin < entry.line_end;
    if (more) {
      if (!requests.hold(p, entry.first_request)) requests.read(p, entry.first_request);
      const int source = entry.first_request - requests.first;
      const int begin = __shfl_sync(~0u, requests.begin, source);
      const int tiles = __shfl_sync(~0u, requests.tiles, source);
      unit = entry.first_request * heads + quotient(entry.line_begin - begin, tiles);
    }
  } else {
    entry = shared.entry;
    filled = shared.filled;
    unit = shared.next_unit;
    requests.read(p, unit / heads);
  }
  int added = 0;
  while (more && added == 0) {
    // One unit per lane: eight units are of at most eight requests.
    const int base_request = quotient(unit, heads);
    const int base_head = unit - base_request * heads;
    if (!requests.hold(p, base_request)) requests.read(p, base_request);
    const int ahead = quotient(base_head + lane, heads);
    const int source = min_of(base_request - requests.first + ahead, 31);
    const int head = base_head + lane - ahead * heads;
    const int request = base_request + ahead;
    const int begin = __shfl_sync(~0u, requests.begin, source);
    const int tiles = __shfl_sync(~0u, requests.tiles, source);
    const int committed = __shfl_sync(~0u, static_cast<int>(requests.window.committed), source);
    const int width = __shfl_sync(~0u, requests.window.width, source);
    const auto row = __shfl_sync(~0u, reinterpret_cast<uint64_t>(requests.window.row), source);
    const auto window_slots =
        __shfl_sync(~0u, reinterpret_cast<uint64_t>(requests.window.window_slots), source);

    const int unit_begin = begin + head * tiles;
    const bool in_line = lane < kSegmentBatch && request < p.bs && unit_begin < entry.line_end;
    const bool valid = in_line && width > 0;
    const uint32_t valid_lanes = __ballot_sync(~0u, valid);
    if (valid) {
      const int line = max_of(unit_begin, entry.line_begin);
      SegmentEntry s;
      s.row = reinterpret_cast<const int32_t*>(row);
      s.window_slots = reinterpret_cast<const int64_t*>(window_slots);
      s.used = 0;
      s.committed = committed;
      s.width = width;
      s.request = request;
      s.kv_head = head;
      s.tile_begin = line - unit_begin;
      s.tile_end = min_of(entry.line_end - unit_begin, tiles);
      s.tail = s.tile_end == tiles;
      // The tail holds the window, whatever number of columns this step gives it.
      if (s.tail) s.tile_end = max_of(s.tile_end, ceil_div(committed + width, kTile));
      s.first_cta = quotient(unit_begin, entry.tiles_per_cta);
      s.split = static_cast<int16_t>(entry.cta - s.first_cta);
      const int last_cta = quotient(unit_begin + tiles - 1, entry.tiles_per_cta);
      s.num_splits = static_cast<int16_t>(last_cta - s.first_cta + 1);
      s.unused = 0;
      const int place = filled + __popc(valid_lanes & ((1u << lane) - 1));
      shared.segments[place % Shared::kSegments] = s;
      ptx::delay(unit);
      if (s.num_splits > 1) {
        ptx::add_relaxed(unit_word(p.workspace, s.first_cta, blockIdx.x), kStarted);
      }
    }
    added = __popc(valid_lanes);
    filled += added;
    unit += kSegmentBatch;
    more = __all_sync(~0u, lane >= kSegmentBatch || in_line);
  }
  if (lane == 0) {
    shared.filled = filled;
    shared.next_unit = more ? unit : p.bs * heads;
  }
  __syncwarp();
  return filled;
}

// To the first tile of cursor.segment, if the table has it, else to kNotEntered.
template <class Shared>
__device__ __forceinline__ void enter_segment(const Shared& shared, Cursor& cursor) {
  cursor.tile = cursor.segment < shared.filled
                    ? shared.segments[cursor.segment % Shared::kSegments].tile_begin
                    : kNotEntered;
}

template <class Shared>
__device__ __forceinline__ void advance(const Shared& shared, Cursor& cursor) {
  if (++cursor.tile >= shared.segments[cursor.segment % Shared::kSegments].tile_end) {
    ++cursor.segment;
    enter_segment(shared, cursor);
  }
}

// The cursors of the loads wait in shared memory, a copy per warp, so that the math keeps its
// registers. All lanes have read the old value before lane 0 stores the new one.
__device__ __forceinline__ void keep_cursor(Cursor& kept, const Cursor& cursor) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) kept = cursor;
  __syncwarp();
}

}  // namespace specfused::smxx
