# SPDX-License-Identifier: Apache-2.0
"""Step times of both modes, measured once at start through the same code and graphs as in service.

A batch of no requests stands in: rows of req_to_token that nobody has yet point to free slots, so
attention reads as many different KV rows as it would, and what the steps write is nobody's.
"""

import contextlib
import logging

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

from specfused.policy import Mode
from specfused.sglang import compat
from specfused.sglang.clock import StepClock

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 8, 32, 128)
CONTEXTS = (256, 4096)
WARM, STEPS = 3, 5


@torch.no_grad()
def points(worker) -> list[tuple[Mode, int, float, float]]:
    """(mode, batch size, context, seconds) on a grid that the pools have room for."""
    found = []
    for batch_size in BATCH_SIZES:
        for context in CONTEXTS:
            if not _fits(worker, batch_size, context):
                continue
            with _rows(worker, batch_size, context):
                for mode in Mode:
                    seconds = _measure(worker, mode, batch_size, context)
                    found.append((mode, batch_size, context, seconds))
    return found


def _fits(worker, batch_size: int, context: int) -> bool:
    rows, width = worker.req_to_token_pool.req_to_token.shape
    slots = batch_size * (context + _room(worker))
    free = worker.token_to_kv_pool_allocator.available_size()
    return batch_size < rows and context + _room(worker) <= width and slots <= free


def _room(worker) -> int:
    """Slots behind the committed ones that a step writes."""
    return max(compat.slots_in_reserve(), worker.speculative_num_draft_tokens)


@contextlib.contextmanager
def _rows(worker, batch_size: int, context: int):
    """Rows 1..batch_size of the table with slots of their own; row 0 is SGLang's dummy."""
    table = worker.req_to_token_pool.req_to_token
    length = context + _room(worker)
    before = table[1 : 1 + batch_size, :length].clone()
    first = worker.token_to_kv_pool_allocator.page_size  # page 0 is the dummy
    slots = torch.arange(batch_size * length, dtype=table.dtype, device=table.device) + first
    table[1 : 1 + batch_size, :length] = slots.view(batch_size, length)
    try:
        yield
    finally:
        table[1 : 1 + batch_size, :length] = before


def _measure(worker, mode: Mode, batch_size: int, context: int) -> float:
    """Median seconds of a step; the first ones warm up."""
    clock = StepClock(worker.device)
    for _ in range(WARM + STEPS + 1):
        worker.run_step(mode, _batch(worker, batch_size, context))
        clock.step(())
    if torch.device(worker.device).type == "cuda":
        torch.cuda.synchronize()
    seconds = sorted(seconds for _, seconds in clock.finished()[WARM:])
    return seconds[len(seconds) // 2]


def _batch(worker, batch_size: int, context: int) -> ScheduleBatch:
    """A decode batch as the worker gets it from the scheduler, without requests."""
    runner = worker.target_worker.model_runner
    device = runner.device
    batch = ScheduleBatch.init_new(
        [],
        worker.req_to_token_pool,
        worker.token_to_kv_pool_allocator,
        None,
        runner.model_config,
        False,
        worker.speculative_algorithm,
    )
    batch.prepare_for_idle()  # sampling without any request in it: greedy
    batch.forward_mode = ForwardMode.DECODE
    batch.input_ids = None
    batch.seq_lens = torch.full((batch_size,), context, dtype=torch.int64, device=device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.req_pool_indices = torch.arange(1, 1 + batch_size, dtype=torch.int64, device=device)
    batch.req_pool_indices_cpu = torch.arange(1, 1 + batch_size, dtype=torch.int64)
    if any(getattr(b, "needs_cpu_seq_lens", True) for b in worker.spec_v2_attn_backends):
        batch.seq_lens_cpu = torch.full((batch_size,), context, dtype=torch.int64)
        batch.seq_lens_sum = batch_size * context
    else:
        batch.seq_lens_cpu = batch.seq_lens_sum = None
    hidden_size, dtype = get_draft_recurrent_hidden_state_spec(worker.draft_worker.draft_runner)
    topk = worker.topk
    batch.spec_info = EagleDraftInput(
        topk_p=torch.full((batch_size, topk), 1.0 / topk, device=device),
        topk_index=torch.arange(topk, device=device).repeat(batch_size, 1),
        bonus_tokens=torch.zeros(batch_size, dtype=torch.int64, device=device),
        hidden_states=None
        if hidden_size is None
        else torch.zeros((batch_size, hidden_size), dtype=dtype, device=device),
    )
    return batch
