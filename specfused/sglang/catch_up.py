# SPDX-License-Identifier: Apache-2.0
"""Writes the draft KV that off steps left out: the ring's pairs, extended by the draft model.

It is the draft extend that follows every verify, over the same width W and through the same graph,
with the ring's pairs instead of the last step's: one forward per W pairs of the request that has
most. A request's rows are its next pairs and then fillers, whose KV goes to the dummy slot 0; the
chain mask keeps them from the rows before. All requests end with the last forward, whose last valid
row is what drafting resumes from.
"""

import copy

import torch
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft_extend
from sglang.srt.speculative.spec_utils import renorm_draft_probs
from sglang.srt.utils.async_probe import maybe_detect_nan
from sglang.srt.utils.common import fast_topk

from specfused.sglang import compat, ring


def schedule(counts: list[int], width: int) -> list[list[tuple[int, int]]]:
    """Per forward and request: (pairs still pending before it, pairs that it takes).

    A request takes no more than it must for the forwards left, so that its last pairs come last.
    """
    num_forwards = -(-max(counts) // width)
    forwards, left = [], list(counts)
    for index in range(num_forwards):
        later = (num_forwards - 1 - index) * width
        taken = [min(max(n - later, 0), width) for n in left]
        forwards.append(list(zip(left, taken, strict=True)))
        left = [n - take for n, take in zip(left, taken, strict=True)]
    return forwards


class CatchUp:
    """The draft model's side of resuming.

    Args:
        draft_worker: SGLang's EagleDraftWorker or StandaloneDraftWorker.
        pairs: the ring.
        width: W, rows per request of a forward.
    """

    def __init__(self, draft_worker, pairs: ring.PendingRing, width: int):
        self.worker = draft_worker
        self.pairs = pairs
        self.width = width
        self.tokens = 0  # pairs extended so far, for the log
        self._columns = torch.arange(width, device=pairs.tokens.device)

    def run(self, batch, resume: bool) -> None:
        """Extends every pending pair of the batch; call it on the forward stream.

        Args:
            batch: ScheduleBatch of a decode step before its verify; spec_info is its
                EagleDraftInput, of which resuming replaces topk_p, topk_index and hidden_states.
            resume: whether drafting follows. Otherwise those three stay as they are.
        """
        counts = [ring.pending(req) for req in batch.reqs]
        if not any(counts):
            return
        forwards = schedule(counts, self.width)
        plan = torch.tensor(forwards, dtype=torch.int64).permute(0, 2, 1)
        plan = compat.to_device(plan.contiguous(), batch.seq_lens.device)
        cpu_lens = batch.seq_lens_cpu
        for index, forward in enumerate(forwards):
            step = copy.copy(batch)  # SGLang's preparation changes the batch that it gets
            left, taken = plan[index]
            step.seq_lens = batch.seq_lens - left
            if cpu_lens is not None:
                step.seq_lens_cpu = cpu_lens - torch.tensor([n for n, _ in forward])
            step.seq_lens_sum = None
            last = self._extend(step, taken)
        if resume:
            self._resume(batch, last, plan[-1, 1] > 0, all(counts))
        compat.forget_reads_done(self.worker.draft_runner)  # the step reads on
        self.tokens += sum(counts)
        ring.clear(batch.reqs)

    def _extend(self, step, taken):
        """One forward over W rows a request from step.seq_lens on, of which `taken` are valid."""
        valid = self._columns < taken[:, None]
        positions = step.seq_lens[:, None] + self._columns
        tokens, hidden_states = self.pairs.read(step.req_pool_indices, positions)
        slots = self.worker.req_to_token_pool.req_to_token[
            step.req_pool_indices[:, None], positions
        ]
        step.out_cache_loc = torch.where(valid, slots, 0).flatten().long()
        tokens = torch.where(valid.flatten(), tokens, 0)
        first = torch.arange(0, tokens.numel(), self.width, device=tokens.device)
        select_index = first + (taken - 1).clamp(min=0)
        draft_extend_input = EagleDraftExtendInput(
            hidden_states=hidden_states,
            num_correct_drafts=(taken - 1).clamp(min=0).to(torch.int32),
            num_accept_tokens=taken.clamp(min=1).to(torch.int32),
            num_tokens_per_req=self.width,
            num_tokens_for_logprob_per_req=self.width,
        )
        worker = self.worker
        graph = worker.cuda_graph_runner_for_draft_extend
        forward_batch = prepare_for_draft_extend(
            draft_extend_input,
            step,
            tokens,
            self.width,
            worker.draft_runner,
            graph,
            return_hidden_states_before_norm=False,
        )
        if graph and graph.can_run_graph(forward_batch):
            return compat.replay_draft_extend(graph, forward_batch, select_index)
        forward_batch.spec_info.select_index = select_index  # the lm_head runs on these rows
        return compat.eager_draft_extend(worker.draft_runner, forward_batch, select_index)

    def _resume(self, batch, last, caught_up, all_caught_up: bool) -> None:
        draft_input = batch.spec_info
        topk_p, topk_index = self._topk(batch, last.next_token_logits)
        fresh = {
            "topk_p": topk_p,
            "topk_index": topk_index.to(draft_input.topk_index.dtype),
            "hidden_states": last.hidden_states,
        }
        for name, value in fresh.items():
            if value is None:
                continue
            if not all_caught_up:  # a request that was prefilled last has its own already
                value = torch.where(caught_up[:, None], value, getattr(draft_input, name))
            setattr(draft_input, name, value)

    def _topk(self, batch, logits):
        """The draft's first candidates, chosen as after any draft extend."""
        maybe_detect_nan(logits, "specfused: draft logits after the catch-up")
        topk = self.worker.topk
        if topk == 1:
            topk_index = torch.argmax(logits, dim=-1, keepdim=True)
            return torch.ones_like(topk_index, dtype=torch.float32), topk_index
        return fast_topk(renorm_draft_probs(logits, batch.sampling_info, False), topk, dim=-1)
