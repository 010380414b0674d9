// SPDX-License-Identifier: Apache-2.0
// CUDA implementation of every op: what only the GPU kernels ask of their arguments, and launches.
#include <torch/csrc/stable/library.h>

#include "../attn_select.h"
#include "../launch.h"
#include "../workspace.h"
#include "ops.h"
#include "stream.h"

namespace specfused::ops {
namespace {

const int64_t* int64s(const Tensor& t) { return static_cast<const int64_t*>(t.data_ptr()); }

void check_launch(const char* op, int error) {
  if (error != 0) fail(op, ": the launch failed: ", smxx::error_string(error));
}

// 16-byte loads: every row of every tensor must start on a 16-byte border.
void check_aligned(const Checker& c, const char* arg, const void* data, DType dtype,
                   std::initializer_list<int64_t> strides) {
  const int64_t elements = 16 / dtype_bytes(dtype);
  bool ok = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (int64_t stride : strides) ok = ok && stride % elements == 0;
  c.require(ok, arg, "have rows that start on 16-byte borders", "another alignment");
}

// What the kernels keep there needs it, and torch gives nothing less.
void check_workspace(const Checker& c, const void* workspace, int64_t bytes, int64_t needed) {
  c.require(bytes >= needed, "workspace",
            "have at least " + std::to_string(needed) + " bytes on CUDA", std::to_string(bytes));
  c.require(reinterpret_cast<uintptr_t>(workspace) % 16 == 0, "workspace",
            "start on a 16-byte border", "another alignment");
}

void check_attn(const Checker& c, const AttnParams& p, int64_t workspace_bytes) {
  c.require(p.head_dim == 64 || p.head_dim == 128 || p.head_dim == 256, "q",
            "have a head_dim of 64, 128 or 256 on CUDA", std::to_string(p.head_dim));
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  c.require(group <= 16, "q", "have at most 16 query heads per KV head on CUDA",
            std::to_string(group));
  check_aligned(c, "q", p.q, p.dtype, {p.stride_q_row, p.stride_q_head});
  check_aligned(c, "k_cache", p.k_cache, p.dtype, {p.stride_k_slot, p.stride_k_head});
  check_aligned(c, "v_cache", p.v_cache, p.dtype, {p.stride_v_slot, p.stride_v_head});
  check_aligned(c, "out", p.out, p.dtype, {p.stride_out_row, p.stride_out_head});
  if (p.k_new != nullptr) {
    check_aligned(c, "k_new", p.k_new, p.dtype, {p.stride_k_new_row, p.stride_k_new_head});
    check_aligned(c, "v_new", p.v_new, p.dtype, {p.stride_v_new_row, p.stride_v_new_head});
  }
  if (p.dtype == DType::kFloat32) return;  // never split: no plan, no workspace
  c.require(p.plan != nullptr, "plan", "be given on CUDA", "None");
  c.require(p.num_ctas <= kAttnMaxCtas, "plan", "be made for at most 1024 CTAs",
            std::to_string(p.num_ctas));
  const int64_t needed =
      attn_workspace_bytes(p.num_ctas, int64_t{p.num_rows} * group, p.head_dim, p.dtype);
  check_workspace(c, p.workspace, workspace_bytes, needed);
}

struct Cuda {
  static void verify_attn(const Checker& c, const AttnParams& p, int64_t workspace_bytes,
                          const Tensor& anchor) {
    check_attn(c, p, workspace_bytes);
    const CudaScope scope(c.op(), anchor);
    check_launch(c.op(), smxx::run_verify_attn(p, scope.stream()));
  }
  static void decode_attn(const Checker& c, const AttnParams& p, int64_t workspace_bytes,
                          const Tensor& anchor) {
    check_attn(c, p, workspace_bytes);
    const CudaScope scope(c.op(), anchor);
    check_launch(c.op(), smxx::run_decode_attn(p, scope.stream()));
  }
  static void commit(const Checker& c, const CommitParams& p, int64_t workspace_bytes,
                     const Tensor& anchor) {
    const int64_t needed =
        p.targets != nullptr ? 0 : commit_workspace_bytes(p.bs, p.width, p.vocab);
    check_workspace(c, p.workspace, workspace_bytes, needed);
    const CudaScope scope(c.op(), anchor);
    check_launch(c.op(), smxx::run_commit(p, scope.stream()));
  }
  static void compact(const Checker& c, const CompactParams& p, const Tensor& anchor) {
    const CudaScope scope(c.op(), anchor);
    check_launch(c.op(), smxx::run_compact(p, scope.stream()));
  }
  static void draft_topk(const Checker& c, const DraftTopkParams& p, int64_t workspace_bytes,
                         const Tensor& anchor) {
    c.require(p.num_rows <= kMaxDraftRows, "topk_index",
              "have at most " + std::to_string(kMaxDraftRows) + " rows on CUDA",
              std::to_string(p.num_rows));
    check_workspace(c, p.workspace, workspace_bytes,
                    draft_workspace_bytes(p.num_rows, p.vocab, p.topk));
    const CudaScope scope(c.op(), anchor);
    check_launch(c.op(), smxx::run_draft_topk(p, scope.stream()));
  }
  static void plan(const Checker& c, const Tensor& seq_lens, int64_t offset, int32_t num_kv_heads,
                   int32_t num_ctas, const Tensor& out) {
    const CudaScope scope(c.op(), out);
    check_launch(c.op(),
                 smxx::run_plan(int64s(seq_lens), offset, static_cast<int32_t>(seq_lens.size(0)),
                                num_kv_heads, num_ctas, static_cast<int32_t*>(out.data_ptr()),
                                scope.stream()));
  }
  static void tree_words_from_links(const Checker& c, const Tensor& next_token,
                                    const Tensor& next_sibling, int32_t bs, int32_t width,
                                    const Tensor& words) {
    const CudaScope scope(c.op(), words);
    check_launch(c.op(), smxx::run_tree_words_from_links(
                             int64s(next_token), int64s(next_sibling), bs, width,
                             static_cast<int64_t*>(words.data_ptr()), scope.stream()));
  }
  static void tree_words_from_mask(const Checker& c, const Tensor& mask, const OptTensor& seq_lens,
                                   int32_t bs, int32_t width, const Tensor& words) {
    const CudaScope scope(c.op(), words);
    check_launch(c.op(), smxx::run_tree_words_from_mask(
                             static_cast<const uint8_t*>(mask.data_ptr()), mask.numel(),
                             data_or_null<int64_t>(seq_lens), bs, width,
                             static_cast<int64_t*>(words.data_ptr()), scope.stream()));
  }
};

void bench_read(const Tensor& src, const Tensor& sink) {
  const Checker c("bench_read", "src", src);
  c.contiguous("src", src);
  c.tensor("sink", sink, {ScalarType::Long}, 1);
  c.require(sink.numel() >= 1, "sink", "have at least 1 entry", "0");
  const int64_t bytes = src.numel() * static_cast<int64_t>(src.element_size());
  check_aligned(c, "src", src.data_ptr(), DType::kFloat32, {bytes / 4});
  const CudaScope scope(c.op(), src);
  check_launch(c.op(),
               smxx::run_bench_read(src.data_ptr(), bytes, sink.data_ptr(), scope.stream()));
}

void bench_empty(const Tensor& anchor) {
  const CudaScope scope("bench_empty", anchor);
  check_launch("bench_empty", smxx::run_bench_empty(scope.stream()));
}

}  // namespace
}  // namespace specfused::ops

STABLE_TORCH_LIBRARY_IMPL(specfused, CUDA, m) {
#define SPECFUSED_IMPL(op) m.impl(#op, TORCH_BOX(&specfused::ops::Ops<specfused::ops::Cuda>::op));
  SPECFUSED_TENSOR_OPS(SPECFUSED_IMPL)
#undef SPECFUSED_IMPL
  m.impl("bench_read", TORCH_BOX(&specfused::ops::bench_read));
  m.impl("bench_empty", TORCH_BOX(&specfused::ops::bench_empty));
}
