# SPDX-License-Identifier: Apache-2.0
"""The draft model's part of a step where all attention is ours: candidates, tree, nodes to verify.

SGLang's draft worker keeps its model, its backends and its graph runners' inputs. What it runs and
captures is set on the object before it captures anything: `DraftStage.forward` in the place of its
own draft_forward, with the tree built inside of the graph, and `ExtendGraphs` for the draft extend.
"""

import functools
import logging
import time

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

from specfused.sglang import compat_draft
from specfused.sglang.candidates import Chooser, raw_logits
from specfused.sglang.draft import SpecFusedMultiStepDraftBackend
from specfused.sglang.extend_graph import ExtendGraphs
from specfused.sglang.modes import ours
from specfused.sglang.tree import Chain, Nodes, Tree

logger = logging.getLogger(__name__)


def not_served(worker) -> str | None:
    """Why a speculative worker keeps SGLang's own draft stage, or None."""
    draft_worker = worker.draft_worker
    runner = draft_worker.draft_runner
    extend_attn = draft_worker.draft_extend_attn_backend or runner.attn_backend
    draft_attn = draft_worker.draft_attn_backend
    if draft_attn is not None and not isinstance(draft_attn, SpecFusedMultiStepDraftBackend):
        return "another backend's attention in the draft"
    if ours(extend_attn) is None:
        return "another backend's attention in the draft extend"
    if ours(worker.target_worker.model_runner.attn_backend) is None:
        return "another backend's attention in the target"
    if worker.topk > 1 and worker.page_size > 1:
        return "a tree on pages of more than one token"
    if runner.canary_manager is not None:
        return "a KV canary"
    if runner.model_config.model_is_mrope:
        return "multi-dimensional positions in the draft"
    if getattr(draft_worker, "index_share_for_mtp_iteration", False):
        return "a draft that shares indexer choices between steps"
    if "Qwen3MoeForCausalLMMTP" in runner.model_config.hf_config.architectures:
        return "a draft that needs contiguous slots"
    if compat_draft.gathers_buffers(runner):
        return "ranks that gather their tokens"
    return None


class DraftStage:
    """Drafts of one speculative worker.

    Args:
        worker: `Switching`, before its draft worker captures graphs.
        choose: of candidates, in the draft's steps and in its extend.
    """

    def __init__(self, worker, choose: Chooser):
        self.choose = choose
        draft_worker = worker.draft_worker
        self.worker = draft_worker
        self.topk = worker.topk
        self.num_steps = worker.speculative_num_steps
        self.token_map = draft_worker.hot_token_id
        target = ours(worker.target_worker.model_runner.attn_backend)
        rows, width = target.max_bs, worker.speculative_num_draft_tokens
        device = draft_worker.draft_runner.device

        self.mask = target.verify_mask.buffer
        # Static: a graph reads the roots and writes the nodes.
        self.roots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.nodes = Nodes.new(rows, width, device)
        self._capture_sglangs = draft_worker._capture_cuda_graphs
        draft_worker._capture_cuda_graphs = self._capture
        draft_worker.draft_forward = self.forward

    def _capture(self) -> None:
        """SGLang captures `forward`, and no draft extend: that one is captured here."""
        worker = self.worker
        attn = worker.draft_extend_attn_backend
        worker.draft_extend_attn_backend = None  # SGLang captures none without
        try:
            self._capture_sglangs()
        finally:
            worker.draft_extend_attn_backend = attn
        graphs = attn is not None and compat_draft.captures_graphs(worker.draft_runner)
        if graphs and compat_draft.captures_draft_extend():
            start = time.perf_counter()
            worker.cuda_graph_runner_for_draft_extend = ExtendGraphs(worker, self.choose)
            seconds = time.perf_counter() - start
            logger.info("specfused worker: draft extend graphs captured in %.1f s", seconds)

    def draft(self, batch) -> EagleVerifyInput:
        """Drafts for a decode batch, whose spec_info is its EagleDraftInput."""
        worker, bs = self.worker, batch.seq_lens.shape[0]
        self.roots[:bs].copy_(batch.spec_info.bonus_tokens)
        forward_batch, captured, extras = compat_draft.prepare_for_draft(worker, batch)
        if captured:
            worker.cuda_graph_runner.execute(forward_batch)
        else:
            if self.num_steps > 1:
                worker.draft_attn_backend.init_forward_metadata(forward_batch)
                forward_batch.mark_forward_metadata_ready()
            self.forward(forward_batch)
        nodes = self.nodes.of(bs)
        verify_input = EagleVerifyInput(
            draft_token=nodes.tokens.flatten(),
            custom_mask=self.mask,
            positions=nodes.positions.flatten(),
            retrieve_index=nodes.index,
            retrieve_next_token=nodes.next_token,
            retrieve_next_sibling=nodes.next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.num_steps,
            topk=self.topk,
            draft_token_num=nodes.tokens.shape[1],
            capture_hidden_mode=None,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )
        for name, value in extras.items():
            setattr(verify_input, name, value)
        return verify_input

    def forward(self, forward_batch) -> tuple:
        """All steps and the tree, into `nodes`; what SGLang's graph runner captures.

        Returns:
            As many results as SGLang's draft_forward has, none of which anybody reads.
        """
        bs, info, topk = forward_batch.batch_size, forward_batch.spec_info, self.topk
        runner = self.worker.draft_runner
        slots = per_step_draft_out_cache_loc(forward_batch.out_cache_loc, bs, topk, self.num_steps)
        tree = (Tree if topk > 1 else Chain)((bs, topk, self.num_steps), self.roots.device)
        choose = functools.partial(self.choose, token_map=self.token_map)
        first = info.topk_index
        if self.token_map is not None:
            first = self.token_map[first]
        branches = tree.start(info.topk_p, first, info.hidden_states)
        for step in range(1, self.num_steps):
            forward_batch.input_ids, info.hidden_states = branches
            forward_batch.out_cache_loc = slots[step - 1]
            attn = self.worker.draft_attn_backend.attn_backends[step - 1]
            with compat_draft.forward_on(attn, forward_batch), raw_logits(runner.model):
                output = runner.forward(forward_batch).logits_output
            forward_batch.positions.add_(1)
            branches = tree.grow(step, output, choose)
        tree.finish(self.nodes.of(bs), self.roots[:bs], forward_batch.seq_lens, self.mask)
        return (None,) * 4


def install(worker, choose: Chooser) -> DraftStage | None:
    """Our draft stage in its place; None and a line in the log where SGLang's own stays."""
    reason = not_served(worker)
    if reason is None:
        return DraftStage(worker, choose)
    logger.info("specfused worker: SGLang's own draft stage, for %s", reason)
    return None
