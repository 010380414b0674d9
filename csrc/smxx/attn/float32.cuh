// SPDX-License-Identifier: Apache-2.0
// Attention in float32, for checking results rather than for speed: no tensor cores, no splits, no
// plan and no workspace.
#pragma once

#include "../../params.h"

namespace specfused::smxx {

int run_verify_float32(const AttnParams& p, void* stream);
int run_decode_float32(const AttnParams& p, void* stream);

}  // namespace specfused::smxx
