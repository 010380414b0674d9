# SPDX-License-Identifier: Apache-2.0
"""The end of a decode step: target's forward, decision, and one `commit` for all its consequences.

What SGLang does with an argmax, a walk, a dozen index operations and a KV move per layer is one
call of `specfused.ops.commit` here: accepted path, tokens in path order, new lengths, the draft
extend's inputs, hidden states and KV rows moved to the front.
"""

from dataclasses import dataclass

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify, eagle_sample
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_TOKEN_MODE,
    GrammarTree,
    build_grammar_vocab_mask,
    record_stream_each,
    record_stream_for_v2_verify,
)
from sglang.srt.utils.async_probe import maybe_detect_inf, maybe_detect_nan, sanitize_nan_logits

from specfused import ops
from specfused.sglang import compat

SIMULATED = SIMULATE_ACC_LEN > 0 and SIMULATE_ACC_TOKEN_MODE == "fixed"
SIMULATED_TOKEN = 100  # SGLang's choice
SIMULATED_LOGIT = 1e4  # above every other, and a number in float16


@dataclass
class Committed:
    """What `commit` wrote: bs requests, W rows each, P = longest path."""

    accept_index: torch.Tensor  # [bs, P] int32
    num_correct_drafts: torch.Tensor  # [bs] int32
    accept_lens: torch.Tensor  # [bs] int32
    accept_tokens: torch.Tensor  # [bs, P] int32
    bonus_tokens: torch.Tensor  # [bs] int32
    new_seq_lens: torch.Tensor  # [bs] int64
    next_token_ids: torch.Tensor  # [bs*W] int64
    select_index: torch.Tensor  # [bs] int64
    positions: torch.Tensor  # [bs*W] int64
    window_ends: torch.Tensor  # [bs] int64


class Verifier:
    """Target forward and commit over W rows a request, for every W.

    Args:
        target_worker: SGLang's TpModelWorker of the target model.
        kv_buffers: list of K and V buffers of all target layers; accepted rows move in them.
        topk: of the draft tree; 1 = a chain, in which nothing moves.
        ours: whether the target's attention is specfused's.
        select_rows: [max requests] int64, where the draft extend's graph reads `select_index`;
            None: a tensor a step.
    """

    def __init__(self, target_worker, kv_buffers, topk: int, ours: bool, select_rows=None):
        self.ours = ours
        self.select_rows = select_rows
        self.tp_size = compat.tp_size()
        self.target_worker = target_worker
        self.topk = topk
        self.kv_buffers = kv_buffers  # the table holds their addresses
        self.kv_table = ops.kv_table(kv_buffers) if topk > 1 else None
        self._workspace = None
        self._simulated = {}  # trees by bs, W and length

    def run(self, batch, req_to_token_pool, grammar_barrier=None, publish_reads_done=None):
        """Verifies batch.spec_info, an EagleVerifyInput, and commits what it accepts.

        Args:
            grammar_barrier: SGLang's; advances the grammars before their masks are made.
            publish_reads_done: called where the step no longer reads what the scheduler writes.

        Returns:
            SGLang's GenerationBatchResult, and the Committed that it was made from.
        """
        verify_input = batch.spec_info
        stream = torch.get_device_module(batch.seq_lens.device).current_stream()
        record_stream_for_v2_verify(batch, verify_input, stream)
        forward_batch, can_run_cuda_graph = self._prepare(verify_input, batch, req_to_token_pool)
        record_stream_each((batch.input_ids, batch.out_cache_loc), stream)
        grammar_tree = None
        if batch.has_grammar:  # its copy to the host overlaps the forward
            links = verify_input.retrieve_next_token
            grammar_tree = GrammarTree.from_device(
                links,
                verify_input.retrieve_next_sibling,
                verify_input.draft_token.view(links.shape),
            )
        # Our kernels read a live request's table row up to the end of its window, and the scheduler
        # writes behind it: it may go on before a graph's replay, as with SGLang's plain decode.
        early = can_run_cuda_graph and self.ours
        if publish_reads_done is not None and early:
            publish_reads_done()
        output = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        if publish_reads_done is not None and not early:
            publish_reads_done()
        logits_output = output.logits_output
        grammar_mask = None
        if batch.has_grammar:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=verify_input.retrieve_next_token.device,
                barrier=grammar_barrier,
            )
        maybe_detect_nan(logits_output.next_token_logits, "verify: target model logits")
        maybe_detect_inf(logits_output.next_token_logits, "verify: target model logits")
        if batch.return_hidden_states and logits_output.hidden_states is not None:
            # The host gets a copy of them later; a graph's own buffer is compacted in place.
            logits_output.hidden_states = logits_output.hidden_states.clone()
        done = self._commit(verify_input, batch, logits_output, grammar_mask)
        if batch.return_logprob:
            predict = _by_node(done, verify_input.draft_token_num)
            compat.compute_logprobs(batch, logits_output, predict, done.accept_index)
        result = GenerationBatchResult(
            logits_output=output.logits_output,
            next_token_ids=done.next_token_ids,
            can_run_cuda_graph=can_run_cuda_graph,
            speculative_num_draft_tokens=verify_input.draft_token_num,
            next_draft_input=EagleDraftInput(bonus_tokens=done.bonus_tokens),
            accept_lens=done.accept_lens,
            new_seq_lens=done.new_seq_lens,
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
            extra_keep_alive_refs=[forward_batch, done],
        )
        return result, done

    def _prepare(self, verify_input, batch, req_to_token_pool):
        """The verify's ForwardBatch, and whether it fits a graph.

        SGLang would load it into the graph's inputs here, and tokens and positions again where the
        graph is replayed. Without a graph in sight it leaves all of that to the replay.
        """
        runner = self.target_worker.model_runner
        graphs, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
        try:
            forward_batch, _ = eagle_prepare_for_verify(
                verify_input, req_to_token_pool, batch, self.target_worker
            )
        finally:
            runner.decode_cuda_graph_runner = graphs
        return forward_batch, bool(graphs and graphs.can_run_graph(forward_batch))

    def _commit(self, verify_input, batch, logits_output, grammar_mask) -> Committed:
        width = verify_input.draft_token_num
        bs, device = batch.seq_lens.shape[0], batch.seq_lens.device
        done = _empty(bs, width, verify_input.max_tree_depth, device)
        if self.select_rows is not None and bs <= self.select_rows.shape[0]:
            done.select_index = self.select_rows[:bs]
        sampling_info = batch.sampling_info
        made_up = SIMULATE_ACC_LEN > 0 and not SIMULATED
        if made_up or (self.tp_size > 1 and compat.cuts_distribution(sampling_info)):
            # A path of SGLang's making, or drawn by rank 0 for all ranks: the kernels that cut off
            # a distribution do not promise equal bits.
            decision = eagle_sample(verify_input, batch, logits_output, grammar_mask)
            self._take(done, batch, logits_output, width, *decision)
            return done
        logits = logits_output.next_token_logits
        adjust_logits(logits, sampling_info, width, grammar_mask)
        tree = {
            "draft_tokens": verify_input.draft_token.view(-1, width).long(),
            "retrieve_next_token": verify_input.retrieve_next_token,
            "retrieve_next_sibling": verify_input.retrieve_next_sibling,
        }
        if SIMULATED:
            logits[:, SIMULATED_TOKEN] = SIMULATED_LOGIT
            tree = self._simulated_tree(tree["draft_tokens"], verify_input.max_tree_depth)
        choice = {"logits": logits}
        if not sampling_info.is_all_greedy:
            choice = compat.sampling_inputs(verify_input, batch, logits)
            if self.tp_size > 1:  # all ranks have the same logits, and so decide alike
                choice |= _coins_of_first_rank(choice["coins"], choice["coins_final"])
        moves = {}
        if self.kv_table is not None and width > 1:
            ptrs, row_bytes, num_slots = self.kv_table
            moves = {
                "hidden_states": logits_output.hidden_states,
                "out_cache_loc": batch.out_cache_loc.long(),
                "kv_ptrs": ptrs,
                "kv_row_bytes": row_bytes,
                "num_slots": num_slots,
            }
        ops.commit(
            tree["draft_tokens"],
            batch.seq_lens,
            done.accept_index,
            done.num_correct_drafts,
            done.accept_lens,
            done.accept_tokens,
            done.bonus_tokens,
            done.new_seq_lens,
            workspace=self._commit_workspace(logits, width),
            next_token_ids=done.next_token_ids,
            select_index=done.select_index,
            positions=done.positions,
            window_ends=done.window_ends,
            retrieve_next_token=tree["retrieve_next_token"],
            retrieve_next_sibling=tree["retrieve_next_sibling"],
            **choice,
            **moves,
        )
        return done

    def _simulated_tree(self, draft_tokens, depth: int) -> dict:
        """SGLANG_SIMULATE_ACC_LEN: a path of the length drawn, all one token.

        The target's likeliest token is made that token, too. So the step does what it does without
        simulation. A tree's path takes its last nodes: all that is accepted moves, as SGLang
        moves it.
        """
        length = compat.simulated_accept_len(depth)
        width = draft_tokens.shape[1]
        key = (*draft_tokens.shape, length)
        if key not in self._simulated:
            others = range(1, length) if self.topk == 1 else range(width - length + 1, width)
            path = [0, *others]
            links = torch.full((width,), -1)
            links[path[:-1]] = torch.tensor(path[1:], dtype=links.dtype)
            self._simulated[key] = {
                "draft_tokens": torch.full_like(draft_tokens, SIMULATED_TOKEN),
                "retrieve_next_token": links.to(draft_tokens).expand_as(draft_tokens).contiguous(),
                "retrieve_next_sibling": torch.full_like(draft_tokens, -1),
            }
        return self._simulated[key]

    def _take(self, done, batch, logits_output, width, predict, accept_lens, accept_index) -> None:
        """Carries out a decision that was made elsewhere, with the same outputs."""
        bs, depth = done.accept_index.shape
        path = accept_index.clamp(min=0).long()
        done.accept_index.copy_(accept_index)
        done.accept_lens.copy_(accept_lens)
        done.num_correct_drafts.copy_(accept_lens - 1)
        done.accept_tokens.copy_(torch.where(accept_index >= 0, predict[path], -1))
        last = (accept_lens - 1).long()
        done.bonus_tokens.copy_(done.accept_tokens.gather(1, last[:, None])[:, 0])
        torch.add(batch.seq_lens, accept_lens, out=done.new_seq_lens)
        done.next_token_ids.zero_()
        done.next_token_ids.view(bs, width)[:, :depth] = done.accept_tokens.clamp(min=0)
        first = torch.arange(0, bs * width, width, device=last.device)
        torch.add(first, last, out=done.select_index)
        torch.add(batch.seq_lens, width, out=done.window_ends)
        columns = torch.arange(width, device=last.device)
        torch.add(batch.seq_lens[:, None], columns, out=done.positions.view(bs, width))
        if self.kv_table is None or width == 1:
            return
        slots = batch.out_cache_loc.long().view(bs, width)
        ops.compact(*self.kv_table, slots, done.accept_index, done.accept_lens)
        hidden = logits_output.hidden_states
        if hidden is not None:
            hidden.view(bs, width, -1)[:, :depth] = hidden[path]

    def _commit_workspace(self, logits, width):
        if not logits.is_cuda:
            return None
        size = ops.commit_workspace_bytes(logits.shape[0] // width, width, logits.shape[1])
        if self._workspace is None or self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=logits.device)
        return self._workspace


def adjust_logits(logits, sampling_info, width, grammar_mask) -> None:
    """Penalties, bias and grammar, in place, as SGLang has them before a verify's argmax.

    A request's W rows get the penalties of its committed tokens alike.
    """
    sanitize_nan_logits(logits, "verify: target model logits")
    if sampling_info.acc_additive_penalties is not None:
        logits.add_(sampling_info.acc_additive_penalties.repeat_interleave(width, dim=0))
    if sampling_info.acc_scaling_penalties is not None:
        scaling = sampling_info.acc_scaling_penalties.repeat_interleave(width, dim=0)
        apply_scaling_penalties(logits, scaling)
    if sampling_info.logit_bias is not None:
        logits.add_(sampling_info.logit_bias.repeat_interleave(width, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)


def _coins_of_first_rank(coins, coins_final) -> dict:
    """Rank 0's coins on every rank, as arguments of `ops.commit`: [bs, W] and [bs]."""
    both = torch.cat([coins, coins_final[:, None]], dim=1)
    compat.tp_group().broadcast(both, src=0)
    return {"coins": both[:, :-1].contiguous(), "coins_final": both[:, -1].contiguous()}


def _empty(bs: int, width: int, depth: int, device) -> Committed:
    def new(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=device)

    return Committed(
        accept_index=new(bs, depth),
        num_correct_drafts=new(bs),
        accept_lens=new(bs),
        accept_tokens=new(bs, depth),
        bonus_tokens=new(bs),
        new_seq_lens=new(bs, dtype=torch.int64),
        next_token_ids=new(bs * width, dtype=torch.int64),
        select_index=new(bs, dtype=torch.int64),
        positions=new(bs * width, dtype=torch.int64),
        window_ends=new(bs, dtype=torch.int64),
    )


def _by_node(done: Committed, width: int) -> torch.Tensor:
    """Emitted tokens by flat node id, which SGLang's logprobs index: [bs*W] int32, 0 elsewhere."""
    nodes = done.accept_index.shape[0] * width
    predict = done.accept_tokens.new_zeros(nodes + 1)
    predict[torch.where(done.accept_index >= 0, done.accept_index, nodes).long()] = (
        done.accept_tokens
    )
    return predict[:nodes]
