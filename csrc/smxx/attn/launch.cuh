// SPDX-License-Identifier: Apache-2.0
// Host side of an attention launch, the same for every kernel.
#pragma once

#include <atomic>

#include "../device.cuh"
#include "traits.cuh"

namespace specfused::smxx {

template <class Kernel>
int launch_attention(Kernel kernel, std::atomic<int>* smem_set, const AttnParams& p,
                     const AttnConfig& config, int device, int threads, void* stream) {
  const cudaError_t error =
      allow_smem(reinterpret_cast<const void*>(kernel), device, config.smem_bytes, smem_set);
  if (error != cudaSuccess) return error;
  const int64_t element_bytes = dtype_bytes(p.dtype);
  const int64_t slot_bytes = max_of(p.stride_k_slot, p.stride_v_slot) * element_bytes;
  if (min_of(p.stride_k_slot, p.stride_v_slot) < 0 || slot_bytes > UINT32_MAX) {
    return cudaErrorInvalidValue;
  }
  AttnLaunch launch;
  launch.fold = config.fold;
  launch.num_slots = static_cast<uint32_t>(min_of<int64_t>(p.table.num_slots, INT32_MAX));
  launch.k_slot_bytes = static_cast<uint32_t>(p.stride_k_slot * element_bytes);
  launch.v_slot_bytes = static_cast<uint32_t>(p.stride_v_slot * element_bytes);
  // Row tiles of one plan entry are neighbours, so that they share KV in L2.
  const dim3 grid(config.num_row_tiles, ceil_div(p.num_ctas, config.fold));
  launch.stages = config.stages;
  launch.group = p.num_q_heads / p.num_kv_heads;
  launch.group_inverse = ceil_div(1 << 16, launch.group);
  launch.rows = p.num_rows * launch.group;
  launch.scale_log2 = p.sm_scale * 1.4426950408889634f;
  // The launch overlaps the end of the one before it, see wait_for_previous_launch.
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t how{};
  how.gridDim = grid;
  how.blockDim = dim3(threads);
  how.dynamicSmemBytes = config.smem_bytes;
  how.stream = static_cast<cudaStream_t>(stream);
  how.attrs = &overlap;
  how.numAttrs = can_overlap_launches(device) ? 1 : 0;
  return cudaLaunchKernelEx(&how, kernel, p, launch);
}

}  // namespace specfused::smxx
