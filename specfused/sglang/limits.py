# SPDX-License-Identifier: Apache-2.0
"""What a switching worker says when it starts: what it cannot serve, and what it costs."""

import logging

from specfused.sglang import compat, features, ranks, switch

logger = logging.getLogger(__name__)

_INSTEAD = "set SPECFUSED_MODE=stock or leave it unset"
_FLAGS = {  # setting: what it is on the command line
    "enable_hierarchical_cache": "--enable-hierarchical-cache (HiCache)",
    "enable_lmcache": "--enable-lmcache",
    "enable_flexkv": "--enable-flexkv",
    "enable_hisparse": "--enable-hisparse",
    "enable_dp_attention": "--enable-dp-attention",
    "enable_lora": "--enable-lora",
    "enable_mixed_chunk": "--enable-mixed-chunk",
    "enable_two_batch_overlap": "--enable-two-batch-overlap",
    "enable_pdmux": "--enable-pdmux",
    "enable_unified_memory": "--enable-unified-memory",
    "enable_streaming_session": "--enable-streaming-session",
    "speculative_adaptive": "--speculative-adaptive",
    "speculative_use_rejection_sampling": "--speculative-use-rejection-sampling",
}
_SGLANG_DEFAULT_REQUESTS = 48
MOST_BRANCHES = 16  # that the draft's ops choose


def unsupported(worker) -> str | None:
    """What switching cannot keep its promises with on this server, or None."""
    settings = compat.settings()
    for name, flag in _FLAGS.items():
        if settings.get(name):
            return flag
    if settings.get("disaggregation_mode", "null") != "null":
        return f"--disaggregation-mode {settings['disaggregation_mode']}"
    if settings.get("pp_size", 1) > 1:
        return f"--pp-size {settings['pp_size']}"
    if flag := ranks.shared_context(settings):
        return flag
    if worker.plan_stream is not None:
        return "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1"
    runner = worker.target_worker.model_runner
    if runner.model_config.is_multimodal:
        return "a multimodal model"
    if compat.has_recurrent_state(runner):
        return "a hybrid (mamba or linear attention) model"
    if runner.is_hybrid_swa:
        return "a sliding window KV pool"
    if runner.use_mla_backend and worker.topk > 1:
        return "trees over multi-head latent attention (MLA)"
    if worker.topk > MOST_BRANCHES:
        return f"trees of more than {MOST_BRANCHES} branches"
    if worker.draft_worker.seed_dsa_topk_from_draft_extend:
        return "a draft that hands indexer choices from step to step"
    if getattr(runner, "watermark_state", None) is not None:
        return "watermarks"
    return None


def may_switch(worker) -> bool:
    """False: behave as SGLang's worker, because nobody asked for more and something is missing.

    Raises:
        UnsupportedModel: SPECFUSED_MODE asks for what this server cannot have.
    """
    reason = unsupported(worker)
    if reason is None:
        return True
    if switch.configured() is not None:
        features.refuse(f"switching ({switch.VARIABLE}) with {reason}", _INSTEAD)
    logger.warning("specfused worker: drafting stays on, as switching cannot go with %s", reason)
    return False


def report(worker) -> None:
    """Logs what was set up, with its price."""
    settings = compat.settings()
    ring, modes = worker.ring, worker.modes
    rows = worker.req_to_token_pool.req_to_token.shape[0]
    kv = features.kv_buffers(worker.target_worker.model_runner)
    per_token = sum(buffer.nbytes / buffer.shape[0] for buffer in kv)
    logger.info(
        "specfused worker: %s; ring of %d tokens for %d requests, %.1f MB; off graphs %.1f s and "
        "%.1f MB; together as much as %d KV tokens; %d KV slots in reserve per running request",
        worker.switch.describe(),
        ring.size,
        rows,
        ring.nbytes / 1e6,
        modes.seconds,
        modes.graph_bytes / 1e6,
        (ring.nbytes + max(modes.graph_bytes, 0)) / per_token,
        compat.slots_in_reserve(),
    )
    if settings.get("max_running_requests") == _SGLANG_DEFAULT_REQUESTS:
        logger.warning(
            "specfused worker: at most %d requests run at once, which is what SGLang sets with "
            "speculation where --max-running-requests is missing; more wait",
            _SGLANG_DEFAULT_REQUESTS,
        )
