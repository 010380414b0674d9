// SPDX-License-Identifier: Apache-2.0
// The wgmma kernel (csrc/sm90/attn) for ELEMENT, HEAD_DIM and ROW_TILE.
#include <cstddef>

#include "csrc/sm90/attn/verify.cuh"
#include "emulation/attention.h"
#include "emulation/copies.h"
#include "emulation/launch.h"

namespace specfused::sm90 {
alignas(1024) char smem[emulation::kMaxSharedBytes];
}  // namespace specfused::sm90

namespace emulation {

using namespace specfused;
using Traits = sm90::WgmmaTraits<ELEMENT, HEAD_DIM, ROW_TILE>;

int launch_attention(const AttnParams& p, int stages) {
  const int rows = p.num_rows * (p.num_q_heads / p.num_kv_heads);
  const AttnConfig config{KernelClass::kWgmma,
                          ROW_TILE,
                          ceil_div(rows, ROW_TILE),
                          stages,
                          1,
                          wgmma_smem_bytes(ROW_TILE, HEAD_DIM, stages),
                          ROW_TILE > 64 ? 2 : 1};
  // What the math has released is nobody's until the loaders fill it again.
  using Shared = sm90::SharedFront<Traits>;
  const uint32_t ring = Traits::kQBytes;
  const uint32_t shared = ring + stages * Traits::kStageBytes;
  for (int i = 0; i < stages; ++i) {
    const uint32_t empty = shared + offsetof(sm90::HalfBarriers, empty) + i * sizeof(uint64_t);
    const uint32_t stage = ring + i * Traits::kStageBytes;
    poison_behind(empty + offsetof(Shared, keys), stage, Traits::kHalfStageBytes);
    poison_behind(empty + offsetof(Shared, values), stage + Traits::kHalfStageBytes,
                  Traits::kHalfStageBytes);
  }
  set_shared_array(sm90::smem);
  return sm90::launch_verify<Traits>(p, config, 0, nullptr);
}

}  // namespace emulation
