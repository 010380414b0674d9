// SPDX-License-Identifier: Apache-2.0
#include "../decode.cuh"

namespace specfused::smxx {
template int run_decode<__nv_bfloat16, 128>(const AttnParams&, const AttnConfig&, int, void*);
}  // namespace specfused::smxx
