// SPDX-License-Identifier: Apache-2.0
// From the partial results of a unit to its result: the rows of each row tile are added up over all
// splits, in split order, by CTAs that have nothing else left to do.
//
// One CTA alone reads about 64 bytes a cycle out of L2, so many rows are cut into shares. The
// owners of the shares are the last splits of the unit but its tail: a unit goes on behind the end
// of their plan entries, so this is the last that they do. They wait a little for the other splits;
// one that gives up says so, and the last CTA to arrive takes its share over. So nothing depends on
// which CTAs run at the same time, and nothing of the result on who adds up what.
#pragma once

#include "epilogue.cuh"

namespace specfused::smxx {

// The word of one unit and row tile: bits 0-15 CTAs that have arrived, 16-31 owners that have seen
// all of them arrive, 32-63 owners that gave up. The last one to use it leaves it at zero.
constexpr uint64_t kArrived = 1;
constexpr uint64_t kSeen = uint64_t{1} << 16;
constexpr int kGaveUpBit = 32;
constexpr int kMaxShares = 32;

// Looks at the word before an owner gives up; each takes about 0.7 us.
constexpr int kMaxLooks = 12;

__device__ __forceinline__ int num_arrived(uint64_t word) { return static_cast<int>(word & 0xffff); }
__device__ __forceinline__ int num_seen(uint64_t word) { return static_cast<int>(word >> 16 & 0xffff); }
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

// A pass: what the threads of a CTA add up with one row each in flight, times the rows of a batch.
template <class Traits>
__device__ __forceinline__ CombineShares combine_shares(int rows, int splits) {
  using Batch = CombineBatch<Traits::kHeadDim>;
  const int pass = Batch::rows(splits) * (Traits::kThreads * 4 / Traits::kHeadDim);
  const int most = min_of(splits - 1, kMaxShares);
  // Waiting costs as much as one pass of one batch.
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

// What thread 0 learns on arriving.
struct Arrival {
  uint32_t shares;  // to be added up by this CTA, as bits
  int num_owners;   // that see all CTAs arrive, if this CTA is one of them; else 0
};

// Counts an arrival, and waits if this CTA owns a share.
__device__ __forceinline__ Arrival arrive(uint64_t* word, int split, int splits, int num_shares) {
  uint64_t seen = ptx::add_acq_rel(word, kArrived);
  const bool last = num_arrived(seen) == splits - 1;
  const int owned = splits - 2 - split;  // share of this split, if there is one of that number
  if (num_shares == 1 || owned < 0 || owned >= num_shares) {
    if (!last) return {0, 0};
    if (num_shares == 1 || __popc(gave_up(seen)) == num_shares) ptx::store_relaxed(word, 0);
    return {num_shares == 1 ? 1 : gave_up(seen), 0};
  }
  const uint32_t mine = 1u << owned;
  if (last) return {mine | gave_up(seen), num_shares - __popc(gave_up(seen))};
  for (int look = 0; look < kMaxLooks && num_arrived(seen) != splits; ++look) {
    seen = ptx::load_acquire(word);
  }
  // Each failure is the arrival or the giving up of another CTA, so there are few.
  while (num_arrived(seen) != splits) {
    const uint64_t expected = seen;
    seen = ptx::compare_and_swap(word, expected, expected | uint64_t{mine} << kGaveUpBit);
    if (seen == expected) return {0, 0};
  }
  return {mine, num_shares - __popc(gave_up(seen))};
}

// After the partial results. The barrier before the arrival orders all threads' stores before its
// release, the one after it all threads' loads behind its acquire.
template <class Traits, class Rows, class Shared>
__device__ __forceinline__ void combine(Shared& shared, int row_tile,
                                        const RowSink<Traits, Rows>& sink) {
  using Batch = CombineBatch<Traits::kHeadDim>;
  const SegmentEntry& s = sink.segment;
  // Opaque to the compiler, which would otherwise compute addresses ahead of the main loop and keep
  // them in registers that it needs.
  const Partials partials(ptx::opaque(sink.p.workspace), sink.p, ptx::opaque(sink.launch.rows));
  const int first_row = row_tile * Traits::kRowTile;
  const int rows = min_of(Traits::kRowTile, sink.launch.rows - first_row);
  const CombineShares shares = combine_shares<Traits>(rows, s.num_splits);
  uint64_t* word = partials.counters + s.first_cta * kMaxRowTiles + row_tile;

  __syncthreads();
  Arrival arrival{0, 0};
  if (ptx::thread_index_here() == 0) {
    arrival = arrive(word, s.split, s.num_splits, shares.count);
    shared.shares = arrival.shares;
  }
  __syncthreads();
  uint64_t before = 0;
  if (arrival.num_owners > 0) before = ptx::add_relaxed(word, kSeen);

#pragma unroll 1
  for (uint32_t todo = shared.shares; todo != 0; todo &= todo - 1) {
    const int share = __ffs(todo) - 1;
    const int first = first_row + share * shares.rows;
    const int num = min_of(shares.rows, first_row + rows - first);
    switch (Batch::rows(s.num_splits)) {
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
  if (arrival.num_owners > 0 && num_seen(before) + 1 == arrival.num_owners) {
    ptx::store_relaxed(word, 0);
  }
}

}  // namespace specfused::smxx
