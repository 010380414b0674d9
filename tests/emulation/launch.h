// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA runtime that an attention launch needs. CTAs run one after the other, in an
// order that the seed chooses.
#pragma once

namespace emulation {

// Bytes of shared memory that a CTA can ask for: one NVIDIA H200.
constexpr int kMaxSharedBytes = 232448;

// The array that the kernels to come declare as extern __shared__, of kMaxSharedBytes.
void set_shared_array(char* shared);

}  // namespace emulation
