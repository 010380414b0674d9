// SPDX-License-Identifier: Apache-2.0
// From plan entry to segments: a small table in shared memory, and cursors that walk its tiles.
//
// Three cursors walk the same tiles: slot indices first, then the KV loads, then the math. They
// share the table, so a segment's metadata is read from global memory once, by one warp, for eight
// units at a time, and KV loads run ahead across segment borders.
#pragma once

#include "traits.cuh"

namespace specfused::smxx {

__device__ __forceinline__ PlanEntry read_plan_entry(const AttnParams& p, int cta) {
  const PlanView plan{p.plan};
  PlanEntry entry;
  entry.cta = cta;
  entry.first_request = p.plan[kPlanHeader + p.bs + 1 + cta];
  entry.tiles_per_cta = plan.tiles_per_cta();
  const int32_t total = plan.total_tiles();
  entry.line_begin = min_of(cta * entry.tiles_per_cta, total);
  entry.line_end = min_of(entry.line_begin + entry.tiles_per_cta, total);
  if (entry.first_request >= p.bs) entry.line_end = entry.line_begin;
  return entry;
}

// Appends the next units' segments to the table; units of requests that cannot be served are left
// out. All lanes of one warp call it. The first call starts from the plan entry's first request.
// Returns how many segments the table got in total; at the end of the line that stops to grow.
template <class Shared>
__device__ __forceinline__ int fill_segments(const AttnParams& p, Shared& shared, bool first_call) {
  const PlanEntry entry = shared.entry;
  const PlanView plan{p.plan};
  const int lane = threadIdx.x % 32;
  const int heads = p.num_kv_heads;
  int filled = first_call ? 0 : shared.filled;
  int unit = first_call ? entry.first_request * heads : shared.next_unit;
  bool more = true;
  int added = 0;
  while (more && added == 0) {
    // One request per lane, then one unit per lane: eight units are of at most eight requests.
    const int base_request = unit / heads;
    const int request_of_lane = min_of(base_request + lane, p.bs - 1);
    const int begin_of_lane = plan.tile_begin(request_of_lane);
    const int end_of_lane = plan.tile_begin(request_of_lane + 1);
    const KvWindow window_of_lane = p.table.window(request_of_lane);
    int base_head = unit - base_request * heads;
    if (first_call) {
      const int tiles = max_of((end_of_lane - begin_of_lane) / heads, 1);
      base_head = __shfl_sync(~0u, (entry.line_begin - begin_of_lane) / tiles, 0);
      unit += base_head;
      first_call = false;
    }
    const int source = min_of((base_head + lane) / heads, 31);
    const int head = (base_head + lane) % heads;
    const int request = base_request + source;
    const int begin = __shfl_sync(~0u, begin_of_lane, source);
    const int tiles = max_of((__shfl_sync(~0u, end_of_lane, source) - begin) / heads, 1);
    const int committed = __shfl_sync(~0u, static_cast<int>(window_of_lane.committed), source);
    const int width = __shfl_sync(~0u, window_of_lane.width, source);
    const auto row = __shfl_sync(~0u, reinterpret_cast<uint64_t>(window_of_lane.row), source);
    const auto window_slots =
        __shfl_sync(~0u, reinterpret_cast<uint64_t>(window_of_lane.window_slots), source);

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
      s.first_cta = unit_begin / entry.tiles_per_cta;
      s.split = static_cast<int16_t>(entry.cta - s.first_cta);
      s.num_splits =
          static_cast<int16_t>((unit_begin + tiles - 1) / entry.tiles_per_cta - s.first_cta + 1);
      s.unused = 0;
      const int place = filled + __popc(valid_lanes & ((1u << lane) - 1));
      shared.segments[place % kSegmentRing] = s;
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
                    ? shared.segments[cursor.segment % kSegmentRing].tile_begin
                    : kNotEntered;
}

template <class Shared>
__device__ __forceinline__ void advance(const Shared& shared, Cursor& cursor) {
  if (++cursor.tile >= shared.segments[cursor.segment % kSegmentRing].tile_end) {
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
