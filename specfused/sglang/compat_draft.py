# SPDX-License-Identifier: Apache-2.0
"""What differs between SGLang versions in the draft model's forwards and graphs; see `compat`."""

import contextlib
import inspect

import torch


def captures_graphs(runner) -> bool:
    """Whether decode steps of this server are captured."""
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )

    cuda = torch.device(runner.device).type == "cuda"
    return cuda and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def captures_draft_extend() -> bool:
    """False: SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH."""
    from sglang.srt.environ import envs

    return not envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get()


def gathers_buffers(runner) -> bool:
    """Whether ranks hold parts of a batch and gather it, which graphs must be captured for."""
    from sglang.srt.utils import require_gathered_buffer

    given = inspect.signature(require_gathered_buffer).parameters
    return require_gathered_buffer(*([runner.server_args] if given else []))


@contextlib.contextmanager
def forward_on(attn_backend, forward_batch):
    """What SGLang enters around a forward that it runs on an attention backend of its choice."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batch = {}
    if "forward_batch" in inspect.signature(forward_context).parameters:  # 0.5.23
        batch["forward_batch"] = forward_batch
    with forward_context(ForwardContext(attn_backend=attn_backend), **batch):
        yield


def prepare_for_draft(draft_worker, batch):
    """(ForwardBatch of a draft, whether it fits its graph, further fields of its verify)."""
    from sglang.srt.speculative.eagle_worker_common import prepare_for_draft as prepare

    given = (
        batch.spec_info,
        draft_worker.req_to_token_pool,
        batch,
        draft_worker.cuda_graph_runner,
        draft_worker.draft_runner,
        draft_worker.topk,
        draft_worker.speculative_num_steps,
    )
    if "target_translator" not in inspect.signature(prepare).parameters:
        return *prepare(*given), {}
    forward_batch, captured, plan = prepare(  # 0.5.23
        *given,
        target_translator=draft_worker.target_worker.model_runner.kv_index_translator,
        num_draft_tokens=draft_worker.speculative_num_draft_tokens,
    )
    if plan is None:
        return forward_batch, captured, {}
    slots = {"kv_loc_plan": plan, "prepared_out_cache_loc": plan.write_virtual}
    return forward_batch, captured, slots


def bind_captured_slots(runner, forward_batch) -> None:
    """0.5.23 translates slot ids; those of a capture are the static buffer's, as they are."""
    if hasattr(runner, "kv_index_translator"):
        runner.kv_index_translator.bind_runner_slots(forward_batch)


def execute_draft_extend(graph, forward_batch, select_index):
    """Replays a draft extend's graph; 0.5.23's takes the rows to select, 0.5.17's knows none."""
    if "select_index" in inspect.signature(graph.execute).parameters:
        return graph.execute(forward_batch, select_index)
    return graph.execute(forward_batch)


def replay_draft_extend(graph, forward_batch, select_index):
    """SGLang's graph of it; logits and hidden states of the rows at select_index."""
    output = execute_draft_extend(graph, forward_batch, select_index)
    if "select_index" in inspect.signature(graph.execute).parameters:
        return output
    return _rows(output, select_index, select_index)


def eager_draft_extend(draft_runner, forward_batch, select_index):
    """The same without a graph; with spec_info.select_index the lm_head runs on these rows only."""
    output = draft_runner.forward(forward_batch).logits_output
    narrowed = forward_batch.spec_info.select_index is not None
    return _rows(output, None if narrowed else select_index, select_index)


def _rows(output, logits_rows, hidden_rows):
    if logits_rows is not None:
        output.next_token_logits = output.next_token_logits[logits_rows]
    if output.hidden_states is not None:
        output.hidden_states = output.hidden_states[hidden_rows]
    return output
