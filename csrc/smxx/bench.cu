// SPDX-License-Identifier: Apache-2.0
// Yardsticks for benchmarks: how fast this GPU reads, and what an empty launch costs.
//
// Reading: persistent CTAs, 16-byte loads past L1, kInFlight per thread: 8 x 16 B x 1024 threads =
// 128 KiB in flight per SM. The XOR of everything goes to the sink if it has an unlikely value, so
// that no load can be left out and no store is paid for.
#include <cuda_runtime.h>

#include "../launch.h"
#include "device.cuh"

namespace specfused::smxx {
namespace {

constexpr int kThreads = 512;
constexpr int kCtasPerSm = 2;
constexpr int kInFlight = 8;

__device__ __forceinline__ int4 load_streaming(const int4* from) {
  int4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

__device__ __forceinline__ int fold(const int4& x) { return x.x ^ x.y ^ x.z ^ x.w; }

__device__ __forceinline__ void sink_if_unlikely(int folded, void* sink) {
  if (folded == 0x5eedf00d) *static_cast<int*>(sink) = folded;
}

__global__ __launch_bounds__(kThreads) void read_kernel(const int4* src, int64_t vectors,
                                                        void* sink) {
  int folded = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kInFlight;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kInFlight + threadIdx.x;
  for (int64_t at = first; at < vectors; at += step) {
    int4 x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t place = at + i * kThreads;
      x[i] = place < vectors ? load_streaming(src + place) : make_int4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) folded ^= fold(x[i]);
  }
  sink_if_unlikely(folded, sink);
}

// A warp reads K and V rows of kInFlight / 2 slots at a time.
__global__ __launch_bounds__(kThreads) void read_rows_kernel(const char* k, const char* v,
                                                             const int32_t* slots, int64_t n,
                                                             int64_t row_bytes, void* sink) {
  constexpr int kRows = kInFlight / 2;
  int folded = 0;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kThreads / 32;
  const int lane = threadIdx.x % 32;
  for (int64_t first = warp * kRows; first < n; first += warps * kRows) {
    int64_t offset[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      offset[i] = first + i < n ? slots[first + i] * row_bytes : -1;
    }
    for (int64_t at = lane * 16; at < row_bytes; at += 32 * 16) {
      int4 x[kInFlight];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t from = max_of<int64_t>(offset[i], 0) + at;
        x[2 * i] = load_streaming(reinterpret_cast<const int4*>(k + from));
        x[2 * i + 1] = load_streaming(reinterpret_cast<const int4*>(v + from));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) folded ^= fold(x[i]);
    }
  }
  sink_if_unlikely(folded, sink);
}

__global__ void empty_kernel() {}

}  // namespace

int run_bench_read(const void* src, int64_t bytes, void* sink, void* stream) {
  int device;
  AttnDevice limits;
  const cudaError_t error = current_device_limits(&device, &limits);
  if (error != cudaSuccess) return error;
  read_kernel<<<limits.sm_count * kCtasPerSm, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const int4*>(src), bytes / 16, sink);
  return cudaGetLastError();
}

int run_bench_read_rows(const void* k, const void* v, const int32_t* slots, int64_t n,
                        int64_t row_bytes, void* sink, void* stream) {
  int device;
  AttnDevice limits;
  const cudaError_t error = current_device_limits(&device, &limits);
  if (error != cudaSuccess) return error;
  if (row_bytes % 16 != 0) return cudaErrorInvalidValue;
  read_rows_kernel<<<limits.sm_count * kCtasPerSm, kThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(
      static_cast<const char*>(k), static_cast<const char*>(v), slots, n, row_bytes, sink);
  return cudaGetLastError();
}

int run_bench_empty(void* stream) {
  empty_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>();
  return cudaGetLastError();
}

}  // namespace specfused::smxx
