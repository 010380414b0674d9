// SPDX-License-Identifier: Apache-2.0
// Ops without tensors: sizes that a caller needs before it can allocate, and build information.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <memory>

#include "../kv_window.h"
#include "../launch.h"
#include "../workspace.h"
#include "build_info.h"
#include "checks.h"

namespace specfused::ops {
namespace {

// Bounds of what the ops take, wide enough that no product of them overflows.
void in_range(const char* op, const char* arg, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    fail(op, ": ", arg, " must be ", low, " to ", high, ", got ", value);
  }
}

constexpr int64_t kMostRequests = 1 << 24;

int64_t plan_numel_op(int64_t bs, int64_t num_ctas) {
  in_range("plan_numel", "bs", bs, 0, kMostRequests);
  in_range("plan_numel", "num_ctas", num_ctas, 1, 1 << 20);
  return plan_numel(bs, num_ctas);
}

int64_t attn_num_ctas_op(int64_t device_index, int64_t head_dim) {
#ifdef SPECFUSED_HAS_CUDA
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    fail("attn_num_ctas: head_dim must be 64, 128 or 256, got ", head_dim);
  }
  int num_ctas = 0;
  // Not torch's own class: its message goes through iostreams, see checks.h. For torch an index has
  // 8 bits, and -1 is the current device.
  DeviceGuardHandle handle = nullptr;
  if (device_index < 0 || device_index > INT8_MAX ||
      aoti_torch_create_device_guard(static_cast<int32_t>(device_index), &handle) != 0) {
    fail("attn_num_ctas: device_index must name a CUDA device of this machine, got ", device_index);
  }
  const std::unique_ptr<DeviceGuardOpaque, decltype(&aoti_torch_delete_device_guard)> guard(
      handle, aoti_torch_delete_device_guard);
  const int error = smxx::attn_num_ctas(static_cast<int>(head_dim), &num_ctas);
  if (error != 0)
    fail("attn_num_ctas: CUDA device ", device_index, ": ", smxx::error_string(error));
  return num_ctas;
#else
  fail("attn_num_ctas: this build must have CUDA kernels, got a CPU-only build (device ",
       device_index, ", head_dim ", head_dim, ")");
#endif
}

int64_t attn_workspace_bytes_op(int64_t num_ctas, int64_t rows_per_kv_head, int64_t head_dim) {
  const char* op = "attn_workspace_bytes";
  in_range(op, "num_ctas", num_ctas, 1, 1 << 20);
  in_range(op, "rows_per_kv_head", rows_per_kv_head, 1, kMaxRowsPerKvHead);
  in_range(op, "head_dim", head_dim, 1, 1 << 16);
  return attn_workspace_bytes(num_ctas, rows_per_kv_head, head_dim, DType::kBFloat16);
}

int64_t commit_workspace_bytes_op(int64_t bs, int64_t num_draft_tokens, int64_t vocab) {
  const char* op = "commit_workspace_bytes";
  in_range(op, "bs", bs, 0, kMostRequests);
  in_range(op, "num_draft_tokens", num_draft_tokens, 1, kMaxWindow);
  in_range(op, "vocab", vocab, 1, int64_t{1} << 31);
  return commit_workspace_bytes(bs, num_draft_tokens, vocab);
}

int64_t draft_workspace_bytes_op(int64_t rows, int64_t vocab, int64_t topk) {
  const char* op = "draft_workspace_bytes";
  in_range(op, "rows", rows, 0, kMaxDraftRows);
  in_range(op, "vocab", vocab, 1, int64_t{1} << 31);
  in_range(op, "topk", topk, 1, kMaxTopk);
  return draft_workspace_bytes(rows, vocab, topk);
}

void bench_overlap_op(bool on) {
#ifdef SPECFUSED_HAS_CUDA
  smxx::set_launch_overlap(on);
#else
  static_cast<void>(on);  // nothing is launched
#endif
}

// "version;nvcc;folder:arch;folder:arch...": no nvcc and no archs in a CPU-only build.
std::string build_info_op() {
  return std::string(version()) + ";" + cuda_compiler() + ";" + built_archs();
}

}  // namespace
}  // namespace specfused::ops

STABLE_TORCH_LIBRARY_IMPL(specfused, CompositeExplicitAutograd, m) {
  m.impl("plan_numel", TORCH_BOX(&specfused::ops::plan_numel_op));
  m.impl("attn_num_ctas", TORCH_BOX(&specfused::ops::attn_num_ctas_op));
  m.impl("attn_workspace_bytes", TORCH_BOX(&specfused::ops::attn_workspace_bytes_op));
  m.impl("commit_workspace_bytes", TORCH_BOX(&specfused::ops::commit_workspace_bytes_op));
  m.impl("draft_workspace_bytes", TORCH_BOX(&specfused::ops::draft_workspace_bytes_op));
  m.impl("bench_overlap", TORCH_BOX(&specfused::ops::bench_overlap_op));
  m.impl("build_info", TORCH_BOX(&specfused::ops::build_info_op));
}
