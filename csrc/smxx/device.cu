// SPDX-License-Identifier: Apache-2.0
// Questions about the current device that callers ask before a launch.
#include "../launch.h"
#include "../ptx/delay.cuh"
#include "device.cuh"

namespace specfused::smxx {

int attn_num_ctas(int head_dim, int* num_ctas) {
  int device;
  AttnDevice limits;
  const cudaError_t error = current_device_limits(&device, &limits);
  if (error == cudaSuccess) *num_ctas = attn_plan_ctas(limits, head_dim);
  return error;
}

int attn_kernel_class(int rows_per_kv_head, int head_dim, int* kernel_class) {
  int device;
  AttnDevice limits;
  const cudaError_t error = current_device_limits(&device, &limits);
  if (error != cudaSuccess) return error;
  *kernel_class = static_cast<int>(select_attn(rows_per_kv_head, head_dim, limits).kernel_class);
  return cudaSuccess;
}

void set_launch_overlap(bool on) { overlap_wanted.store(on, std::memory_order_relaxed); }

int set_delay_seed(uint32_t seed) {
#ifdef SPECFUSED_RANDOM_DELAY
  for (const ptx::DelaySeed* s = ptx::DelaySeed::first; s != nullptr; s = s->next) {
    const cudaError_t error = cudaMemcpyToSymbol(s->symbol, &seed, sizeof seed);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
#else
  return seed == 0 ? cudaSuccess : cudaErrorNotSupported;
#endif
}

const char* error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace specfused::smxx
