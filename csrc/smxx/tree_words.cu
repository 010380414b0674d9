// SPDX-License-Identifier: Apache-2.0
// Tree words from links or from a boolean mask; draft_tree.h says what they mean.
//
// One CTA per request. Links: loaded together, then one thread builds the words in shared memory
// (each needs its parent's). Mask: one warp per row, a ballot per 32 cells.
#include <cuda_runtime.h>

#include "../launch.h"

namespace specfused::smxx {
namespace {

constexpr int kLinkThreads = kMaxWindow;
constexpr int kMaskThreads = 256;

__global__ __launch_bounds__(kLinkThreads) void words_from_links_kernel(const int64_t* next_token,
                                                                        const int64_t* next_sibling,
                                                                        int32_t width,
                                                                        int64_t* words) {
  __shared__ int64_t child[kMaxWindow];
  __shared__ int64_t sibling[kMaxWindow];
  __shared__ TreeWord word[kMaxWindow];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * width;
  const int node = threadIdx.x;
  if (node < width) {
    child[node] = next_token[first + node];
    sibling[node] = next_sibling[first + node];
  }
  __syncthreads();
  if (node == 0) words_from_links(child, sibling, width, word);
  __syncthreads();
  if (node < width) words[first + node] = static_cast<int64_t>(word[node]);
}

// Sum of the committed lengths of the requests before this CTA's.
__device__ int64_t committed_before(const int64_t* committed) {
  __shared__ int64_t warp_sums[kMaskThreads / 32];
  int64_t sum = 0;
  for (int r = threadIdx.x; r < static_cast<int>(blockIdx.x); r += kMaskThreads) {
    sum += committed[r];
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int64_t part : warp_sums) sum += part;
  return sum;
}

__global__ __launch_bounds__(kMaskThreads) void words_from_mask_kernel(const uint8_t* mask,
                                                                       int64_t mask_numel,
                                                                       const int64_t* committed,
                                                                       int32_t width,
                                                                       int64_t* words) {
  const int64_t request = blockIdx.x;
  const int64_t before = committed == nullptr ? 0 : committed_before(committed);
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < width; row += kMaskThreads / 32) {
    const int64_t at = committed == nullptr
                           ? qlen_only_offset(request, row, width)
                           : full_mask_offset(before, committed[request], request, row, width);
    // A cell outside the mask (a batch padded beyond it) is false.
    auto cell = [&](int column) {
      return column < width && at >= 0 && at < mask_numel - column && mask[at + column] != 0;
    };
    const uint32_t low = __ballot_sync(~0u, cell(lane));
    const uint32_t high = __ballot_sync(~0u, cell(lane + 32));
    if (lane == 0) {
      words[request * width + row] = static_cast<int64_t>(TreeWord{high} << 32 | low);
    }
  }
}

}  // namespace

int run_tree_words_from_links(const int64_t* next_token, const int64_t* next_sibling, int32_t bs,
                              int32_t width, int64_t* words, void* stream) {
  if (width < 1 || width > kMaxWindow) return cudaErrorInvalidValue;
  if (bs <= 0) return cudaSuccess;
  words_from_links_kernel<<<bs, kLinkThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      next_token, next_sibling, width, words);
  return cudaGetLastError();
}

int run_tree_words_from_mask(const uint8_t* mask, int64_t mask_numel, const int64_t* committed,
                             int32_t bs, int32_t width, int64_t* words, void* stream) {
  if (width < 1 || width > kMaxWindow) return cudaErrorInvalidValue;
  if (bs <= 0) return cudaSuccess;
  words_from_mask_kernel<<<bs, kMaskThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      mask, mask_numel, committed, width, words);
  return cudaGetLastError();
}

}  // namespace specfused::smxx
