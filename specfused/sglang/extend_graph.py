# SPDX-License-Identifier: Apache-2.0
"""The CUDA graph of the draft extend, with all that follows it up to the next step's candidates.

SGLang 0.5.17 captures the draft model with an lm_head over all rows, of which one a request is
used; 0.5.23 selects rows in its graph; both choose candidates after it. Here the selection and the
choice are captured, too. Buffers, buckets and the copies into them stay SGLang's.
"""

import torch
from sglang.srt.layers.dp_attention import (
    DpPaddingMode,
    set_dp_buffer_len,
    set_is_extend_in_batch,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
    EAGLEDraftExtendCudaGraphRunner,
)
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

from specfused.sglang import compat_draft
from specfused.sglang.candidates import Candidates, Chooser, raw_logits


class ExtendGraphs(EAGLEDraftExtendCudaGraphRunner):
    """Replays give the candidates of a batch; they stay as they are until the next replay."""

    def __init__(self, draft_worker, choose: Chooser):
        self.choose = choose
        super().__init__(draft_worker)  # captures

    def capture(self):
        rows, topk, device = self.max_bs, self.choose.topk, self.device
        # Row i is always one of request i, so a padded request reads no row that is not there.
        self.select_rows = getattr(self.buffers, "select_index", None)
        if self.select_rows is None:
            first = torch.arange(rows, dtype=torch.int64, device=device)
            self.select_rows = first * self.captured_req_width
        self.topk_p = torch.ones((rows, topk), dtype=torch.float32, device=device)
        self.topk_index = torch.zeros((rows, topk), dtype=torch.int64, device=device)
        super().capture()

    def capture_one_shape(self, size, *args, **kwargs):
        forward_batch = self._forward_batch(size)
        attn = self.draft_extend_attn_backend

        def run_once():
            attn.init_forward_metadata_in_graph(forward_batch)
            tokens = forward_batch.input_ids.shape[0]
            set_dp_buffer_len(None, tokens, forward_batch.dp_padding_mode.is_max_len(), None)
            set_is_extend_in_batch(False)
            return self._forward(forward_batch)

        with compat_draft.forward_on(attn, forward_batch):
            attn.init_forward_metadata_out_graph(forward_batch, in_capture=True)
            self.backend.capture_one(self._make_graph_key(size), run_once)

    def _forward_batch(self, bs: int) -> ForwardBatch:
        """A batch of `bs` requests in the static buffers."""
        buffers, width = self.buffers, self.captured_req_width
        tokens = bs * width
        hidden_states = buffers.hidden_states
        forward_batch = ForwardBatch(
            forward_mode=self.forward_mode,
            batch_size=bs,
            input_ids=buffers.input_ids[:tokens],
            req_pool_indices=buffers.req_pool_indices[:bs],
            seq_lens=buffers.seq_lens[:bs],
            seq_lens_cpu=buffers.seq_lens_cpu[:bs],
            seq_lens_sum=bs * self.seq_len_fill_value,
            extend_seq_lens=buffers.extend_seq_lens[:bs],
            extend_seq_lens_cpu=self.extend_seq_lens_cpu[:bs],
            out_cache_loc=buffers.out_cache_loc[:tokens],
            return_logprob=False,
            positions=buffers.positions[:tokens],
            dp_padding_mode=DpPaddingMode.get_default_mode_in_cuda_graph(),
            spec_algorithm=self.model_runner.spec_algorithm,
            spec_info=EagleDraftExtendInput(
                hidden_states=None if hidden_states is None else hidden_states[:tokens],
                num_correct_drafts=buffers.num_correct_drafts[:bs],
                num_accept_tokens=buffers.num_accept_tokens[:bs],
                num_tokens_per_req=width,
                select_index=self.select_rows[:bs],
            ),
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        compat_draft.bind_captured_slots(self.model_runner, forward_batch)
        return forward_batch

    def _forward(self, forward_batch):
        """What is captured: the model, the selected rows' hidden states, the choice."""
        bs, given = forward_batch.batch_size, forward_batch.spec_info.hidden_states
        model = self.model_runner.model
        with raw_logits(model):
            output = model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
        forward_batch.spec_info.hidden_states = given
        topk_p = self.topk_p[:bs] if self.choose.topk > 1 else None  # a chain's stay 1
        self.choose(output.next_token_logits, topk_p, self.topk_index[:bs])
        hidden_states = output.hidden_states
        if hidden_states is not None and hidden_states.shape[0] != bs:
            # 0.5.17 selects them only where they are what the lm_head reads.
            output.hidden_states = hidden_states[self.select_rows[:bs]]
        # A graph's results stay in memory, for every bucket: not the logits.
        output.next_token_logits = self.topk_p[:bs]
        return output

    def candidates(self, forward_batch, select_index) -> Candidates:
        """Replays the graph of this batch's bucket.

        Args:
            select_index: [bs] int64 flat rows; nothing is copied if they are `select_rows`.
        """
        bs = forward_batch.batch_size
        rows = self.select_rows[:bs]
        if not select_index.is_set_to(rows):
            rows.copy_(select_index)
        output = compat_draft.execute_draft_extend(self, forward_batch, rows)
        hidden_states = output.hidden_states
        if hidden_states is not None:
            hidden_states = hidden_states[:bs]
        return Candidates(self.topk_p[:bs], self.topk_index[:bs], hidden_states)
