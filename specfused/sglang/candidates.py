# SPDX-License-Identifier: Apache-2.0
"""The likeliest next tokens of the draft model, which a step's tree starts from."""

from dataclasses import dataclass

import torch
from sglang.srt.utils.async_probe import maybe_detect_inf, maybe_detect_nan


@dataclass
class Candidates:
    """Of bs requests, as SGLang hands them from a draft extend to the next draft."""

    topk_p: torch.Tensor  # [bs, topk] float32
    topk_index: torch.Tensor  # [bs, topk] int64, in the draft's vocabulary
    hidden_states: torch.Tensor | None  # [bs, hidden] of the row that they come from


def choose(logits, topk_p, topk_index) -> None:
    """The likeliest tokens with their probabilities, chosen as SGLang does.

    Args:
        logits: [rows, vocab].
        topk_p: [rows, topk] float32, written; 1 where topk is 1.
        topk_index: [rows, topk] int64, written.
    """
    maybe_detect_nan(logits, "specfused: logits of the draft model")
    maybe_detect_inf(logits, "specfused: logits of the draft model")
    if topk_p.shape[1] == 1:
        topk_index.copy_(torch.argmax(logits, dim=-1, keepdim=True))
        topk_p.fill_(1.0)
        return
    probs = torch.softmax(logits, dim=-1)
    torch.topk(probs, topk_p.shape[1], dim=-1, out=(topk_p, topk_index))


def chosen(logits, topk: int, hidden_states) -> Candidates:
    """`choose` into new tensors."""
    rows = logits.shape[0]
    topk_p = torch.empty((rows, topk), dtype=torch.float32, device=logits.device)
    topk_index = torch.empty((rows, topk), dtype=torch.int64, device=logits.device)
    choose(logits, topk_p, topk_index)
    return Candidates(topk_p, topk_index, hidden_states)
