// SPDX-License-Identifier: Apache-2.0
// verify_attn of class wgmma: one CTA has the KV tiles of one plan entry for one tile of packed
// rows (see traits.cuh). grid = (row tiles, plan entries / fold). One row per request never needs
// this class.
#pragma once

#include "../../smxx/attn/launch.cuh"
#include "loader.cuh"
#include "math.cuh"

namespace specfused::sm90 {

template <class Traits>
__global__ __launch_bounds__(Traits::kCtaThreads, Traits::kMinCtasPerSm) void verify_attn_kernel(
    const __grid_constant__ AttnParams p, const __grid_constant__ smxx::AttnLaunch launch) {
  using Shared = SharedFront<Traits>;
  using Rows = smxx::VerifyRows;
  static_assert(sizeof(Shared) <= kWgmmaFixedBytes);
  // Q and ring first: their blocks must begin at multiples of 1024 bytes.
  extern __shared__ __align__(1024) char smem[];
  char* ring = smem + Traits::kQBytes;
  Shared& shared = *reinterpret_cast<Shared*>(ring + launch.stages * Traits::kStageBytes);
  const uint32_t ring_address = ptx::smem_address(ring);

  ptx::delay(0);
  ptx::let_next_launch_start();
  ptx::wait_for_previous_launch();
  ptx::delay(0);
  if (threadIdx.x < 32) {
    smxx::fill_segments(p, launch, shared, true);
  } else if (threadIdx.x == 32) {
#pragma unroll 1
    for (int i = 0; i < launch.stages; ++i) {
      for (HalfBarriers* half : {&shared.keys, &shared.values}) {
        ptx::barrier_init(ptx::smem_address(&half->full[i]), Traits::kLoadThreads + 1);
        ptx::barrier_init(ptx::smem_address(&half->empty[i]), Traits::kRowGroups);
      }
    }
  }
  __syncthreads();
  ptx::delay(0);
  if (shared.filled == 0) return;

  if (threadIdx.x >= Traits::kThreads) {
    if constexpr (Traits::kMoveRegisters) ptx::give_up_registers<Traits::kLoadRegisters>();
    Loader<Traits, Rows>{p, launch, shared}.run(ring_address);
  } else {
    if constexpr (Traits::kMoveRegisters) ptx::take_registers<Traits::kMathRegisters>();
    const int row_tile = blockIdx.x;
    Math<Traits, Rows>::run(p, launch, shared, row_tile * Traits::kRowTile, smem, ring_address);
    smxx::combine<Traits, Rows>(p, launch, shared, row_tile);
  }
}

template <class Traits>
int launch_verify(const AttnParams& p, const AttnConfig& config, int device, void* stream) {
  static std::atomic<int> smem_set[smxx::kMaxDevices];
  return smxx::launch_attention(verify_attn_kernel<Traits>, smem_set, p, config, device,
                                Traits::kCtaThreads, stream);
}

template <class Element, int kHeadDim>
int run_verify(const AttnParams& p, const AttnConfig& config, int device, void* stream) {
  switch (config.row_tile) {
    case 64:
      return launch_verify<WgmmaTraits<Element, kHeadDim, 64>>(p, config, device, stream);
    case 128:
      return launch_verify<WgmmaTraits<Element, kHeadDim, 128>>(p, config, device, stream);
    case 256:
      if constexpr (kHeadDim <= 128) {
        return launch_verify<WgmmaTraits<Element, kHeadDim, 256>>(p, config, device, stream);
      }
  }
  return cudaErrorInvalidValue;
}

}  // namespace specfused::sm90
