// SPDX-License-Identifier: Apache-2.0
// CPU implementation of every op.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../launch.h"
#include "ops.h"

namespace specfused::ops {
namespace {

const int64_t* int64s(const Tensor& t) { return static_cast<const int64_t*>(t.data_ptr()); }

struct Cpu {
  static void verify_attn(const Checker&, const AttnParams& p, int64_t, const Tensor&) {
    cpu::store_rows(p);
    torch::stable::parallel_for(0, int64_t{p.bs} * p.num_q_heads, 1,
                                [&](int64_t b, int64_t e) { cpu::verify_attn(p, b, e); });
  }
  static void decode_attn(const Checker&, const AttnParams& p, int64_t, const Tensor&) {
    cpu::store_rows(p);
    torch::stable::parallel_for(0, int64_t{p.bs} * p.num_q_heads, 1,
                                [&](int64_t b, int64_t e) { cpu::decode_attn(p, b, e); });
  }
  static void commit(const Checker&, const CommitParams& p, int64_t, const Tensor&) {
    cpu::commit(p);
  }
  static void compact(const Checker&, const CompactParams& p, const Tensor&) { cpu::compact(p); }
  static void draft_topk(const Checker&, const DraftTopkParams& p, int64_t, const Tensor&) {
    cpu::draft_topk(p);
  }
  static void plan(const Checker&, const Tensor& seq_lens, int64_t offset, int32_t num_kv_heads,
                   int32_t num_ctas, const Tensor& out) {
    make_plan(int64s(seq_lens), offset, static_cast<int32_t>(seq_lens.size(0)), num_kv_heads,
              num_ctas, static_cast<int32_t*>(out.data_ptr()));
  }
  static void tree_words_from_links(const Checker&, const Tensor& next_token,
                                    const Tensor& next_sibling, int32_t bs, int32_t width,
                                    const Tensor& words) {
    auto* out = static_cast<TreeWord*>(words.data_ptr());
    for (int64_t at = 0; at < int64_t{bs} * width; at += width) {
      words_from_links(int64s(next_token) + at, int64s(next_sibling) + at, width, out + at);
    }
  }
  static void tree_words_from_mask(const Checker&, const Tensor& mask, const OptTensor& seq_lens,
                                   int32_t bs, int32_t width, const Tensor& words) {
    const auto* cells = static_cast<const uint8_t*>(mask.data_ptr());
    cpu::tree_words_from_mask(cells, mask.numel(), data_or_null<int64_t>(seq_lens), bs, width,
                              static_cast<int64_t*>(words.data_ptr()));
  }
};

}  // namespace
}  // namespace specfused::ops

STABLE_TORCH_LIBRARY_IMPL(specfused, CPU, m) {
#define SPECFUSED_IMPL(op) m.impl(#op, TORCH_BOX(&specfused::ops::Ops<specfused::ops::Cpu>::op));
  SPECFUSED_TENSOR_OPS(SPECFUSED_IMPL)
#undef SPECFUSED_IMPL
}
