// SPDX-License-Identifier: Apache-2.0
// The split plan on the device: the integers of make_plan in plan.h.
//
// One CTA: an inclusive scan of the requests' tiles, kPlanThreads requests at a time, then one
// binary search per plan entry.
#include <cuda_runtime.h>

#include "../launch.h"

namespace specfused::smxx {
namespace {

constexpr int kPlanThreads = 1024;

// Inclusive scan over the CTA. Ends behind a barrier.
__device__ int32_t block_scan(int32_t value, int32_t* warp_sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += below;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int32_t sum = warp_sums[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    warp_sums[lane] = sum;
  }
  __syncthreads();
  if (warp > 0) value += warp_sums[warp - 1];
  return value;
}

__global__ __launch_bounds__(kPlanThreads) void plan_kernel(const int64_t* seq_lens,
                                                            int64_t seq_lens_offset, int32_t bs,
                                                            int32_t num_kv_heads, int32_t num_ctas,
                                                            int32_t* plan) {
  __shared__ int32_t warp_sums[32];
  int32_t* begin = plan + kPlanHeader;
  int32_t total = 0;
  if (threadIdx.x == 0) begin[0] = 0;
  for (int32_t first = 0; first < bs; first += kPlanThreads) {
    const int32_t r = first + threadIdx.x;
    const int32_t tiles =
        r < bs ? num_kv_heads * num_tiles(committed_length(seq_lens[r], seq_lens_offset)) : 0;
    const int32_t end = total + block_scan(tiles, warp_sums);
    if (r < bs) begin[r + 1] = end;
    total += warp_sums[31];
    __syncthreads();  // before the next round overwrites warp_sums
  }
  const int32_t per_cta = max_of(ceil_div(total, num_ctas), kMinTilesPerCta);
  if (threadIdx.x == 0) {
    plan[0] = total;
    plan[1] = per_cta;
    plan[2] = bs;
    plan[3] = num_kv_heads;
  }
  for (int32_t cta = threadIdx.x; cta < num_ctas; cta += kPlanThreads) {
    const int64_t line = int64_t{cta} * per_cta;
    int32_t low = 0;  // requests before it end at or before `line`
    int32_t high = bs;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (begin[middle + 1] <= line) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    begin[bs + 1 + cta] = low;
  }
}

}  // namespace

int run_plan(const int64_t* seq_lens, int64_t seq_lens_offset, int32_t bs, int32_t num_kv_heads,
             int32_t num_ctas, int32_t* plan, void* stream) {
  if (num_ctas <= 0) return cudaErrorInvalidValue;
  plan_kernel<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      seq_lens, seq_lens_offset, bs, num_kv_heads, num_ctas, plan);
  return cudaGetLastError();
}

}  // namespace specfused::smxx
