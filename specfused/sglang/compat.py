# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between SGLang versions, and the gate that refuses unknown ones.

The draft model's forwards and graphs have a module of their own, `compat_draft`.
"""

import contextlib
import importlib.metadata
import importlib.util
import inspect
import os

import torch

TESTED = ((0, 5, 17), (0, 5, 23))
ALLOW_UNTESTED = "SPECFUSED_ALLOW_UNTESTED"


class UnsupportedVersion(RuntimeError):
    """The installed SGLang is not one that specfused was tested with."""


def sglang_version() -> str:
    """Version string of the installed SGLang."""
    return importlib.metadata.version("sglang")


def check_version(version: str | None = None) -> None:
    """Refuses SGLang versions that no test covers, unless SPECFUSED_ALLOW_UNTESTED=1."""
    version = version or sglang_version()
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers in TESTED or os.environ.get(ALLOW_UNTESTED) == "1":
        return
    tested = " and ".join(".".join(map(str, v)) for v in TESTED)
    raise UnsupportedVersion(
        f"specfused: SGLang must be {tested} (tested), got {version}; set {ALLOW_UNTESTED}=1 to "
        "try it anyway, or serve with --attention-backend triton"
    )


def spec_settings():
    """The speculative settings of this process (topk, steps, num_draft_tokens, algorithm)."""
    from sglang.srt.runtime_context import get_spec

    return get_spec()


def num_draft_tokens() -> int:
    """W of this server; 0 without speculation."""
    return spec_settings().speculative_num_draft_tokens or 0


def prefill_backend_name(runner) -> str:
    """The attention backend that the command line gives to prefill."""
    try:  # 0.5.23: values are resolved into the runtime context
        from sglang.srt.runtime_context import attention_backends
    except ImportError:
        return runner.server_args.get_attention_backends()[0]
    return attention_backends()[0]


def decode_backend_name(server_args) -> str:
    """The attention backend that the command line gives to decode."""
    try:
        from sglang.srt.runtime_context import attention_backends
    except ImportError:
        return server_args.get_attention_backends()[1]
    return attention_backends()[1]


def verify_mask(buffer: torch.Tensor, max_bs: int):
    """A QLEN_ONLY mask that the draft stage fills in place: W x W cells a request, no prefix."""
    from sglang.srt.layers.attention import verify_mask as module

    return module.VerifyMask(buffer=buffer, mode=module.TreeMaskMode.QLEN_ONLY, max_bs=max_bs)


def reads_end_after_replay():
    """0.5.23's name for a backend whose kernels read req_to_token until the replay ends."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.POST_REPLAY


def draft_factory_entry(name: str, create):
    """A backend_map entry of DraftBackendFactory: `create()` in the form this version expects.

    0.5.17's entries return the backend; 0.5.23's return (stamp, backend) and stamp it themselves.
    """
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    parameters = inspect.signature(DraftBackendFactory._create_backend).parameters
    return (lambda: (name, create())) if "stamps_children" in parameters else create


def fa3_present() -> bool:
    """Whether this machine and this sgl_kernel have FA3 (Hopper only)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        return importlib.util.find_spec("sgl_kernel.flash_ops") is not None
    except ImportError:
        return False


def flashinfer_present() -> bool:
    """Whether SGLang would use FlashInfer here."""
    from sglang.srt.utils import is_flashinfer_available

    return torch.cuda.is_available() and is_flashinfer_available()


def to_device(host: torch.Tensor, device) -> torch.Tensor:
    """A host tensor on its way to the device; the host does not wait."""
    if torch.device(device).type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


# -- the EAGLE worker


@contextlib.contextmanager
def draft_contexts(draft_worker):
    """What SGLang's worker enters around every use of the draft model."""
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )
    from sglang.srt.speculative import spec_utils

    if hasattr(draft_worker, "parallel_layout"):  # 0.5.23
        tensor_parallel = spec_utils.draft_tp_context(draft_worker.parallel_layout)
    else:
        tensor_parallel = draft_worker.draft_tp_context(draft_worker.draft_runner.tp_group)
    with (
        tensor_parallel,
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
    ):
        yield


def compute_logprobs(batch, logits_output, predict, accept_index) -> None:
    """Logprobs of the accepted tokens into logits_output; `predict` is by flat node id."""
    from sglang.srt.layers import logprob_processor

    if hasattr(logprob_processor, "compute_spec_logprobs"):  # 0.5.23
        logprob_processor.compute_spec_logprobs(
            batch, logits_output, predict, accept_index=accept_index
        )
        return
    steps = accept_index.shape[1] - 1
    logprob_processor.compute_spec_v2_logprobs(batch, logits_output, predict, accept_index, steps)


@contextlib.contextmanager
def spec_width(num_draft_tokens: int):
    """Other backends and the graph runner read the width from the settings while they are built.

    Only while they are built: 0.5.23 sizes a step's allocation by the settings of the moment.
    """
    from sglang.srt.runtime_context import get_context

    spec = spec_settings()
    steps, width = spec.speculative_num_steps, spec.speculative_num_draft_tokens
    override = get_context().override
    override(
        "specfused.capture",
        speculative_num_steps=num_draft_tokens - 1,
        speculative_num_draft_tokens=num_draft_tokens,
    )
    try:
        yield
    finally:
        override(
            "specfused.capture_done",
            speculative_num_steps=steps,
            speculative_num_draft_tokens=width,
        )


def new_attn_backend(runner):
    """A second attention backend of the runner's own kind, with buffers of its own."""
    before = runner.init_new_workspace
    try:
        backend = runner._get_attention_backend(init_new_workspace=True)
    finally:
        runner.init_new_workspace = before
    for name in ("prefill_attention_backend_str", "decode_attention_backend_str"):
        if hasattr(runner.attn_backend, name) and not getattr(backend, name, None):
            setattr(backend, name, getattr(runner.attn_backend, name))
    return backend


def decode_graphs(runner, attn_backend, num_draft_tokens: int):
    """Verify graphs of another width; the runner's own object where that is no graph runner."""
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

    own = runner.decode_cuda_graph_runner
    if not isinstance(own, DecodeCudaGraphRunner):
        return own
    return type(own)(
        runner,
        attn_backend=attn_backend,
        speculative_num_steps=num_draft_tokens - 1,
        speculative_num_draft_tokens=num_draft_tokens,
    )


def publish_reads_done(runner) -> None:
    """0.5.17: tells the scheduler that this forward no longer needs what it may write next.

    Without the event the scheduler's stream waits for the whole forward. 0.5.23's graph runner
    publishes it by itself.
    """
    if not hasattr(runner, "war_fastpath_read_done_event"):
        return
    event = torch.get_device_module(runner.device).Event()
    event.record()
    runner.war_fastpath_read_done_event = event


def hidden_size_of_draft_input(draft_runner) -> int | None:
    """Width of the target's hidden states that the draft takes; None: it takes none."""
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

    if draft_runner.spec_algorithm.is_standalone():
        return None
    return get_draft_input_from_target_hidden_dim(draft_runner)


def kv_record(req):
    """Where a request keeps kv_committed_len and cache_protected_len."""
    return req if hasattr(req, "kv_committed_len") else req.kv


def kv_loc_plan(verify_input) -> dict:
    """0.5.23's plan of the slots that a step writes, as an argument of its further forwards."""
    plan = getattr(verify_input, "kv_loc_plan", None)
    return {} if plan is None else {"kv_loc_plan": plan}


def extend_after_verify(draft_worker, batch, verify_input, result, committed) -> None:
    """SGLang's draft extend over what a step accepted; fills result.next_draft_input."""
    if hasattr(result, "prepared_draft_extend_inputs"):  # 0.5.17 derives them from the result
        result.prepared_draft_extend_inputs = (
            committed.num_correct_drafts,
            committed.select_index,
            committed.next_token_ids,
        )
    draft_worker._draft_extend_for_decode(batch, result, **kv_loc_plan(verify_input))


def parallel_sizes():
    """How this process shares its work: tp_size, tp_rank, attn_tp_size, attn_dcp_size, ..."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def tp_size() -> int:
    """Ranks that share every layer."""
    return parallel_sizes().tp_size


def tp_rank() -> int:
    """This rank among them."""
    return parallel_sizes().tp_rank


def tp_group():
    """SGLang's coordinator of these ranks: rank_in_group, ranks, cpu_group."""
    try:
        return parallel_sizes().tp_group
    except AttributeError:
        from sglang.srt.distributed import get_tp_group

        return get_tp_group()


def sampling_inputs(verify_input, batch, logits) -> dict:
    """Arguments of `ops.commit` for a sampled step: the target's distribution and coins.

    Args:
        logits: [bs*W, vocab], adjusted.
    """
    from sglang.srt.speculative import eagle_utils

    info, width = batch.sampling_info, verify_input.draft_token_num
    device = logits.device
    coins, coins_final = eagle_utils._verify_coins(
        sampling_info=info,
        seq_lens=batch.seq_lens,
        draft_token_num=width,
        candidates=verify_input.draft_token.view(-1, width),
        device=device,
    )
    spec = spec_settings()
    inputs = {
        "coins": coins,
        "coins_final": coins_final,
        "threshold_single": spec.speculative_accept_threshold_single,
        "threshold_acc": spec.speculative_accept_threshold_acc,
    }
    temperatures = info.temperatures.view(-1).float()
    if not cuts_distribution(info):
        return {"logits": logits, "temperatures": temperatures, **inputs}
    scaled = logits.float() / temperatures.repeat_interleave(width)[:, None]
    probs = torch.softmax(scaled, dim=-1)
    top_k, top_p = _renorm_functions()
    if info.need_top_k_sampling:
        probs = top_k(probs, info.top_ks.repeat_interleave(width))
    if info.need_top_p_sampling:
        probs = top_p(probs, info.top_ps.repeat_interleave(width))
    return {"target_probs": probs, **inputs}


def cuts_distribution(sampling_info) -> bool:
    """Whether a request of the batch samples by top-k or top-p."""
    sampled = not sampling_info.is_all_greedy
    return sampled and (sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling)


def _renorm_functions():
    from sglang.srt.speculative import eagle_utils

    if getattr(eagle_utils, "top_k_renorm_prob", None) is not None:  # 0.5.23 on a GPU
        return eagle_utils.top_k_renorm_prob, eagle_utils.top_p_renorm_prob
    import sgl_kernel

    return sgl_kernel.top_k_renorm_prob, sgl_kernel.top_p_renorm_prob


def settings() -> dict:
    """All server settings by flag name, as resolved in this process."""
    from sglang.srt.runtime_context import get_context

    return get_context().resolved_server_args_dict()


def slots_in_reserve() -> int:
    """KV slots that a running request holds beyond its committed tokens."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return get_alloc_reserve_per_decode()


def has_recurrent_state(runner) -> bool:
    """Whether layers keep a state per request instead of KV rows."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(runner.model_config) is not None


def forget_reads_done(runner) -> None:
    """Drops an event of an earlier phase, so that nobody takes it for the end of a later one."""
    for name in ("war_fastpath_read_done_event", "shared_read_done_event"):
        if hasattr(runner, name):
            setattr(runner, name, None)


def simulated_accept_len(most: int) -> int:
    """Accept length of the next simulated step, 1 to `most`, as SGLang draws it on the host."""
    from sglang.srt.speculative import spec_utils

    nobody = torch.zeros((1, most), dtype=torch.int32)  # one request without any draft
    path = spec_utils.generate_simulated_accept_index(
        accept_index=nobody,
        predict=nobody[0].clone(),
        num_correct_drafts=nobody[0, :1].clone(),
        candidates=nobody,
        target_predict=None,
        bs=1,
        spec_steps=most - 1,
        simulate_acc_len=spec_utils.SIMULATE_ACC_LEN,
    )
    return int((path >= 0).sum())
