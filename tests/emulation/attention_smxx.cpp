// SPDX-License-Identifier: Apache-2.0
// The portable kernels (csrc/smxx/attn) for ELEMENT, HEAD_DIM and ROW_TILE.
#include "csrc/smxx/attn/decode.cuh"
#include "csrc/smxx/attn/verify.cuh"
#include "emulation/attention.h"
#include "emulation/launch.h"

namespace specfused::smxx {
alignas(1024) char smem[emulation::kMaxSharedBytes];
}  // namespace specfused::smxx

namespace emulation {

using namespace specfused;
using Traits = smxx::AttnTraits<ELEMENT, HEAD_DIM, ROW_TILE>;

int launch_attention(const AttnParams& p, int stages) {
  const int rows = p.num_rows * (p.num_q_heads / p.num_kv_heads);
  const AttnConfig config{KernelClass::kMany,
                          ROW_TILE,
                          ceil_div(rows, ROW_TILE),
                          stages,
                          1,
                          attn_smem_bytes(ROW_TILE, HEAD_DIM, stages),
                          1};
  set_shared_array(smxx::smem);
  if constexpr (ROW_TILE == 16) {
    if (p.num_rows == 1) return smxx::launch_decode<Traits>(p, config, 0, nullptr);
  }
  return smxx::launch_verify<Traits>(p, config, 0, nullptr);
}

}  // namespace emulation
