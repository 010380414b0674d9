// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a grid that starts before the one in front of it has ended.
#pragma once

namespace specfused::ptx {

// The next grid of the stream may start once every CTA has come here or has ended.
__device__ __forceinline__ void allow_next_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the grid in front has ended and what it wrote can be read. Does nothing in a plain launch.
__device__ __forceinline__ void wait_for_previous_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace specfused::ptx
