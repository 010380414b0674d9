// SPDX-License-Identifier: Apache-2.0
#include "../verify.cuh"

namespace specfused::sm90 {
template int run_verify<__nv_bfloat16, 128>(const AttnParams&, const AttnConfig&, int, void*);
}  // namespace specfused::sm90
