# SPDX-License-Identifier: Apache-2.0
"""The draft extend: the draft model over tokens that the target has committed.

`DraftExtend` follows every verify that drafted. SGLang's own computes tokens, lengths, positions
and rows anew, a dozen launches a step; here they are what `commit` wrote, and constants.
"""

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

from specfused.sglang import compat, compat_draft
from specfused.sglang.candidates import Candidates, Chooser
from specfused.sglang.extend_graph import ExtendGraphs


def forward(draft_worker, forward_batch, select_index, choose: Chooser) -> Candidates:
    """The draft model over a DRAFT_EXTEND_V2, through its graph if that can.

    Args:
        select_index: [bs] int64 flat rows, of which candidates are chosen.
    """
    runner, graph = draft_worker.draft_runner, draft_worker.cuda_graph_runner_for_draft_extend
    captured = graph is not None and graph.can_run_graph(forward_batch)
    if captured and isinstance(graph, ExtendGraphs):
        return graph.candidates(forward_batch, select_index)
    if captured:
        output = compat_draft.replay_draft_extend(graph, forward_batch, select_index)
    else:
        if forward_batch.needs_forward_metadata_init():
            runner.attn_backend.init_forward_metadata(forward_batch)
            forward_batch.mark_forward_metadata_ready()
        output = compat_draft.eager_draft_extend(runner, forward_batch, select_index)
    return choose.candidates(output.next_token_logits, output.hidden_states)


class DraftExtend:
    """The draft model's side of a verify.

    Args:
        draft_worker: SGLang's EagleDraftWorker or StandaloneDraftWorker.
        width: W, rows a request.
        max_bs: most requests of a batch.
        attn: the draft's extend attention if it is specfused's. Others read lengths that SGLang
            computes, on the host or in other dtypes: they get SGLang's own draft extend.
        choose: of the next step's candidates.
    """

    def __init__(self, draft_worker, width: int, max_bs: int, attn, choose: Chooser):
        runner = draft_worker.draft_runner
        self.worker = draft_worker
        self.choose = choose
        self.width = width
        plain = runner.canary_manager is None and not runner.model_config.model_is_mrope
        self.ours = attn is not None and plain
        self.extend_lens = torch.full((max_bs,), width, dtype=torch.int32, device=runner.device)
        standalone = runner.spec_algorithm.is_standalone()
        self.capture = CaptureHiddenMode.NULL if standalone else CaptureHiddenMode.FULL

    def run(self, batch, verify_input, result, committed) -> None:
        """Extends what a step accepted; fills result.next_draft_input.

        Args:
            batch: ScheduleBatch as the verify left it.
            verify_input: what was verified.
            result: SGLang's GenerationBatchResult of the step.
            committed: what `commit` wrote.
        """
        if not self.ours:
            compat.extend_after_verify(self.worker, batch, verify_input, result, committed)
            return
        hidden_states = result.logits_output.hidden_states
        forward_batch = self._forward_batch(batch, verify_input, hidden_states, committed)
        last = forward(self.worker, forward_batch, committed.select_index, self.choose)
        following = result.next_draft_input
        following.topk_p, following.topk_index = last.topk_p, last.topk_index
        following.hidden_states = last.hidden_states

    def _forward_batch(self, batch, verify_input, hidden_states, committed) -> ForwardBatch:
        """The verify's own batch for the draft's runner, with all that differs replaced.

        SGLang builds one for a verify without a launch.
        """
        forward_batch = ForwardBatch.init_new(
            batch,
            self.worker.draft_runner,
            capture_hidden_mode=self.capture,
            return_hidden_states_before_norm=False,
            **compat.kv_loc_plan(verify_input),
        )
        bs, width = forward_batch.batch_size, self.width
        forward_batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        forward_batch.spec_info = EagleDraftExtendInput(
            hidden_states=hidden_states,
            num_correct_drafts=committed.num_correct_drafts,
            num_accept_tokens=committed.accept_lens,
            num_tokens_per_req=width,
            num_tokens_for_logprob_per_req=width,
        )
        forward_batch.input_ids = committed.next_token_ids
        forward_batch.positions = committed.positions
        forward_batch.seq_lens = committed.window_ends
        forward_batch.seq_lens_cpu = forward_batch.seq_lens_sum = None  # our attention reads none
        forward_batch.extend_seq_lens = self.extend_lens[:bs]
        forward_batch.extend_seq_lens_cpu = [width] * bs
        forward_batch.extend_num_tokens = bs * width
        return forward_batch
