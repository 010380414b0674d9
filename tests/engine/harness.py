# SPDX-License-Identifier: Apache-2.0
"""Real SGLang engines in forked children of one process that has imported everything once.

An engine lives in its own child: SGLang answers a failed scheduler by killing the engine's main
process, and so that fails one test and not the run. Scheduler and detokenizer are forked too, where
SGLang would spawn them, so that an engine starts in a second and not in half a minute.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from probes import STEP_LOG, OpProbe, log_steps, read_steps

BACKEND = "specfused"
FORK = multiprocessing.get_context("fork")

ENGINE_ARGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": BACKEND,
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "disable_cuda_graph": True,
    "page_size": 1,
    "context_length": 512,
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "mem_fraction_static": 0.8,  # the pool is bounded above; others may use memory meanwhile
    "random_seed": 0,
    "log_level": "error",
}

# Unless a test says otherwise: its own rounds, of which the oracle knows the outcome.
STOCK_WORKER = {"SPECFUSED_MODE": "stock"}


class EngineDied(RuntimeError):
    """The child ended without a result; its output says why."""


@dataclass
class Outcome:
    """What one engine answered, request by request, and which ops it ran."""

    tokens: list[list[int]]
    meta: list[dict]
    texts: list[str | None] = field(default_factory=list)
    ops: dict[str, int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    steps: list[list] = field(default_factory=list)  # probes.Step by commit and request

    @property
    def histograms(self):
        """Rounds by number of accepted drafts; not padded to the number of steps."""
        return [meta["spec_correct_drafts_histogram"] for meta in self.meta]

    @property
    def logprobs(self):
        return [[entry[0] for entry in meta["output_token_logprobs"]] for meta in self.meta]

    def total(self, key):
        return sum(meta[key] for meta in self.meta)


def preload():
    """Import what every child needs (about 10 s) and make SGLang fork its processes."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise RuntimeError("engine tests need the environment that tests/engine/run.py sets")
    real = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: real("fork", force=True)
    import sglang.srt.constrained.xgrammar_backend
    import sglang.srt.entrypoints.engine
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    import specfused.ops  # noqa: F401


def speculation(models, algorithm, steps, topk, num_draft_tokens):
    """Engine arguments of one speculative setting."""
    return {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(models / algorithm.lower()),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": num_draft_tokens,
    }


def _forget_plugin():
    """Undo what other tests of this process did with the plugin: SGLang must load it by itself."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    HookRegistry.reset()
    ATTENTION_BACKENDS.pop(BACKEND, None)
    if BACKEND in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.remove(BACKEND)
    for name in [name for name in sys.modules if name.startswith("specfused.sglang")]:
        del sys.modules[name]


def child(pipe, env, function, args):
    """Body of a forked process: send (True, result) or (False, traceback) through the pipe."""
    os.setpgid(0, 0)
    _forget_plugin()
    os.environ.update(env)
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()


def end(process):
    """Kill what the child has started; the group is the child's own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def call(function, *args, env=None, timeout=180):
    """Run `function(*args)` in a forked child; return its result, raise what it raised."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=child, args=(theirs, env or {}, function, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise TimeoutError(f"{function.__name__}: no result after {timeout} s")
        try:
            done, answer = ours.recv()
        except EOFError:
            raise EngineDied("the engine's process died: see its output") from None
    finally:
        end(process)
    if not done:
        raise RuntimeError(answer)
    return answer


def flush(engine):
    """Empty the prefix cache; the scheduler does it when idle, see the probe lost_slots."""
    for _ in range(50):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise RuntimeError("the scheduler does not become idle")


def wrap(name, around):
    """Replaces "package.Class:name" by around(original, ...)."""
    owner, attribute = name.split(":")
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return around(original, *args, **kwargs)

    setattr(owner, attribute, wrapped)


def _generate(probe, fault, prepare, attributes, engine_args, turns, request):
    if prepare is not None:
        prepare()
    for name, value in attributes.items():
        owner, attribute = name.split(":")
        setattr(pkgutil.resolve_name(owner), attribute, value)
    probe.install(fault)
    if STEP_LOG in os.environ:
        log_steps()
    import sglang

    kind = "prompt" if isinstance(turns[0][0], str) else "input_ids"
    engine = sglang.Engine(**engine_args)
    try:
        answers = [engine.generate(**{kind: prompts}, **request) for prompts in turns]
        if STEP_LOG in os.environ:
            flush(engine)
        return answers
    finally:
        engine.shutdown()


def run_engine(
    models,
    prompts,
    max_new_tokens,
    *,
    fault=None,
    prepare=None,
    attributes=None,
    env=None,
    repeat=1,
    then=(),
    temperature=0.0,
    sampling=None,
    return_logprob=False,
    return_hidden_states=False,
    log_commits=False,
    **engine_args,
):
    """Start an engine on the target model, generate `repeat` times, return one Outcome per time.

    `then` has further lists of prompts for the same engine, an Outcome for each.

    Prompts are lists of token ids, or texts; those need `skip_tokenizer_init=False`. `fault` names
    a deliberate error of probes.py; `prepare` is called in the child before the engine starts, to
    patch what it likes. `env` is set in the child only. `sampling` has further sampling parameters:
    one dict for all prompts or one for each. `attributes` sets what a module has read from the
    environment when it was imported, as "module:name". `log_commits` fills Outcome.steps.
    """
    engine_args = {**ENGINE_ARGS, "model_path": str(models / "target"), **engine_args}
    common = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    each = sampling if isinstance(sampling, list) else [sampling or {}] * len(prompts)
    request = {
        "sampling_params": [{**common, **one} for one in each],
        "return_logprob": return_logprob,
        "return_hidden_states": return_hidden_states,
    }
    probe = OpProbe()
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        steps = Path(folder) / "steps.jsonl"
        logs = {STEP_LOG: str(steps)} if log_commits else {}
        answers = call(
            _generate,
            probe,
            fault,
            prepare,
            attributes or {},
            engine_args,
            [prompts] * repeat + list(then),
            request,
            env={"SPECFUSED_STATS": str(stats), **STOCK_WORKER, **logs, **(env or {})},
        )
        committed = read_steps(steps)
        phases = json.loads(stats.read_text())["calls"] if stats.exists() else {}
    return [
        Outcome(
            tokens=[one["output_ids"] for one in answer],
            meta=[one["meta_info"] for one in answer],
            texts=[one.get("text") for one in answer],
            ops=probe.counts(),
            phases=phases,
            steps=committed,
        )
        for answer in answers
    ]
