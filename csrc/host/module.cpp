// SPDX-License-Identifier: Apache-2.0
// _host: the headers that kernels share, for tests and benches. No torch, no tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "../attn_select.h"
#include "../draft_tree.h"
#include "../kv_window.h"
#include "../plan.h"
#include "../sm90/attn/smem_layout.h"
#include "build_info.h"

namespace py = pybind11;
using namespace specfused;

namespace {

void check_width(size_t width) {
  if (width < 1 || width > kMaxWindow) {
    throw std::invalid_argument("num_draft_tokens must be 1 to 64, got " + std::to_string(width));
  }
}

std::vector<TreeWord> words_of_links(const std::vector<int64_t>& next_token,
                                     const std::vector<int64_t>& next_sibling) {
  check_width(next_token.size());
  if (next_token.size() != next_sibling.size()) {
    throw std::invalid_argument("retrieve_next_sibling must have as many nodes as next_token");
  }
  std::vector<TreeWord> words(next_token.size());
  words_from_links(next_token.data(), next_sibling.data(), int(words.size()), words.data());
  return words;
}

std::vector<int32_t> plan_of(const std::vector<int64_t>& seq_lens, int32_t num_kv_heads,
                             int32_t num_ctas, int64_t seq_lens_offset) {
  if (num_kv_heads < 1) throw std::invalid_argument("num_kv_heads must be at least 1");
  if (num_ctas < 1) throw std::invalid_argument("num_ctas must be at least 1");
  const auto bs = static_cast<int32_t>(seq_lens.size());
  std::vector<int32_t> plan(plan_numel(bs, num_ctas));
  make_plan(seq_lens.data(), seq_lens_offset, bs, num_kv_heads, num_ctas, plan.data());
  return plan;
}

// Every segment of every CTA, in the order a kernel walks them.
py::list segments_of(const std::vector<int32_t>& plan, int32_t num_ctas) {
  const PlanView view{plan.data()};
  py::list out;
  for (int32_t cta = 0; cta < num_ctas; ++cta) {
    const int64_t begin = int64_t{cta} * view.tiles_per_cta();
    const int64_t end = min_of<int64_t>(begin + view.tiles_per_cta(), view.total_tiles());
    int32_t request = view.first_request(cta);
    for (int64_t line = begin; line < end;) {
      while (line >= view.tile_begin(request + 1)) ++request;
      const Segment s = view.segment(int32_t(line), int32_t(end), request);
      py::dict d;
      d["cta"] = cta;
      d["request"] = s.request;
      d["kv_head"] = s.kv_head;
      d["tiles"] = py::make_tuple(s.tile_begin, s.tile_end);
      d["split"] = s.split;
      d["num_splits"] = s.num_splits;
      d["tail"] = s.tail;
      out.append(d);
      line += s.tile_end - s.tile_begin;
    }
  }
  return out;
}

py::dict select_attn_on(int rows_per_kv_head, int head_dim, int sm_count, int smem_per_sm,
                        int smem_per_block, bool wgmma) {
  const AttnDevice device{sm_count, smem_per_sm, smem_per_block, wgmma};
  const AttnConfig config = select_attn(rows_per_kv_head, head_dim, device);
  static const char* const kClasses[] = {"few", "many", "wgmma", "wgmma_wide"};
  py::dict d;
  d["kernel_class"] = kClasses[static_cast<int>(config.kernel_class)];
  d["row_tile"] = config.row_tile;
  d["num_row_tiles"] = config.num_row_tiles;
  d["stages"] = config.stages;
  d["ctas_per_sm"] = config.ctas_per_sm;
  d["smem_bytes"] = config.smem_bytes;
  d["fold"] = config.fold;
  return d;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host-side C++ of specfused: build information, window, tree, plan, kernels. No torch.";
  m.attr("version") = version();
  m.attr("cuda_compiler") = cuda_compiler();
  m.attr("built_archs") = built_archs();
  m.attr("max_window") = kMaxWindow;
  m.attr("tile_tokens") = kTileTokens;

  m.def("chain_word", &chain_word, py::arg("column"), "Word of row `column` of a chain.");
  m.def("node_depth", &node_depth, py::arg("word"), "Ancestors of the node (root: 0).");
  m.def("words_from_links", &words_of_links, py::arg("retrieve_next_token"),
        py::arg("retrieve_next_sibling"), "Tree words of one request.");
  m.def("full_mask_offset", &full_mask_offset, py::arg("committed_before"), py::arg("committed"),
        py::arg("request"), py::arg("row"), py::arg("width"),
        "Flat offset of a row's first window cell in a FULL_MASK.");
  m.def("qlen_only_offset", &qlen_only_offset, py::arg("request"), py::arg("row"), py::arg("width"),
        "The same in a QLEN_ONLY mask.");
  m.def("node_position", &node_position, py::arg("committed"), py::arg("depth"));
  m.def("slide", &slide, py::arg("committed"), py::arg("accept_lens"));
  m.def("plan", &plan_of, py::arg("seq_lens"), py::arg("num_kv_heads"), py::arg("num_ctas"),
        py::arg("seq_lens_offset") = 0, "The split plan as integers, see csrc/plan.h.");
  m.def("segments", &segments_of, py::arg("plan"), py::arg("num_ctas"),
        "What each CTA of a plan attends.");
  m.def("select_attn", &select_attn_on, py::arg("rows_per_kv_head"), py::arg("head_dim"),
        py::arg("sm_count"), py::arg("smem_per_sm"), py::arg("smem_per_block"), py::arg("wgmma"),
        "Which attention kernel serves a step, see csrc/attn_select.h. row_tile 0: none.");
  m.def("wgmma_block_offset", &sm90::block_offset, py::arg("row"), py::arg("part"), py::arg("rows"),
        "Byte of a 16-byte part of a row in a block of rows, see csrc/sm90/attn/smem_layout.h.");
  m.def("wgmma_row_descriptor", &sm90::row_descriptor, py::arg("block"), py::arg("d"),
        py::arg("rows"), "Matrix descriptor of 16 elements of every row.");
  m.def("wgmma_column_descriptor", &sm90::column_descriptor, py::arg("block"), py::arg("row"),
        py::arg("rows"), "Matrix descriptor of all elements of 16 rows.");
}
