// SPDX-License-Identifier: Apache-2.0
// From the partial results of a unit to its result: the rows of each row tile are added up over all
// splits, in split order, by CTAs that have nothing else left to do.
//
// A CTA has parts of at most two units, those that cross a border of its plan entry: first of one
// that another CTA begins, last of one that it begins itself.
//
// Few splits: the CTA of split 0 comes to the unit last, as a rule, and closes it: it adds the
// other parts to what it still has in registers. The others announce theirs (arrive) when they are
// stored. If they do not come in a bounded time, split 0 becomes a part like them, and whoever
// arrives last adds up.
//
// Many splits: a CTA arrives and adds up when all of its tiles are done. One CTA alone reads about
// 64 bytes a cycle out of L2, so many rows are cut into shares. The owners of the shares are the
// last splits of the unit but its tail, whose CTAs go no further. They wait for the other splits if
// nearly all of these have started, and give up otherwise or after a bounded time, so nothing
// depends on which CTAs run at once. The owners that saw all CTAs arrive divide the shares given
// up; where none did, the last CTA to arrive adds up all.
//
// Nothing of the result depends on who does what.
#pragma once

#include "epilogue.cuh"

namespace specfused::smxx {

constexpr int kMaxShares = 32;

// Looks at the word before an owner gives up, each about 0.5 us.
constexpr int kMaxLooks = 100;

__device__ __forceinline__ int num_arrived(uint64_t word) { return static_cast<int>(word & 0xfff); }
__device__ __forceinline__ int num_started(uint64_t word) {
  return static_cast<int>(word >> 12 & 0xfff);
}
__device__ __forceinline__ int num_seen(uint64_t word) {
  return static_cast<int>(word >> 24 & 0xff);
}
__device__ __forceinline__ uint32_t gave_up(uint64_t word) {
  return static_cast<uint32_t>(word >> kGaveUpBit);
}

// How a thread goes over (row, split): kRows rows of kSplits splits are in flight at once. From the
// number of splits only, since the order of additions follows from it.
template <int kHeadDim>
struct CombineBatch {
  // Loads of a thread in flight; with three CTAs per SM, fewer registers are left.
  static constexpr int kLoads = kHeadDim == 64 ? 12 : 20;
  static constexpr int kSplitsOf4 = kLoads / 4;
  static constexpr int kSplitsOf2 = kLoads / 2;

  static __device__ __forceinline__ int rows(int splits) {
    return splits <= kSplitsOf4 ? 4 : splits <= kSplitsOf2 ? 2 : 1;
  }
};

struct CombineShares {
  int count;  // 1: the last CTA to arrive does it all and nobody waits
  int rows;   // of one share
};

template <class Traits>
__device__ __forceinline__ int rows_of_tile(const AttnLaunch& launch, int row_tile) {
  return min_of(Traits::kRowTile, launch.rows - row_tile * Traits::kRowTile);
}

// A pass: what the threads of a CTA add up with one row each in flight, times the rows of a batch.
template <class Traits>
__device__ __forceinline__ CombineShares combine_shares(int rows, int splits) {
  using Batch = CombineBatch<Traits::kHeadDim>;
  const int pass = Batch::rows(splits) * (Traits::kThreads * 4 / Traits::kHeadDim);
  const int most = min_of(splits - 1, kMaxShares);
  // Few splits are closed, as a rule. Waiting costs as much as one pass of one batch.
  if (splits <= kMostClosed) return {1, rows};
  if (rows * ceil_div(splits, Batch::kLoads) <= 2 * pass || most < 2) return {1, rows};
  const int passes = ceil_div(ceil_div(rows, pass), most);
  return {ceil_div(rows, passes * pass), passes * pass};
}

// Adds up `rows` rows from packed row `first_row` on.
template <class Traits, class Rows, int kRows, int kSplits>
__device__ __forceinline__ void combine_rows(const RowSink<Traits, Rows>& sink,
                                             const Partials& partials, int first_row, int rows) {
  constexpr int kDim = Traits::kHeadDim;
  constexpr int kRowsOfCta = Traits::kThreads * 4 / kDim;
  const SegmentEntry& s = sink.segment;
  const int splits = s.num_splits;
  const int thread = ptx::thread_index_here();
  const int d = thread % (kDim / 4) * 4;
  // Parts of splits 1, 2, ... follow each other; that of split 0 is elsewhere. All fits into 32
  // bits, see kAttnMaxCtas and kMaxRowsPerKvHead.
  const int stride = 2 * static_cast<int>(partials.rows);
  const int part0 = (2 * s.first_cta + 1) * static_cast<int>(partials.rows) + first_row;
  const int part1 = (s.first_cta + 1) * stride + first_row;
#pragma unroll 1
  for (int row = thread / (kDim / 4); row < rows; row += kRows * kRowsOfCta) {
    float4 o[kRows];
    float max[kRows];
    float sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      o[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      max[r] = -CUDART_INF_F;
      sum[r] = 0.0f;
    }
#pragma unroll 1
    for (int first = 0; first < splits; first += kSplits) {
      float4 x[kSplits][kRows];
      float2 stats[kSplits][kRows];
#pragma unroll
      for (int i = 0; i < kSplits; ++i) {
        const int part = i == 0 && first == 0 ? part0 : part1 + (first + i - 1) * stride;
        const bool valid = first + i < splits;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int at = part + min_of(row + r * kRowsOfCta, rows - 1);
          stats[i][r] = ptx::load_cg_if(valid, partials.stats + at, -CUDART_INF_F, 0.0f);
          x[i][r] = ptx::load_cg_if(
              valid, reinterpret_cast<const float4*>(partials.o + int64_t{at} * kDim + d));
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float before = max[r];
#pragma unroll
        for (int i = 0; i < kSplits; ++i) max[r] = fmaxf(max[r], stats[i][r].x);
        const float shift = max[r] == -CUDART_INF_F ? 0.0f : max[r];
        const float rescale = ptx::exp2_approx(before - shift);
        o[r] = scaled(o[r], rescale);
        sum[r] = __fmul_rn(sum[r], rescale);
        // Splits that do not exist add a zero of weight zero.
#pragma unroll
        for (int i = 0; i < kSplits; ++i) {
          const float f = ptx::exp2_approx(stats[i][r].x - shift);
          sum[r] = __fmaf_rn(stats[i][r].y, f, sum[r]);
          add_scaled(o[r], x[i][r], f);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * kRowsOfCta >= rows) break;
      const int packed = first_row + row + r * kRowsOfCta;
      *reinterpret_cast<uint2*>(sink.out_row(packed) + d) =
          pack4<Traits>(scaled(o[r], normaliser(sum[r])));
      if (d == 0) sink.put_lse(packed, max[r], sum[r]);
    }
  }
}

// One thread, behind a barrier after the CTA's stores of the part. Once only.
template <class Shared>
__device__ __forceinline__ void arrive(const AttnParams& p, Shared& shared, int i, int row_tile) {
  const SegmentEntry& s = shared.pending[i];
  if (s.num_splits == 0 || shared.seen[i] != 0) return;
  uint64_t* word = unit_word(p.workspace, s.first_cta, row_tile);
  shared.seen[i] = ptx::add_acq_rel(word, kArrived) + kArrived;
}

// When a CTA goes on to its second unit. Whoever is last adds up alone where there are no shares,
// so it should not be last for both of its units; with shares the time of an arrival would be lost.
template <class Traits, class Shared>
__device__ __forceinline__ void arrive_early(const AttnParams& p, const AttnLaunch& launch,
                                             Shared& shared, int row_tile) {
  const int rows = rows_of_tile<Traits>(launch, row_tile);
  if (combine_shares<Traits>(rows, shared.pending[0].num_splits).count == 1) {
    ptx::delay(0);
    arrive(p, shared, 0, row_tile);
  }
}

// Is it worth looking at the word again for parts that are not there?
__device__ __forceinline__ bool nearly_all_started(uint64_t word, int splits) {
  return 4 * num_started(word) >= 3 * splits;
}

// All threads of the math, behind the last tile of a segment: does this CTA close the unit? If so,
// nobody looks at the unit's word any more, and it is zero again. A CTA begins one unit at most
// that has more splits, so shared.closes is written once.
template <class Traits, class Shared>
__device__ __forceinline__ bool closes(const AttnParams& p, Shared& shared, const SegmentEntry& s,
                                       int row_tile) {
  if (s.split != 0 || s.num_splits == 1 || s.num_splits > kMostClosed) return false;
  if (threadIdx.x == 0) {
    uint64_t* word = unit_word(p.workspace, s.first_cta, row_tile);
    const int others = s.num_splits - 1;
    ptx::delay(s.num_splits);
    uint64_t seen = ptx::load_acquire(word);
    for (int look = 1;
         look < kMaxLooks && num_arrived(seen) != others && nearly_all_started(seen, s.num_splits);
         ++look) {
      ptx::delay(look);
      seen = ptx::load_acquire(word);
    }
    shared.closes = num_arrived(seen) == others;
    if (shared.closes) ptx::store_relaxed(word, 0);
  }
  Traits::sync();
  return __any_sync(~0u, shared.closes);  // the compiler now knows that lanes agree
}

// The share of a split, as a bit; 0: none.
__device__ __forceinline__ uint32_t owned_share(int split, int splits, int num_shares) {
  const int share = splits - 2 - split;
  return num_shares > 1 && share >= 0 && share < num_shares ? 1u << share : 0;
}

// An owner that arrived too early looks until all have arrived, or gives up. The word at the end.
__device__ __forceinline__ uint64_t wait_for_others(uint64_t* word, uint64_t seen, int splits,
                                                    uint32_t mine) {
  for (int look = 0;
       look < kMaxLooks && num_arrived(seen) != splits && nearly_all_started(seen, splits);
       ++look) {
    ptx::delay(look);
    seen = ptx::load_acquire(word);
  }
  // Each failure is the arrival or the giving up of another CTA, so there are few.
  while (num_arrived(seen) != splits) {
    ptx::delay(0);
    const uint64_t expected = seen;
    const uint64_t desired = expected | uint64_t{mine} << kGaveUpBit;
    seen = ptx::compare_and_swap(word, expected, desired);
    if (seen == expected) break;
  }
  return seen;
}

// The shares that a CTA adds up which owns `mine` and saw all CTAs arrive: its own, and its part of
// those given up. Nobody gives up any more, so all owners see the same. mine == 0: the last to
// arrive, which does all if there is no owner left.
__device__ __forceinline__ uint32_t shares_to_add_up(uint64_t seen, uint32_t mine, int num_shares) {
  const uint32_t all = num_shares == 32 ? ~0u : (1u << num_shares) - 1;
  uint32_t abandoned = gave_up(seen);
  const uint32_t owners = all & ~abandoned;
  if (mine == 0) return num_shares == 1 || owners == 0 ? all : 0;
  const int rank = __popc(owners & (mine - 1));
  const int num_owners = __popc(owners);
  uint32_t shares = mine;
  for (int i = 0; abandoned != 0; ++i, abandoned &= abandoned - 1) {
    if (i % num_owners == rank) shares |= abandoned & -abandoned;
  }
  return shares;
}

// All threads of the math, when all parts of the CTA are in the workspace. The barriers order all
// threads' stores before the release of an arrival, and all threads' loads behind its acquire.
template <class Traits, class Rows, class Shared>
__device__ __forceinline__ void combine(const AttnParams& p, const AttnLaunch& launch,
                                        Shared& shared, int row_tile) {
  using Batch = CombineBatch<Traits::kHeadDim>;
  const Partials partials(p.workspace, p, launch.rows);
  const int first_row = row_tile * Traits::kRowTile;
  const int rows = rows_of_tile<Traits>(launch, row_tile);

  ptx::delay(0);
  Traits::sync();
  ptx::delay(0);
  // By a warp each, before anything waits.
  if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < 2) arrive(p, shared, threadIdx.x / 32, row_tile);
  ptx::delay(0);
  Traits::sync();

#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const SegmentEntry& s = shared.pending[i];
    const int splits = s.num_splits;
    if (splits == 0) continue;
    uint64_t* word = unit_word(p.workspace, s.first_cta, row_tile);
    const CombineShares shares = combine_shares<Traits>(rows, splits);
    const uint32_t mine = owned_share(s.split, splits, shares.count);
    ptx::delay(i);
    uint64_t seen = shared.seen[i];
    if (num_arrived(seen) != splits) {
      if (mine == 0) continue;
      Traits::sync();  // all have read seen
      if (threadIdx.x == 0) shared.seen[i] = wait_for_others(word, seen, splits, mine);
      Traits::sync();
      ptx::delay(i);
      seen = shared.seen[i];
      if (num_arrived(seen) != splits) continue;
    }

    const uint32_t all = shares_to_add_up(seen, mine, shares.count);
    if (all == 0) continue;
    // Of the owners, the one that sees all others count themselves leaves the word at zero.
    const int num_owners = shares.count - __popc(gave_up(seen));
    ptx::delay(i);
    uint64_t before = 0;
    if (threadIdx.x == 0 && mine != 0) before = ptx::add_relaxed(word, kSeen);
    const RowSink<Traits, Rows> sink(p, launch, s, partials);
#pragma unroll 1
    for (uint32_t todo = all; todo != 0; todo &= todo - 1) {
      const int share = __ffs(todo) - 1;
      const int first = first_row + share * shares.rows;
      const int num = min_of(shares.rows, first_row + rows - first);
      ptx::delay(share);
      switch (Batch::rows(splits)) {
        case 4:
          combine_rows<Traits, Rows, 4, Batch::kSplitsOf4>(sink, partials, first, num);
          break;
        case 2:
          combine_rows<Traits, Rows, 2, Batch::kSplitsOf2>(sink, partials, first, num);
          break;
        default:
          combine_rows<Traits, Rows, 1, Batch::kLoads>(sink, partials, first, num);
      }
    }
    ptx::delay(i);
    if (threadIdx.x == 0 && (mine == 0 || num_seen(before) + 1 == num_owners)) {
      ptx::store_relaxed(word, 0);
    }
  }
}

}  // namespace specfused::smxx
