# SPDX-License-Identifier: Apache-2.0
"""The attention backend: decode, verify and draft extend on our ops, prefill on a stock backend.

SGLang's length conventions, brought to ours (C = committed length before the step):

  mode               rows per request   seq_lens counts      seq_lens_offset   rows see
  DECODE             1                  C + 1                -1                C and themselves
  TARGET_VERIFY      W                  C                    0                 C and the tree
  DRAFT_EXTEND_V2    W                  C + W                -W                C and a chain
"""

import logging
from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

import specfused
from specfused import ops
from specfused.sglang import compat, features, prefill, ranks, stats
from specfused.sglang.buffers import StepBuffers

logger = logging.getLogger(__name__)


@dataclass
class StepMetadata:
    """What all layers of one forward share."""

    num_rows: int  # query rows per request
    seq_lens_offset: int
    tree_words: torch.Tensor | None = None  # None: chain
    mask: torch.Tensor | None = None  # QLEN_ONLY cells that tree_words come from
    window_slots: torch.Tensor | None = None  # None: the window follows C in req_to_token
    plan: torch.Tensor | None = None
    workspace: torch.Tensor | None = None


def create_backend(runner, with_prefill: bool | None = None):
    """The registry's factory. with_prefill None: only if prefill runs on this name too."""
    features.check_runner(runner)
    ranks.check_context()
    if with_prefill is None:
        with_prefill = runner.is_draft_worker or compat.prefill_backend_name(runner) == "specfused"
    return SpecFusedAttnBackend(runner, with_prefill)


class SpecFusedDecode(AttentionBackend):
    """DECODE, TARGET_VERIFY and DRAFT_EXTEND_V2 over the KV window."""

    needs_cpu_seq_lens = False  # lengths are read on the device only

    def __init__(self, runner):
        super().__init__()
        self.role = "draft" if runner.is_draft_worker else "target"
        self.device = torch.device(runner.device)
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.kv_pool = runner.token_to_kv_pool
        self.max_context_len = runner.model_config.context_len
        self.max_bs = self.req_to_token.shape[0]
        self.buffers = StepBuffers(runner, self.device, self.max_bs)
        self.metadata: StepMetadata | None = None
        self._mask = self._words = None
        self._chains = compat.spec_settings().speculative_eagle_topk == 1  # no tree branches
        width = compat.num_draft_tokens()
        if width > 0 and not runner.is_draft_worker:
            cells = torch.zeros(self.max_bs * width * width, dtype=torch.bool, device=self.device)
            self._mask = compat.verify_mask(cells, self.max_bs)
            self._words = torch.zeros(self.max_bs * width, dtype=torch.int64, device=self.device)

    # -- metadata: host side in _out_graph, device side in _in_graph

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self.metadata = StepMetadata(num_rows=1, seq_lens_offset=-1)
        elif mode.is_target_verify():
            width = forward_batch.spec_info.draft_token_num
            self.metadata = StepMetadata(num_rows=width, seq_lens_offset=0)
            if width > 1 and not self._chains:
                # A captured step reads the buffer that the draft stage fills; a batch that did
                # not fit it brings a mask of its own, in the same layout.
                custom = forward_batch.spec_info.custom_mask
                self.metadata.mask = self._mask.buffer if in_capture else custom
        elif mode.is_draft_extend_v2():
            width = self._extend_width(forward_batch)
            self.metadata = StepMetadata(num_rows=width, seq_lens_offset=-width)

    def init_forward_metadata_in_graph(self, forward_batch):
        if forward_batch.forward_mode.is_idle():
            return
        meta, bs = self.metadata, forward_batch.batch_size
        if meta.mask is not None:
            width = meta.num_rows
            meta.tree_words = self._tree_words(bs, width)
            ops.tree_words_from_mask(meta.mask[: bs * width * width], meta.tree_words)
        meta.plan, meta.workspace = self.buffers.plan(
            forward_batch.seq_lens, meta.seq_lens_offset, meta.num_rows
        )

    def _tree_words(self, bs: int, width: int) -> torch.Tensor:
        if bs * width > self._words.numel():  # an eager batch beyond every bound
            return torch.empty((bs, width), dtype=torch.int64, device=self.device)
        return self._words[: bs * width].view(bs, width)

    def _extend_width(self, forward_batch) -> int:
        tokens = forward_batch.input_ids.shape[0]
        return tokens // max(forward_batch.batch_size, 1)

    # -- CUDA graphs: buffers have their full size from the start, so this is idempotent and two
    #    graph runners may share one backend object

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        if max_bs > self.max_bs:
            raise ValueError(
                f"specfused: max_bs must be at most {self.max_bs} (request pool), got {max_bs}"
            )

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    @property
    def verify_mask(self):
        return self._mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs):
        """Nothing depends on the mask before the graph reads it."""

    # -- scheduling

    def shared_read_ends(self, forward_mode):
        """0.5.23 asks where reads of req_to_token end: the kernels read it to the last layer.

        0.5.17 does not ask and lets the scheduler write rows while a decode graph replays. A live
        request's row changes only beyond its window then, and no kernel reads there.
        """
        return compat.reads_end_after_replay()

    # -- forward

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache, kwargs):
        features.check_call(layer, kwargs)
        meta = self.metadata
        stats.count(self.role, forward_batch.forward_mode.name)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        stores = save_kv_cache and k is not None
        shared = {
            "k_new": k.view(-1, layer.tp_k_head_num, layer.qk_head_dim) if stores else None,
            "v_new": v.view(-1, layer.tp_k_head_num, layer.qk_head_dim) if stores else None,
            "out_cache_loc": forward_batch.out_cache_loc.long() if stores else None,
            "plan": meta.plan,
            "workspace": meta.workspace,
            "seq_lens_offset": meta.seq_lens_offset,
            "sm_scale": layer.scaling,
        }
        where = (
            self.kv_pool.get_key_buffer(layer.layer_id),
            self.kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
        )
        if meta.num_rows == 1 and meta.window_slots is None:
            ops.decode_attn(q, *where, out, **shared)
        else:
            ops.verify_attn(
                q, *where, meta.tree_words, out, window_slots=meta.window_slots, **shared
            )
        return out.view(q.shape[0], -1)


class SpecFusedAttnBackend(HybridAttnBackend, TritonAttnBackend):
    """SGLang's own prefill/decode router around `SpecFusedDecode`.

    TritonAttnBackend is a base for its name only: SGLang captures the draft-extend graph for
    subclasses of stock backends. Its constructor does not run, and HybridAttnBackend answers first
    for every method that Triton's backend has in the backend interface.
    """

    def __init__(self, runner, with_prefill: bool):
        decode = SpecFusedDecode(runner)
        stock = None
        if with_prefill:
            stock = prefill.choose(compat.prefill_backend_name(runner))
        HybridAttnBackend.__init__(
            self,
            model_runner=runner,
            prefill_backend=ATTENTION_BACKENDS[stock](runner) if stock else decode,
            decode_backend=decode,
        )
        self.needs_cpu_seq_lens = False  # prefill batches carry host lengths in any case
        logger.info(
            "specfused %s: SGLang %s, %s model on %s, kernels %s, prefill %s, %s",
            specfused.__version__,
            compat.sglang_version(),
            decode.role,
            decode.device.type,
            decode.buffers.kernels,
            stock or "by another backend",
            f"{compat.num_draft_tokens()} draft tokens" if decode.verify_mask else "1 row a step",
        )

    def _select_backend(self, forward_mode):
        ours = (
            forward_mode.is_decode_or_idle()
            or forward_mode.is_target_verify()
            or forward_mode.is_draft_extend_v2()
        )
        return self.decode_backend if ours else self.prefill_backend

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        self.decode_backend.init_cuda_graph_state(max_bs, max_num_tokens)
