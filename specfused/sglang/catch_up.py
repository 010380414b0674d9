# SPDX-License-Identifier: Apache-2.0
"""Writes the draft KV that off steps left out: the ring's pairs, extended by the draft model.

It is the draft extend that follows every verify, with the ring's pairs instead of the last step's.
Up to W pairs a request it has the same width W and runs through the same graph. More go in one wide
eager forward where the draft's attention is ours, and else through the graph several times.

A request's rows are its next pairs and fillers, whose KV goes to the dummy slot 0 and whose output
nobody reads; the chain mask keeps fillers behind a pair from it. All requests end with the last
forward, whose last valid row is what drafting resumes from.
"""

import copy

import torch
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft_extend

from specfused.sglang import compat, extend, ring


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


WIDE = (16, 64)  # rows a request of eager forwards
MOST_ROWS = 4096  # of a wide forward, so that its activations stay below those of a prefill


class CatchUp:
    """The draft model's side of resuming.

    Args:
        draft_worker: SGLang's EagleDraftWorker or StandaloneDraftWorker.
        pairs: the ring.
        width: W, rows per request of the draft extend's graph.
        attn: the draft's extend attention if it is specfused's, which takes other widths too.
        choose: `Chooser` of the candidates that drafting resumes from.
    """

    def __init__(self, draft_worker, pairs: ring.PendingRing, width: int, attn, choose):
        self.worker = draft_worker
        self.choose = choose
        self.pairs = pairs
        self.width = width
        self.wide = []
        if attn is not None:
            self.wide = [w for w in WIDE if width < w <= pairs.row_width]
            for wide in self.wide:
                attn.buffers.reserve(wide)
        self.tokens = 0  # pairs extended so far, for the log

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
        width = self._width(max(counts), len(counts))
        forwards = schedule(counts, width)
        plan = torch.tensor(forwards, dtype=torch.int64).permute(0, 2, 1)
        plan = compat.to_device(plan.contiguous(), batch.seq_lens.device)
        for index, forward in enumerate(forwards):
            left, taken = plan[index]
            last = self._extend(batch, width, left, taken, forward)
        if resume:
            self._resume(batch, last, plan[-1, 1] > 0, all(counts))
        compat.forget_reads_done(self.worker.draft_runner)  # the step reads on
        self.tokens += sum(counts)
        ring.clear(batch.reqs)

    def _width(self, most: int, batch_size: int) -> int:
        """Rows a request for `most` pending pairs."""
        fitting = [w for w in self.wide if w * batch_size <= MOST_ROWS]
        if most <= self.width or not fitting:
            return self.width
        return next((w for w in fitting if w >= most), fitting[-1])

    def _extend(self, batch, width, left, taken, forward):
        """One forward: `taken` [bs] pairs of each request, the first of its last `left` [bs]."""
        seq_lens = batch.seq_lens
        first = seq_lens - left  # position of the first pair
        # A wide row block must not leave the table; fillers before the first pair see the KV there.
        start = first.clamp(max=self.pairs.row_width - width)
        columns = torch.arange(width, device=seq_lens.device)
        positions = start[:, None] + columns
        before = (first - start)[:, None]
        valid = (columns >= before) & (columns < before + taken[:, None])
        tokens, hidden_states = self.pairs.read(batch.req_pool_indices, positions)
        table = self.worker.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices[:, None], positions]
        step = copy.copy(batch)  # SGLang's preparation changes the batch that it gets
        step.seq_lens = start
        step.seq_lens_sum = None
        if batch.seq_lens_cpu is not None:
            behind = torch.tensor([n for n, _ in forward])
            step.seq_lens_cpu = (batch.seq_lens_cpu - behind).clamp(
                max=self.pairs.row_width - width
            )
        step.out_cache_loc = torch.where(valid, slots, 0).flatten().long()
        tokens = torch.where(valid.flatten(), tokens, 0)
        rows = torch.arange(0, tokens.numel(), width, device=tokens.device)
        select_index = rows + before[:, 0] + (taken - 1).clamp(min=0)
        draft_extend_input = EagleDraftExtendInput(
            hidden_states=hidden_states,
            num_correct_drafts=(taken - 1).clamp(min=0).to(torch.int32),
            num_accept_tokens=taken.clamp(min=1).to(torch.int32),
            num_tokens_per_req=width,
            num_tokens_for_logprob_per_req=width,
            select_index=select_index,
        )
        # A filler's position may lie beyond the longest context; RoPE has a table, too.
        draft_extend_input.positions = torch.minimum(positions, seq_lens[:, None] - 1).flatten()
        return self._forward(step, draft_extend_input, tokens, width, select_index)

    def _forward(self, step, draft_extend_input, tokens, width, select_index):
        forward_batch = prepare_for_draft_extend(
            draft_extend_input,
            step,
            tokens,
            width,
            self.worker.draft_runner,
            self.worker.cuda_graph_runner_for_draft_extend,
            return_hidden_states_before_norm=False,
        )
        return extend.forward(self.worker, forward_batch, select_index, self.choose)

    def _resume(self, batch, last, caught_up, all_caught_up: bool) -> None:
        draft_input = batch.spec_info
        fresh = {
            "topk_p": last.topk_p,
            "topk_index": last.topk_index.to(draft_input.topk_index.dtype),
            "hidden_states": last.hidden_states,
        }
        for name, value in fresh.items():
            if value is None:
                continue
            if not all_caught_up:  # a request that was prefilled last has its own already
                value = torch.where(caught_up[:, None], value, getattr(draft_input, name))
            setattr(draft_input, name, value)
