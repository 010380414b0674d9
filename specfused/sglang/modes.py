# SPDX-License-Identifier: Apache-2.0
"""The two ways to run a decode step, both made at start; changing is assigning two attributes.

on:  the draft proposes a tree, the target verifies W = num_draft_tokens rows a request.
off: the target verifies one row, the last emitted token. For SGLang it is a verify of width 1, so
     lengths, results and the overlap schedule stay those of a speculative server; for the GPU it is
     a plain decode.
"""

import logging
import time
from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from specfused.sglang import compat
from specfused.sglang.backend import SpecFusedDecode

logger = logging.getLogger(__name__)


@dataclass
class ModeState:
    """What the target's model runner holds while a mode is active."""

    attn_backend: object
    graph_runner: object  # DecodeCudaGraphRunner, or None: eager


def ours(attn_backend) -> SpecFusedDecode | None:
    """The backend of ours that runs the verify, under whatever hybrid wrapper; None: another's."""
    while attn_backend is not None and not isinstance(attn_backend, SpecFusedDecode):
        attn_backend = getattr(attn_backend, "decode_backend", None)
    return attn_backend


class Modes:
    """Both states of the target's model runner.

    Args:
        runner: ModelRunner of the target, whose own state (after its graphs were captured) is "on".
    """

    def __init__(self, runner):
        self.runner = runner
        self.ours = ours(runner.attn_backend) is not None
        self.on = ModeState(runner.attn_backend, runner.decode_cuda_graph_runner)
        self.off = self.active = self.on
        self.graph_bytes = 0
        self.seconds = 0.0

    def capture_off(self) -> None:
        """Makes the off state; call it after the target's own graphs were captured.

        Our backend's buffers have their full size from the start, so both sets of graphs share one
        object. Other backends allocate anew for each set and need an object of their own.
        """
        start = time.perf_counter()
        free = _free_bytes(self.runner.device)
        with compat.spec_width(1):
            backend = self.on.attn_backend
            if not self.ours:
                backend = compat.new_attn_backend(self.runner)
            graphs = compat.decode_graphs(self.runner, backend, num_draft_tokens=1)
        self.off = ModeState(backend, graphs)
        self.seconds = time.perf_counter() - start
        self.graph_bytes = free - _free_bytes(self.runner.device)

    def enter(self, drafting: bool) -> None:
        """Host only; before anything of the step is launched."""
        if self.runner.decode_cuda_graph_runner is not self.active.graph_runner:
            # SGLang has captured again, e.g. for new weights, at the full width and on the backend
            # that was in place.
            self.on = ModeState(self.runner.attn_backend, self.runner.decode_cuda_graph_runner)
            self.capture_off()
        self.active = self.on if drafting else self.off
        self.runner.attn_backend = self.active.attn_backend
        self.runner.decode_cuda_graph_runner = self.active.graph_runner


class OneNodeTrees:
    """Verify inputs of off steps: a root and nothing else, without a launch."""

    def __init__(self, modes: Modes, max_bs: int, topk: int, device):
        self.modes = modes
        self.topk = topk
        self.index = torch.arange(max_bs, dtype=torch.int64, device=device)[:, None]
        self.no_link = torch.full((max_bs, 1), -1, dtype=torch.int64, device=device)
        self.no_mask = torch.ones(1, dtype=torch.bool, device=device)

    def build(self, batch) -> EagleVerifyInput:
        """The step of `batch`, whose spec_info is its EagleDraftInput."""
        bs = batch.seq_lens.shape[0]
        return EagleVerifyInput(
            draft_token=batch.spec_info.bonus_tokens.long(),
            custom_mask=self._mask(batch, bs),
            positions=batch.seq_lens,
            retrieve_index=self.index[:bs],
            retrieve_next_token=self.no_link[:bs],
            retrieve_next_sibling=self.no_link[:bs],
            retrieve_cum_len=None,
            spec_steps=0,
            topk=self.topk,
            draft_token_num=1,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    def _mask(self, batch, bs: int):
        """Everything is visible; our kernels read no mask at width 1, others read one."""
        if self.modes.ours:
            return self.no_mask
        backend = self.modes.off.attn_backend
        mask = backend.verify_mask
        if mask is not None and mask.fits(bs):
            return mask.buffer.fill_(True)
        lens = batch.seq_lens_cpu
        cells = bs * backend.max_context_len if lens is None else int(lens.sum())
        return torch.ones(cells + bs, dtype=torch.bool, device=batch.seq_lens.device)


def _free_bytes(device) -> int:
    if torch.device(device).type != "cuda":
        return 0
    return torch.cuda.mem_get_info()[0]
