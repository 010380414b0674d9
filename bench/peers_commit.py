# SPDX-License-Identifier: Apache-2.0
"""What SGLang 0.5.17's EAGLE worker calls between the logits and the next draft (topk > 1).

The functions are SGLang's own, in the order of `eagle_sample` and `run_eagle_verify`; only the
objects around them (batch, allocator, KV pool) are stand-ins that hold the bench's tensors.
"""

from types import SimpleNamespace

import torch

from bench.commit import CommitData
from bench.peers_attn import _needs_cuda


class SglangCommit:
    """Launch by launch from Python, as the worker runs it (none of it is in a graph)."""

    name = "sglang"
    eager = True

    def available(self, device: torch.device) -> str | None:
        worker = "sglang.srt.speculative.eagle_worker_common"
        return _needs_cuda(device, "sgl_kernel", worker, "sglang.srt.mem_cache.memory_pool")

    def prepare(self, data: CommitData):
        c, device = data.case, data.device
        self.data = data
        pool = self._pool(data)
        self.allocator = SimpleNamespace(get_kvcache=lambda: pool)
        self.retrieve_index = torch.arange(c.bs * c.w, device=device).view(c.bs, c.w)
        self.temperatures = torch.ones(c.bs, 1, device=device)
        self.batches = []
        for s in data.sets:
            context = int(s.seq_lens.max()) + c.w
            table = torch.zeros((c.bs, context), dtype=torch.int32, device=device)
            columns = s.seq_lens.unsqueeze(1) + torch.arange(c.w, device=device)
            table.scatter_(1, columns, s.out_cache_loc.view(c.bs, c.w).int())
            self.batches.append(
                SimpleNamespace(
                    seq_lens=s.seq_lens,
                    out_cache_loc=s.out_cache_loc,
                    req_pool_indices=torch.arange(c.bs, device=device),
                    req_to_token_pool=SimpleNamespace(req_to_token=table),
                )
            )

    @staticmethod
    def _pool(data: CommitData):
        """SGLang's KV pool over the bench's buffers, made without its constructor."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        layers = data.case.layers
        pool = object.__new__(MHATokenToKVPool)
        vars(pool).update(
            layer_num=layers,
            size=data.pool.shape[1] - 1,
            page_size=1,
            device=data.device,
            use_hnd=False,
            use_native_move_kv_cache=False,
            k_buffer=data.buffers[:layers],
            v_buffer=data.buffers[layers:],
        )
        pool._init_data_ptrs_and_strides()
        pool._init_kv_copy_and_warmup()
        return pool

    def launch(self, i: int) -> dict[str, torch.Tensor]:
        from sglang.kernels.ops.speculative.eagle import fill_bonus_tokens_func
        from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func
        from sglang.srt.speculative.eagle_worker_common import _finalize_accept_tree_path
        from sglang.srt.utils.async_probe import sanitize_nan_logits

        data, s, c = self.data, self.data.sets[i], self.data.case
        if s.logits is not None:
            sanitize_nan_logits(s.logits, "bench")
        predict = torch.zeros(c.bs * c.w, dtype=torch.int32, device=data.device)
        accept_index = torch.full((c.bs, c.max_path), -1, dtype=torch.int32, device=data.device)
        num_correct_drafts = torch.empty((c.bs,), dtype=torch.int32, device=data.device)
        if c.sample:
            self._sample(s, predict, accept_index, num_correct_drafts)
        else:
            target = s.targets
            if s.logits is not None:
                target = torch.argmax(s.logits, dim=-1).reshape(c.bs, c.w)
            predict, accept_index, num_correct_drafts = verify_tree_greedy_func(
                predicts=predict,
                accept_index=accept_index,
                accept_token_num=num_correct_drafts,
                candidates=s.draft_tokens,
                retrieve_index=self.retrieve_index,
                retrieve_next_token=s.next_token,
                retrieve_next_sibling=s.next_sibling,
                target_predict=target,
            )
        accept_lens = num_correct_drafts + 1
        new_seq_lens = s.seq_lens + accept_lens
        accept_tokens = predict[accept_index]
        bonus_tokens = torch.empty_like(accept_lens, dtype=torch.int32)
        fill_bonus_tokens_func(accept_tokens, accept_lens, bonus_tokens, c.max_path, c.bs)
        logits_output = SimpleNamespace(hidden_states=s.hidden)
        _finalize_accept_tree_path(
            self.batches[i],
            accept_index,
            accept_lens,
            predict,
            logits_output,
            c.bs,
            token_to_kv_pool_allocator=self.allocator,
            num_draft_tokens=c.w,
        )
        return {
            "accept_index": accept_index,
            "accept_lens": accept_lens,
            "accept_tokens": accept_tokens,
            "bonus_tokens": bonus_tokens,
            "new_seq_lens": new_seq_lens,
            "hidden": logits_output.hidden_states,
        }

    def _sample(self, s, predict, accept_index, num_correct_drafts):
        """Its sampled branch without top-k and top-p; the coins are given."""
        from sgl_kernel import tree_speculative_sampling_target_only

        c = self.data.case
        temperatures = torch.repeat_interleave(self.temperatures, c.w, dim=0)
        target_probs = torch.softmax(s.logits / temperatures, dim=-1).reshape(c.bs, c.w, -1)
        tree_speculative_sampling_target_only(
            predicts=predict,
            accept_index=accept_index,
            accept_token_num=num_correct_drafts,
            candidates=s.draft_tokens,
            retrive_index=self.retrieve_index,
            retrive_next_token=s.next_token,
            retrive_next_sibling=s.next_sibling,
            uniform_samples=s.coins,
            uniform_samples_for_final_sampling=s.coins_final,
            target_probs=target_probs,
            draft_probs=torch.zeros_like(target_probs),
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
        )


class SglangCommitGraph(SglangCommit):
    """The same calls in a graph: their time on the device, without the host's."""

    name = "sglang-graph"
    eager = False


PEERS = (SglangCommit, SglangCommitGraph)
