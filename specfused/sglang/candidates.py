# SPDX-License-Identifier: Apache-2.0
"""The likeliest next tokens of the draft model, which a step's tree starts from."""

import contextlib
from dataclasses import dataclass

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.utils.async_probe import maybe_detect_inf, maybe_detect_nan

from specfused import ops


@dataclass
class Candidates:
    """Of bs requests, as SGLang hands them from a draft extend to the next draft."""

    topk_p: torch.Tensor  # [bs, topk] float32
    topk_index: torch.Tensor  # [bs, topk] int64, in the draft's vocabulary
    hidden_states: torch.Tensor | None  # [bs, hidden] of the row that they come from


@contextlib.contextmanager
def raw_logits(model):
    """Within, the model's logits stay in the dtype of its lm_head.

    SGLang turns them into float32, which changes no choice and takes as long as a tenth of the
    lm_head's GEMM. A model that caps its logits keeps that.
    """
    processor = getattr(model, "logits_processor", None)
    if not isinstance(processor, LogitsProcessor) or processor.final_logit_softcapping:
        yield
        return

    def keep(logits, metadata, use_buffer=True, **softcap):
        return logits[:, : processor.vocab_size]  # the rest pads it

    processor._copy_logits_to_buffer = keep
    try:
        yield
    finally:
        del processor._copy_logits_to_buffer


class Chooser:
    """Chooses candidates by logits; captured and eager, all of it on one stream.

    Args:
        topk: of the draft.
        max_bs: most requests of a batch.
    """

    def __init__(self, topk: int, max_bs: int):
        self.topk = topk
        self.max_rows = max_bs * topk
        self._workspace = None

    def __call__(self, logits, topk_p, topk_index, token_map=None) -> None:
        """The likeliest tokens and their probabilities.

        Args:
            logits: [rows, vocab] of any floating dtype.
            topk_p: [rows, topk] float32, written; None: not wanted.
            topk_index: [rows, topk] int64, written.
            token_map: [vocab] int64 tokens that are written instead of the draft's; None: those.
        """
        maybe_detect_nan(logits, "specfused: logits of the draft model")
        maybe_detect_inf(logits, "specfused: logits of the draft model")
        workspace = self._reserved(logits)
        ops.draft_topk(logits, topk_index, topk_p=topk_p, token_map=token_map, workspace=workspace)

    def candidates(self, logits, hidden_states) -> Candidates:
        """Those of a row a request, in new tensors."""
        shape = (logits.shape[0], self.topk)
        topk_p = torch.ones(shape, dtype=torch.float32, device=logits.device)
        topk_index = torch.empty(shape, dtype=torch.int64, device=logits.device)
        self(logits, topk_p if self.topk > 1 else None, topk_index)
        return Candidates(topk_p, topk_index, hidden_states)

    def _reserved(self, logits):
        """Made before a capture, by its warm-up; graphs keep its address."""
        if logits.is_cuda and self._workspace is None:
            size = ops.draft_workspace_bytes(self.max_rows, logits.shape[1], self.topk)
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=logits.device)
        return self._workspace
