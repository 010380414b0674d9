// SPDX-License-Identifier: Apache-2.0
// Launches on the emulator, see launch.h.
#include "launch.h"

#include <algorithm>
#include <vector>

#include "copies.h"
#include "csrc/smxx/attn/traits.cuh"
#include "device.h"
#include "tensor.h"

namespace {

char* shared_array;

// All attention kernels have these parameters.
void call(const void* kernel, void** arguments) {
  using namespace specfused;
  using Kernel = void (*)(AttnParams, smxx::AttnLaunch);
  reinterpret_cast<Kernel>(const_cast<void*>(kernel))(
      *static_cast<AttnParams*>(arguments[0]), *static_cast<smxx::AttnLaunch*>(arguments[1]));
}

}  // namespace

void emulation::set_shared_array(char* shared) { shared_array = shared; }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  using namespace emulation;
  const int bytes = static_cast<int>(config->dynamicSmemBytes);
  if (bytes > kMaxSharedBytes) fail("shared memory of a CTA", bytes);
  std::vector<dim3> ctas;
  for (unsigned y = 0; y < config->gridDim.y; ++y) {
    for (unsigned x = 0; x < config->gridDim.x; ++x) ctas.emplace_back(x, y);
  }
  for (size_t i = ctas.size(); i > 1; --i) std::swap(ctas[i - 1], ctas[random_below(i)]);
  for (const dim3& cta : ctas) {
    block = cta;
    reset_shared_memory(shared_array, bytes);
    run_cta(static_cast<int>(config->blockDim.x), [&] { call(kernel, arguments); },
            {copy_engine, tensor_engine});
    expect_no_copies();
    expect_no_products();
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;  // no programmatic dependent launch
  return cudaSuccess;
}
