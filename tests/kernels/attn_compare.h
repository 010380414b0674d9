// SPDX-License-Identifier: Apache-2.0
// Attention of the GPU against the CPU implementation, and probes that tell its steps apart.
#pragma once

#include "attn_case.h"

namespace specfused::checks {

// The CPU implementation, on all cores.
void attend_on_cpu(const AttnParams& p);

// What the GPU left in set 0 and the LSE against `want`; says which row is wrong, and where.
void check_values(const AttnCase& c, const AttnCase::HostCopy& want, const std::string& what);

KernelClass class_of(const AttnShape& shape, int num_rows);
const char* class_name(KernelClass kernel_class);

// Cases in which one step of the kernel at a time can be wrong. Returns their number.
int probe_steps(DType dtype, int head_dim, int num_rows, Random& random);

// Under random delays of many seeds the bits are those without any.
void check_delays(const Options& options, Groups& groups);

}  // namespace specfused::checks
