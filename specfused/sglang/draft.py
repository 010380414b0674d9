# SPDX-License-Identifier: Apache-2.0
"""Attention of the draft's own decode steps: topk branches per request, one token a step.

A request's branches are rows of one verify_attn call, so they read their shared prefix once. Their
window is the draft's slots [topk, num_steps]: at step i branch t sees columns t*num_steps + (0..i),
whose slots come from the step's out_cache_loc, so contiguous and page-aligned branches look alike.
"""

import torch

from specfused.sglang import features
from specfused.sglang.backend import SpecFusedDecode, StepMetadata


def branch_words(topk: int, num_steps: int, step: int) -> list[int]:
    """Tree words of the branches at `step`, as signed 64-bit integers."""
    words = [((2 << step) - 1) << (branch * num_steps) for branch in range(topk)]
    return [w - (1 << 64) if w >> 63 else w for w in words]


class SpecFusedDraftStep(SpecFusedDecode):
    """Draft step i. Its metadata are the container's: the prefix is the same for all steps."""

    def __init__(self, runner, topk: int, num_steps: int, step: int):
        super().__init__(runner)
        words = branch_words(topk, num_steps, step)
        self.words = torch.tensor([words], dtype=torch.int64, device=self.device)

    def share(self, meta: StepMetadata, bs: int) -> None:
        """Takes the step's plan and window; the same words for every request (stride 0)."""
        self.metadata = StepMetadata(
            num_rows=meta.num_rows,
            seq_lens_offset=0,
            tree_words=self.words.expand(bs, -1),
            window_slots=meta.window_slots,
            plan=meta.plan,
            workspace=meta.workspace,
        )

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        """The container has done it."""

    def init_forward_metadata_in_graph(self, forward_batch):
        """The container has done it."""


class SpecFusedMultiStepDraftBackend:
    """What SGLang's draft worker holds: one attention backend per draft step but the last."""

    needs_cpu_seq_lens = False

    def __init__(self, runner, topk: int, speculative_num_steps: int):
        if topk * speculative_num_steps > 64:
            features.refuse(
                f"--speculative-eagle-topk {topk} with --speculative-num-steps "
                f"{speculative_num_steps} in the draft (more than 64 slots a request)",
                "add --speculative-draft-attention-backend triton",
            )
        self.topk = topk
        self.num_steps = speculative_num_steps
        self.attn_backends = [
            SpecFusedDraftStep(runner, topk, speculative_num_steps, step)
            for step in range(speculative_num_steps - 1)
        ]
        self.max_context_len = self.attn_backends[0].max_context_len
        self.buffers = self.attn_backends[0].buffers

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        """All of it is on the device."""

    def init_forward_metadata_in_graph(self, forward_batch):
        if forward_batch.forward_mode.is_idle():
            return
        bs = forward_batch.seq_lens.shape[0]
        plan, workspace = self.buffers.plan(forward_batch.seq_lens, 0, self.topk)
        # Page-aligned branches come as int32 (they are read from the table), others as int64.
        slots = forward_batch.out_cache_loc[: bs * self.topk * self.num_steps].long().view(bs, -1)
        meta = StepMetadata(
            num_rows=self.topk,
            seq_lens_offset=0,
            window_slots=slots,
            plan=plan,
            workspace=workspace,
        )
        for step in self.attn_backends:
            step.share(meta, bs)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        for step in self.attn_backends:
            step.init_cuda_graph_state(max_bs, max_num_tokens)

    def on_after_cuda_graph_warmup(self):
        """Nothing that a warm-up leaves behind."""
