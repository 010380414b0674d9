// SPDX-License-Identifier: Apache-2.0
// The sampled half of run_commit: p.coins is not null.
#pragma once

#include "../../params.h"

namespace specfused::smxx {

int run_sampled_commit(const CommitParams& p, void* stream);

}  // namespace specfused::smxx
