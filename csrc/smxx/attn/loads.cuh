// SPDX-License-Identifier: Apache-2.0
// Global memory -> shared memory and registers: slot indices, KV rows, new rows, queries.
#pragma once

#include "scheduler.cuh"

namespace specfused::smxx {

// Rows per step and what each may see: the only thing in which the two modes differ.
struct VerifyRows {
  static __device__ __forceinline__ int num_rows(const AttnParams& p) { return p.num_rows; }
  static __device__ __forceinline__ TreeWord word(const AttnParams& p, int request, int row) {
    if (p.tree_words == nullptr) return chain_word(row);
    return static_cast<TreeWord>(p.tree_words[request * p.stride_words + row]);
  }
};

struct DecodeRow {
  static __device__ __forceinline__ int num_rows(const AttnParams&) { return 1; }
  static __device__ __forceinline__ TreeWord word(const AttnParams&, int, int) {
    return kSingleNode;
  }
};

// Slots of one tile -> ring entry. A window column given by window_slots has 8 bytes, any other
// position 4 of the table row; load_tile knows which. Positions behind the window are left alone.
template <class Traits, class Shared>
__device__ __forceinline__ void load_slot_index(Shared& shared, const Cursor& at, int ring_entry) {
  const uint32_t token =
      ptx::opaque(static_cast<int>(Traits::load_thread()));  // see prepare_window
  if (token >= kTile) return;
  const SegmentEntry& s = shared.segments[at.segment % Shared::kSegments];
  const int position = at.tile * kTile + token;
  if (position >= s.committed + s.width) return;
  const uint32_t dst = ptx::smem_address(&shared.slot_index[ring_entry][token]);
  if (position >= s.committed && s.window_slots != nullptr) {
    ptx::cp_async_8(dst, s.window_slots + (position - s.committed));
  } else {
    ptx::cp_async_4(dst, s.row + position);
  }
}

enum Halves { kKeys = 1, kValues = 2, kBoth = 3 };  // of a stage

// K and V rows of one tile -> stage. Rows that no row of the step may see are zeros, so that they
// can meet a P of 0 whatever their memory holds; they are not read. A slot outside the pool is 0.
// KV streams through L2 and leaves parts, queries and results there.
template <class Traits, int kHalves, class Shared>
__device__ __forceinline__ void load_tile(const AttnParams& p, const AttnLaunch& launch,
                                          Shared& shared, const Cursor& at, int ring_entry,
                                          uint32_t stage) {
  using Element = typename Traits::Element;
  constexpr int kPasses = kTile / Traits::kRowsPerPass;
  const SegmentEntry& s = shared.segments[at.segment % Shared::kSegments];
  const uint32_t thread =
      ptx::opaque(static_cast<int>(Traits::load_thread()));  // see prepare_window
  const int chunk = thread % Traits::kChunks;
  const int first_row = thread / Traits::kChunks;
  const auto* k = static_cast<const Element*>(p.k_cache) + s.kv_head * p.stride_k_head + chunk * 8;
  const auto* v = static_cast<const Element*>(p.v_cache) + s.kv_head * p.stride_v_head + chunk * 8;
  const int64_t* index = &shared.slot_index[ring_entry][first_row];
  const uint32_t dst = stage + Traits::kv_offset(first_row, chunk);
  const uint64_t once = ptx::evict_first_policy();
  auto copy = [&](int pass, uint32_t slot, bool valid) {
    const int row = pass * Traits::kRowsPerPass;
    // The rows of a thread have one swizzle unless a pass has less than eight.
    const uint32_t to = Traits::kRowsPerPass % 8 == 0
                            ? dst + row * Traits::kTileRowBytes
                            : stage + Traits::kv_offset(first_row + row, chunk);
    if constexpr (kHalves & kKeys) {
      ptx::cp_async_16(to, ptx::row_address(k, slot, launch.k_slot_bytes), valid, once);
    }
    if constexpr (kHalves & kValues) {
      ptx::cp_async_16(to + Traits::kHalfStageBytes, ptx::row_address(v, slot, launch.v_slot_bytes),
                       valid, once);
    }
  };

  const int window = s.committed - at.tile * kTile;  // place of window column 0 in the tile
  if (window >= kTile) {
    // Indices of a batch are read ahead of the copies that need them.
    constexpr int kBatch = kPasses < 4 ? kPasses : 4;
#pragma unroll
    for (int first = 0; first < kPasses; first += kBatch) {
      uint32_t slot[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        slot[i] = *reinterpret_cast<const uint32_t*>(index + (first + i) * Traits::kRowsPerPass);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        copy(first + i, slot[i] < launch.num_slots ? slot[i] : 0, true);
      }
    }
    return;
  }
  const bool wide_index = s.window_slots != nullptr;
  const TreeWord used = s.used;
#pragma unroll 2
  for (int pass = 0; pass < kPasses; ++pass) {
    const int column = first_row + pass * Traits::kRowsPerPass - window;
    // The index of a row that is not valid may be anything.
    const int64_t wide = index[pass * Traits::kRowsPerPass];
    const bool valid = column < 0 || (column < kMaxWindow && sees(used, max_of(column, 0)));
    const int64_t slot = column >= 0 && wide_index ? wide : static_cast<int32_t>(wide);
    const bool in_pool = static_cast<uint64_t>(slot) < launch.num_slots;
    copy(pass, valid && in_pool ? static_cast<uint32_t>(slot) : 0, valid);
  }
}

// On entering a tail segment, at least one barrier before its first KV load: stores the step's new
// rows of this KV head, and finds the window columns in use. The CTAs of other row tiles store the
// same bytes, and each reads the window only behind a barrier after its own stores, so each sees
// them; no CTA without the tail reads the window.
template <class Traits, class Rows, class Shared>
__device__ __forceinline__ void prepare_window(const AttnParams& p, Shared& shared, int segment) {
  SegmentEntry& s = shared.segments[segment % Shared::kSegments];
  // Opaque: nothing that follows from them stays in registers through the main loop.
  const int num_rows = ptx::opaque(Rows::num_rows(p));
  const int thread = ptx::opaque(static_cast<int>(Traits::load_thread()));
  ptx::delay(segment);
  if (p.k_new != nullptr) {
    using Element = typename Traits::Element;
    const int64_t first = static_cast<int64_t>(s.request) * num_rows;
    const int kv_head = s.kv_head;
#pragma unroll 2
    for (int i = thread; i < num_rows * Traits::kChunks; i += Traits::kLoadThreads) {
      const int64_t row = first + i / Traits::kChunks;
      const int in_row = i % Traits::kChunks * 8;
      const int64_t slot = p.out_cache_loc[row * p.stride_out_cache_loc];
      if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(p.table.num_slots)) continue;
      const int4 k = *reinterpret_cast<const int4*>(static_cast<const Element*>(p.k_new) +
                                                    row * p.stride_k_new_row +
                                                    kv_head * p.stride_k_new_head + in_row);
      const int4 v = *reinterpret_cast<const int4*>(static_cast<const Element*>(p.v_new) +
                                                    row * p.stride_v_new_row +
                                                    kv_head * p.stride_v_new_head + in_row);
      *reinterpret_cast<int4*>(static_cast<Element*>(p.k_cache) + slot * p.stride_k_slot +
                               kv_head * p.stride_k_head + in_row) = k;
      *reinterpret_cast<int4*>(static_cast<Element*>(p.v_cache) + slot * p.stride_v_slot +
                               kv_head * p.stride_v_head + in_row) = v;
    }
  }
  ptx::delay(segment);
  // Not a warp that loads slot indices.
  if (Traits::load_thread() / 32 == kTile / 32) {
    TreeWord used = 0;
    for (int row = threadIdx.x % 32; row < num_rows; row += 32) {
      used |= Rows::word(p, s.request, row);
    }
    const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(used));
    const uint32_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(used >> 32));
    if (threadIdx.x % 32 == 0) {
      const TreeWord in_width = s.width >= kMaxWindow ? ~TreeWord{0} : node_bit(s.width) - 1;
      s.used = (TreeWord{high} << 32 | low) & in_width;
    }
  }
}

// Where a packed row of a unit is.
struct RowPlace {
  int64_t row;  // of q and out
  int head;     // query head
};

template <class Rows>
__device__ __forceinline__ RowPlace row_place(const AttnParams& p, const AttnLaunch& launch,
                                              const SegmentEntry& s, int packed_row) {
  const int step_row = row_of(launch, packed_row);
  return {static_cast<int64_t>(s.request) * Rows::num_rows(p) + step_row,
          s.kv_head * launch.group + packed_row - step_row * launch.group};
}

// Query rows -> the A fragments of a warp with one row block. Rows behind the last are zeros.
template <class Traits, class Rows>
__device__ __forceinline__ void load_q_fragments(const AttnParams& p, const AttnLaunch& launch,
                                                 const SegmentEntry& s, int first_row,
                                                 uint32_t (&q)[Traits::kHeadDim / 16][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int packed = first_row + lane / 4 + 8 * half;
    const bool valid = packed < launch.rows;
    const RowPlace place = row_place<Rows>(p, launch, s, valid ? packed : 0);
    const auto* from = static_cast<const typename Traits::Element*>(p.q) +
                       place.row * p.stride_q_row + place.head * p.stride_q_head + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < Traits::kHeadDim / 16; ++k) {
      q[k][half] = valid ? *reinterpret_cast<const uint32_t*>(from + k * 16) : 0;
      q[k][half + 2] = valid ? *reinterpret_cast<const uint32_t*>(from + k * 16 + 8) : 0;
    }
  }
}

// The same rows -> shared memory, swizzled, for warps that read them per tile. The warps that share
// rows load them together: no other warp reads what they write, and in class few, finish_few has
// barriers behind their last reads. A barrier must follow, and with kQByCopy the end of the copies
// before it.
template <class Traits, class Rows>
__device__ __forceinline__ void load_q_shared(const AttnParams& p, const AttnLaunch& launch,
                                              const SegmentEntry& s, int first_row, char* q) {
  constexpr int kThreads = 32 * Traits::kTokenGroups;
  constexpr int kRows = 16 * Traits::kRowBlocks;
  const int row_group = threadIdx.x / kThreads;
#pragma unroll 4
  for (int i = threadIdx.x % kThreads; i < kRows * Traits::kChunks; i += kThreads) {
    const int row = row_group * kRows + i / Traits::kChunks;
    const int chunk = i % Traits::kChunks;
    const bool valid = first_row + row < launch.rows;
    const RowPlace place = row_place<Rows>(p, launch, s, valid ? first_row + row : 0);
    const auto* from = static_cast<const typename Traits::Element*>(p.q) +
                       place.row * p.stride_q_row + place.head * p.stride_q_head + chunk * 8;
    char* to = q + Traits::q_offset(row, chunk);
    if constexpr (Traits::kQByCopy) {
      ptx::cp_async_16(ptx::smem_address(to), from, valid);
    } else {
      *reinterpret_cast<int4*>(to) =
          valid ? *reinterpret_cast<const int4*>(from) : make_int4(0, 0, 0, 0);
    }
  }
}

}  // namespace specfused::smxx
