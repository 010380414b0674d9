// SPDX-License-Identifier: Apache-2.0
// draft_topk: checks its tensors and fills DraftTopkParams, for every device.
#pragma once

#include "../params.h"
#include "checks.h"

namespace specfused::ops {

inline DraftTopkParams draft_topk_params(const Checker& c, const Tensor& logits,
                                         const Tensor& topk_index,
                                         const std::optional<Tensor>& topk_p,
                                         const std::optional<Tensor>& rows,
                                         const std::optional<Tensor>& token_map) {
  Dim num_rows{"rows"}, topk{"topk"}, vocab{"vocab"};
  c.tensor("logits", logits, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, 2);
  c.last_contiguous("logits", logits);
  c.size("logits", logits, 1, vocab);
  c.require(vocab.value >= 1 && vocab.value < int64_t{1} << 31, "logits",
            "have a vocabulary of 1 to 2^31 - 1", std::to_string(vocab.value));
  if (rows.has_value()) {
    c.tensor("rows", *rows, {ScalarType::Long}, 1);
    c.contiguous("rows", *rows);
    c.size("rows", *rows, 0, num_rows);
  } else {
    c.size("logits", logits, 0, num_rows);
  }
  const auto result = [&](const char* name, const Tensor& t, ScalarType type) {
    c.tensor(name, t, {type}, 2);
    c.contiguous(name, t);
    c.size(name, t, 0, num_rows);
    c.size(name, t, 1, topk);
  };
  result("topk_index", topk_index, ScalarType::Long);
  if (topk_p.has_value()) result("topk_p", *topk_p, ScalarType::Float);
  c.require(topk.value >= 1 && topk.value <= min_of<int64_t>(kMaxTopk, vocab.value), "topk_index",
            "have 1 to " + std::to_string(min_of<int64_t>(kMaxTopk, vocab.value)) + " columns",
            std::to_string(topk.value));
  if (token_map.has_value()) {
    c.tensor("token_map", *token_map, {ScalarType::Long}, 1);
    c.contiguous("token_map", *token_map);
    c.size("token_map", *token_map, 0, vocab);
  }
  DraftTopkParams p{};
  p.logits = logits.data_ptr();
  p.rows = data_or_null<int64_t>(rows);
  p.token_map = data_or_null<int64_t>(token_map);
  p.topk_index = static_cast<int64_t*>(topk_index.data_ptr());
  p.topk_p = const_cast<float*>(data_or_null<float>(topk_p));
  p.stride_logits_row = logits.stride(0);
  p.num_logits_rows = logits.size(0);
  p.num_rows = num_rows.value;
  p.vocab = vocab.value;
  p.topk = static_cast<int32_t>(topk.value);
  p.logits_dtype = dtype_of(logits);
  return p;
}

}  // namespace specfused::ops
