// SPDX-License-Identifier: Apache-2.0
// What attention.cpp launches; attention_sm90.cpp and attention_smxx.cpp have it, for one element
// type, head_dim and row tile each.
#pragma once

#include "csrc/params.h"

namespace emulation {

// `stages`: KV tiles in the ring. A cudaError_t.
int launch_attention(const specfused::AttnParams& p, int stages);

}  // namespace emulation
