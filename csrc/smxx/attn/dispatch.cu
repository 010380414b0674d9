// SPDX-License-Identifier: Apache-2.0
// Entry points of attention: from params to the instantiation that serves them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../launch.h"
#include "../device.cuh"
#include "float32.cuh"

namespace specfused::sm90 {  // sm90/attn/instantiations/*.cu
template <class Element, int kHeadDim>
int run_verify(const AttnParams& p, const AttnConfig& config, int device, void* stream);
}  // namespace specfused::sm90

namespace specfused::smxx {

// instantiations/*.cu
template <class Element, int kHeadDim>
int run_verify(const AttnParams& p, const AttnConfig& config, int device, void* stream);
template <class Element, int kHeadDim>
int run_decode(const AttnParams& p, const AttnConfig& config, int device, void* stream);

namespace {

// f.template operator()<Element, kHeadDim>() would need C++20; two tags do the same.
template <int kValue>
struct Int {
  static constexpr int value = kValue;
};
template <class T>
struct Type {
  using type = T;
};

template <class F>
int with_head_dim(int head_dim, F&& f) {
  switch (head_dim) {
    case 64:
      return f(Int<64>{});
    case 128:
      return f(Int<128>{});
    case 256:
      return f(Int<256>{});
  }
  return cudaErrorInvalidValue;
}

template <class F>
int with_instantiation(const AttnParams& p, F&& f) {
  return with_head_dim(p.head_dim, [&](auto dim) {
    return p.dtype == DType::kBFloat16 ? f(Type<__nv_bfloat16>{}, dim) : f(Type<__half>{}, dim);
  });
}

// What the host can see is wrong. Wrong device data never faults, see WindowTable::window.
bool supported(const AttnParams& p) {
  return p.num_rows >= 1 && p.num_rows <= kMaxWindow && p.table.width >= 1 &&
         p.table.width <= kMaxWindow && p.num_kv_heads >= 1 && p.num_q_heads >= 1 &&
         p.num_q_heads % p.num_kv_heads == 0 &&
         p.num_q_heads / p.num_kv_heads <= kMaxRowsPerKvHead / kMaxWindow &&
         (p.dtype == DType::kFloat32 || (p.num_ctas >= 1 && p.num_ctas <= kAttnMaxCtas));
}

}  // namespace

int run_verify_attn(const AttnParams& p, void* stream) {
  if (p.bs <= 0) return cudaSuccess;
  if (!supported(p)) return cudaErrorInvalidValue;
  if (p.dtype == DType::kFloat32) return run_verify_float32(p, stream);
  int device;
  AttnDevice limits;
  const cudaError_t error = current_device_limits(&device, &limits);
  if (error != cudaSuccess) return error;
  const AttnConfig config =
      select_attn(p.num_rows * (p.num_q_heads / p.num_kv_heads), p.head_dim, limits);
  if (config.row_tile == 0) return cudaErrorInvalidValue;
  return with_instantiation(p, [&](auto element, auto dim) {
    using Element = typename decltype(element)::type;
    constexpr int kHeadDim = decltype(dim)::value;
#ifdef SPECFUSED_SM90
    if (config.kernel_class >= KernelClass::kWgmma) {
      return sm90::run_verify<Element, kHeadDim>(p, config, device, stream);
    }
#endif
    return run_verify<Element, kHeadDim>(p, config, device, stream);
  });
}

int run_decode_attn(const AttnParams& p, void* stream) {
  if (p.bs <= 0) return cudaSuccess;
  if (!supported(p) || p.num_rows != 1) return cudaErrorInvalidValue;
  if (p.dtype == DType::kFloat32) return run_decode_float32(p, stream);
  int device;
  AttnDevice limits;
  const cudaError_t error = current_device_limits(&device, &limits);
  if (error != cudaSuccess) return error;
  const AttnConfig config = select_attn(p.num_q_heads / p.num_kv_heads, p.head_dim, limits);
  if (config.row_tile == 0) return cudaErrorInvalidValue;
  return with_instantiation(p, [&](auto element, auto dim) {
    return run_decode<typename decltype(element)::type, decltype(dim)::value>(p, config, device,
                                                                              stream);
  });
}

}  // namespace specfused::smxx
