# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the draft model on the CPU: what would be captured runs again at every replay.

Everything else is SGLang's: static buffers, buckets, padding, copies. Outputs stay where they were
at capture, as those of a graph do.
"""

import dataclasses
from types import SimpleNamespace

import torch

BUCKETS = [2, 4, 8]


class Rerun:
    """A backend of SGLang's graph runners."""

    def __init__(self, runner):
        from specfused.sglang.modes import ours

        self.attn = ours(runner.attn_backend)  # None: the draft's steps, which keep nothing
        self.captured = {}

    def capture_one(self, key, forward, capture_inputs=None, post_warmup_hook=None):
        from sglang.srt.model_executor import forward_context

        forward()  # a warm-up
        context = forward_context.get_forward_context()
        metadata = self.attn and self.attn.metadata
        self.captured[key] = (forward, context, metadata, forward())

    def can_run(self, forward_batch, key):
        return key in self.captured

    def replay(self, key, forward_batch):
        from sglang.srt.model_executor.forward_context import forward_context

        forward, context, metadata, outputs = self.captured[key]
        if self.attn is not None:
            self.attn.metadata = metadata
        with forward_context(context):
            fresh = forward()
        for old, new in zip(_tensors(outputs), _tensors(fresh), strict=True):
            old.copy_(new)
        return outputs


def _tensors(output):
    if dataclasses.is_dataclass(output):
        output = vars(output).values()
    return [value for value in output if isinstance(value, torch.Tensor)]


def _capture_all(runner):
    runner.buffers.seq_lens.fill_(runner.seq_len_fill_value)
    runner.buffers.reset_index_buffers()
    for bs in reversed(runner.capture_bs):
        runner.capture_one_shape(bs, None)


def _capture_draft(worker):
    """SGLang's EagleDraftWorker._capture_cuda_graphs, as far as it goes on a CPU."""
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner

    worker.cuda_graph_runner = worker.cuda_graph_runner_for_draft_extend = None
    buffers = SimpleNamespace(get_logits_buffer=lambda vocab, rows: torch.zeros(rows, vocab))
    worker.draft_runner.graph_shared_output = buffers
    if worker.speculative_num_steps > 1:
        worker.cuda_graph_runner = EAGLEDraftCudaGraphRunner(worker)


def emulate():
    """In this process and those that it will fork, before an engine starts."""
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
    from sglang.srt.speculative import (
        eagle_draft_cuda_graph_runner,
        eagle_draft_extend_cuda_graph_runner,
        eagle_worker_v2,
    )

    from specfused.sglang import compat_draft

    for module in (eagle_draft_cuda_graph_runner, eagle_draft_extend_cuda_graph_runner):
        module.resolve_decode_backend = Rerun
        module.get_batch_sizes_to_capture = lambda *args, **kwargs: (BUCKETS, [])
    DecodeCudaGraphRunner.capture = _capture_all
    eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs = _capture_draft
    compat_draft.captures_graphs = lambda runner: True
