// SPDX-License-Identifier: Apache-2.0
// Spec mode: num_rows rows per request, each with its tree word. decode.cuh is the non-spec mode.
//
// One CTA: the KV tiles of one plan entry for one tile of packed rows (see traits.cuh for GEMMs,
// warps and shared memory). grid = (row tiles, plan entries).
#pragma once

#include "kernel.cuh"

namespace specfused::smxx {

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kMinCtasPerSm) void verify_attn_kernel(
    const __grid_constant__ AttnParams p, const __grid_constant__ AttnLaunch launch) {
  attend_plan_entry<Traits, VerifyRows>(p, launch);
}

template <class Traits>
int launch_verify(const AttnParams& p, const AttnConfig& config, int device, void* stream) {
  static std::atomic<int> smem_set[kMaxDevices];
  return launch_attention(verify_attn_kernel<Traits>, smem_set, p, config, device, Traits::kThreads,
                          stream);
}

template <class Element, int kHeadDim>
int run_verify(const AttnParams& p, const AttnConfig& config, int device, void* stream) {
  switch (config.row_tile) {
    case 16:
      return launch_verify<AttnTraits<Element, kHeadDim, 16>>(p, config, device, stream);
    case 32:
      return launch_verify<AttnTraits<Element, kHeadDim, 32>>(p, config, device, stream);
    case 64:
      return launch_verify<AttnTraits<Element, kHeadDim, 64>>(p, config, device, stream);
    case 128:
      if constexpr (kHeadDim <= 128) {
        return launch_verify<AttnTraits<Element, kHeadDim, 128>>(p, config, device, stream);
      }
  }
  return cudaErrorInvalidValue;
}

}  // namespace specfused::smxx
