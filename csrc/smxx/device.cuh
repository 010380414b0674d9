// SPDX-License-Identifier: Apache-2.0
// What launches need to know of the current device, read once per device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "../attn_select.h"

namespace specfused::smxx {

constexpr int kMaxDevices = 64;

// Wgmma is for capability 9.0 alone. SPECFUSED_WGMMA=0: the portable kernels there, too.
inline cudaError_t has_wgmma(int device, bool* answer) {
  *answer = false;
#ifdef SPECFUSED_SM90
  const char* wanted = std::getenv("SPECFUSED_WGMMA");
  if (wanted != nullptr && std::strcmp(wanted, "0") == 0) return cudaSuccess;
  int major = 0;
  int minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) return error;
  *answer = major == 9 && minor == 0;
#else
  static_cast<void>(device);
#endif
  return cudaSuccess;
}

inline cudaError_t current_device_limits(int* device, AttnDevice* limits) {
  static std::atomic<bool> known[kMaxDevices];
  static AttnDevice cache[kMaxDevices];
  cudaError_t error = cudaGetDevice(device);
  if (error != cudaSuccess) return error;
  if (*device < 0 || *device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (!known[*device].load(std::memory_order_acquire)) {
    AttnDevice read;
    error = cudaDeviceGetAttribute(&read.sm_count, cudaDevAttrMultiProcessorCount, *device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&read.smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                   *device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&read.smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                   *device);
    if (error != cudaSuccess) return error;
    error = has_wgmma(*device, &read.wgmma);
    if (error != cudaSuccess) return error;
    cache[*device] = read;  // threads that race here write the same values
    known[*device].store(true, std::memory_order_release);
  }
  *limits = cache[*device];
  return cudaSuccess;
}

// False: the bench measures what programmatic dependent launch is worth.
inline std::atomic<bool> overlap_wanted{true};

// Does the device know programmatic dependent launch (sm_90 on), and is it wanted?
inline bool can_overlap_launches(int device) {
  if (!overlap_wanted.load(std::memory_order_relaxed)) return false;
  if (device >= kMaxDevices) return false;
  static std::atomic<int> known[kMaxDevices];  // 0: not asked yet, 1: no, 2: yes
  int answer = known[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    int major = 0;
    const cudaError_t error =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    answer = error == cudaSuccess && major >= 9 ? 2 : 1;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

// Lets a kernel use up to `bytes` of dynamic shared memory on `device`. `done` is the kernel's own
// static: the largest size set so far per device.
inline cudaError_t allow_smem(const void* kernel, int device, int bytes, std::atomic<int>* done) {
  if (done[device].load(std::memory_order_acquire) >= bytes) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done[device].store(bytes, std::memory_order_release);
  return error;
}

}  // namespace specfused::smxx
