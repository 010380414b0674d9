// SPDX-License-Identifier: Apache-2.0
// Meta implementation: every tensor op writes into the caller's tensors and returns nothing, so
// there is no shape to compute. Reading a size here would pin it under torch.compile.
#include <torch/csrc/stable/library.h>

#include "ops.h"

namespace specfused::ops {
namespace {

struct Meta {};  // only names the signatures

template <class Signature>
struct NoOp;

template <class... Args>
struct NoOp<void (*)(Args...)> {
  static void call(Args...) {}
};

}  // namespace
}  // namespace specfused::ops

STABLE_TORCH_LIBRARY_IMPL(specfused, Meta, m) {
#define SPECFUSED_IMPL(op) \
  m.impl(                  \
      #op,                 \
      TORCH_BOX(           \
          &specfused::ops::NoOp<decltype(&specfused::ops::Ops<specfused::ops::Meta>::op)>::call));
  SPECFUSED_TENSOR_OPS(SPECFUSED_IMPL)
#undef SPECFUSED_IMPL
}
