# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `sglang.srt.plugins`: SGLang calls `register` once in every process.

Only official hooks are used: the choices list of the command line, the attention backend registry,
and hooks on functions where there is no registry. Nothing heavy is imported here; the backend comes
in when a model runner asks for it.
"""

import logging

from specfused.sglang import compat, release, switch

NAME = "specfused"

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes `--attention-backend specfused` known to this process.

    Raises:
        compat.UnsupportedVersion: SGLang logs it and goes on without the plugin, so the name is
            then refused by its command line.
    """
    compat.check_version()
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)
    for target, hook in {
        "speculative.draft_utils.DraftBackendFactory._create_backend": _create_draft_backend,
        "speculative.spec_info.SpeculativeAlgorithm.create_worker": _create_worker,
        "mem_cache.common.release_kv_cache": release.around_release,
    }.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)
    load = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(load, _check_split, HookType.BEFORE)


def _check_split(runner) -> None:
    settings = getattr(runner, "server_args", None)  # 0.5.23 asks its context instead
    if NAME in (compat.prefill_backend_name(runner), compat.decode_backend_name(settings)):
        from specfused.sglang import ranks

        ranks.check_split(runner)


def _create(runner):
    from specfused.sglang.backend import create_backend

    if switch.configured() not in (None, switch.STOCK) and not compat.num_draft_tokens():
        logger.warning("specfused: %s has no effect without speculation", switch.VARIABLE)
    return create_backend(runner)


def _create_draft_backend(original, factory, backend_name, backend_map, *args, **kwargs):
    """Adds specfused to the names that the draft factory knows."""
    multi_step = backend_map.get("triton") == factory._create_triton_decode_backend

    def create():
        from specfused.sglang.backend import create_backend
        from specfused.sglang.draft import SpecFusedMultiStepDraftBackend

        runner = factory.draft_model_runner
        if not multi_step:
            return create_backend(runner, with_prefill=True)
        return SpecFusedMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)

    entry = compat.draft_factory_entry(NAME, create)
    return original(factory, backend_name, {**backend_map, NAME: entry}, *args, **kwargs)


def _create_worker(original, algorithm, server_args):
    """Our subclass of SGLang's worker where SPECFUSED_MODE says so or, unset, decode is ours."""
    worker = original(algorithm, server_args)
    mode = switch.configured()
    if mode == switch.STOCK or (mode is None and compat.decode_backend_name(server_args) != NAME):
        return worker
    switch.policy_of(mode or switch.DEFAULT)  # a typo is named before anything else
    from specfused.sglang.worker import WORKERS

    if worker not in WORKERS:
        name = getattr(worker, "__name__", worker)
        logger.warning("specfused: %s=%s has no effect on SGLang's %s", switch.VARIABLE, mode, name)
        return worker
    return WORKERS[worker]
