// SPDX-License-Identifier: Apache-2.0
// Non-spec mode: one row per request, which sees the committed rows and itself. verify.cuh is the
// spec mode.
//
// One CTA: the KV tiles of one plan entry for the heads of one group (see traits.cuh for GEMMs,
// warps and shared memory). grid = (1, plan entries).
#pragma once

#include "kernel.cuh"

namespace specfused::smxx {

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kMinCtasPerSm) void decode_attn_kernel(
    const __grid_constant__ AttnParams p, const __grid_constant__ AttnLaunch launch) {
  attend_plan_entry<Traits, DecodeRow>(p, launch);
}

template <class Traits>
int launch_decode(const AttnParams& p, const AttnConfig& config, int device, void* stream) {
  static std::atomic<int> smem_set[kMaxDevices];
  return launch_attention(decode_attn_kernel<Traits>, smem_set, p, config, device, Traits::kThreads,
                          stream);
}

template <class Element, int kHeadDim>
int run_decode(const AttnParams& p, const AttnConfig& config, int device, void* stream) {
  return config.row_tile == 16
             ? launch_decode<AttnTraits<Element, kHeadDim, 16>>(p, config, device, stream)
             : static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace specfused::smxx
