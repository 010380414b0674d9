# SPDX-License-Identifier: Apache-2.0
"""A thousand decode steps of one engine, in both modes, with requests that come, end and vanish."""

import asyncio
import random
from typing import NamedTuple

import pytest
from cases import MAX_NEW_TOKENS, PROMPTS
from harness import ENGINE_ARGS, Outcome, call, flush, speculation
from probes import STEP_LOG, OpProbe, log_steps, read_steps
from switching import EAGLE3_TREE, OVERLAP, Rounds, random_schedule

pytestmark = pytest.mark.engine

STEPS = 1000
NUM_REQUESTS = 360
AT_ONCE = 6  # requests under way, over fewer running slots: some wait
RUNNING = 3


class Job(NamedTuple):
    """One request: a prompt and the first tokens of its answer, then what is to come."""

    prompt: int
    answered: int
    max_new_tokens: int
    abort_at: int | None  # tokens received


def jobs(seed):
    numbers = random.Random(seed)
    for _ in range(NUM_REQUESTS):
        answered = numbers.choice((0, 0, numbers.randrange(MAX_NEW_TOKENS)))
        length = numbers.randint(1, MAX_NEW_TOKENS - answered)
        abort_at = numbers.randrange(length) if numbers.random() < 0.25 else None
        yield Job(numbers.randrange(len(PROMPTS)), answered, length, abort_at)


async def _answer(engine, number, job, answers):
    rid = f"job-{number}."  # an abort takes all requests that begin with its id
    abort_at = job.abort_at
    stream = await engine.async_generate(
        input_ids=PROMPTS[job.prompt] + answers[job.prompt][: job.answered],
        sampling_params={"temperature": 0.0, "max_new_tokens": job.max_new_tokens},
        rid=rid,
        stream=True,
    )
    if abort_at == 0:  # it is not even sent before the first token is asked for
        asyncio.get_running_loop().call_later(0.01, engine.tokenizer_manager.abort_request, rid)
    async for answer in stream:
        if abort_at is not None and len(answer["output_ids"]) >= abort_at > 0:
            engine.tokenizer_manager.abort_request(rid)
            abort_at = None
    return answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]


async def _serve(engine, todo, answers):
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number, job):
        async with gate:
            return await _answer(engine, number, job, answers)

    return await asyncio.gather(*(one(number, job) for number, job in enumerate(todo)))


def _run(probe, engine_args, todo, answers):
    probe.install()
    log_steps()
    import sglang

    engine = sglang.Engine(**engine_args)
    try:
        served = engine.loop.run_until_complete(_serve(engine, todo, answers))
        flush(engine)
        return served
    finally:
        engine.shutdown()


def test_long_run(models, plain, rounds, tmp_path):
    """Every answer is plain decoding's, every accept length the oracle's, and no slot is lost."""
    todo = list(jobs(seed=1))
    answers = rounds(*EAGLE3_TREE)
    probe, log = OpProbe(), tmp_path / "steps.jsonl"
    engine_args = {
        **ENGINE_ARGS,
        **speculation(models, *EAGLE3_TREE),
        "model_path": str(models / "target"),
        "max_running_requests": RUNNING,
    }
    env = {"SPECFUSED_MODE": random_schedule(8), STEP_LOG: str(log), **OVERLAP}
    served = call(_run, probe, engine_args, todo, plain.tokens, env=env)
    aborted = 0
    for job, (tokens, reason) in zip(todo, served, strict=True):
        length = job.max_new_tokens
        if reason == "abort":  # SGLang cuts nothing off then, so up to a path more
            assert len(tokens) < length + EAGLE3_TREE.steps + 1
            aborted += 0 < len(tokens) < length
            length = len(tokens)
        first = len(PROMPTS[job.prompt]) + job.answered
        assert tokens == answers[job.prompt][0][first : first + length]
    assert aborted > NUM_REQUESTS // 20
    steps = read_steps(log)
    assert len(steps) >= STEPS
    seen = Rounds(Outcome([], [], steps=steps), answers)
    assert seen.on > STEPS // 4
    assert seen.off > STEPS // 4
    assert seen.wrong == []
    counts = probe.counts()
    assert counts["flush_cache"] > 0
    assert counts["lost_slots"] == 0
