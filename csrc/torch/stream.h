// SPDX-License-Identifier: Apache-2.0
// The current CUDA stream, without linking to a library that only CUDA builds of torch have.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "checks.h"

// Weak: null in a CPU build of torch, resolved by libtorch_cuda elsewhere.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace specfused::ops {

// Makes the tensor's device current for a launch and names its stream.
class CudaScope {
 public:
  CudaScope(const char* op, const Tensor& t) : guard_(t.get_device_index()) {
    if (aoti_torch_get_current_cuda_stream == nullptr) {
      fail(op, ": torch must be a CUDA build, got one without CUDA");
    }
    if (aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream_) != 0) {
      fail(op, ": no current CUDA stream on device ", t.get_device_index());
    }
  }
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace specfused::ops
