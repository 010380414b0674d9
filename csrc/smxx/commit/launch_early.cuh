// SPDX-License-Identifier: Apache-2.0
// A launch that starts while the launch in front of it ends.
#pragma once

#include <cuda_runtime.h>

#include "../device.cuh"

namespace specfused::smxx {

// Every CTA of the kernel must call ptx::wait_for_previous_grid() before it reads what the launch
// in front writes. That launch must be one of ours: what it waited for may be read at once. Devices
// before sm_90 start the kernel as any other.
template <class... Params, class... Args>
cudaError_t launch_early(void (*kernel)(Params...), unsigned grid, unsigned threads,
                         cudaStream_t stream, const Args&... args) {
  int device;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = can_overlap_launches(device) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

}  // namespace specfused::smxx
