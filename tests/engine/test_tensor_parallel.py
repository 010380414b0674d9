# SPDX-License-Identifier: Apache-2.0
"""Two ranks of a tensor-parallel engine: one decision a step, however it came about.

Ranks in different modes run collectives of different sizes, which gloo answers with a connection
lost on one of them. SPECFUSED_CHECK_RANKS has to stop all before that, and to say why.
"""

import dataclasses
import json
import re

import pytest
import torch
from cases import CHAIN, TREE
from harness import EngineDied, wrap
from switching import EAGLE3_TREE, EAGLE_CHAIN, FLIPS, OVERLAP, Rounds, random_schedule, run

from specfused.policy import Mode

pytestmark = pytest.mark.engine

# The second variable only says that both ranks may share a NUMA node.
ENV = {"SPECFUSED_CHECK_RANKS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
SAMPLING = {"STANDINS_SAMPLING": "1"}
SHORT_RING = {**OVERLAP, "SPECFUSED_RING": "3"}
STRAY_STEP = 7
CHECK = "specfused: the policy must be in one state on all ranks, got "


def rank():
    """Of this process, in an engine."""
    from specfused.sglang import compat

    return compat.tp_rank()


class RankLog:
    """What each rank's steps emitted and which step times its policy got, in files per rank."""

    def __init__(self, folder):
        self.folder = folder

    def install(self):
        wrap("specfused.sglang.commit.Verifier:run", self._run)
        wrap("specfused.policy.Policy:observe_step", self._observe_step)

    def _run(self, original, verifier, batch, *args, **kwargs):
        width = batch.spec_info.draft_token_num
        result, committed = original(verifier, batch, *args, **kwargs)
        rows = zip(
            result.next_token_ids.view(-1, width).tolist(),
            result.accept_lens.tolist(),
            strict=True,
        )
        self._write("steps", [width, [tokens[:count] for tokens, count in rows]])
        return result, committed

    def _observe_step(self, original, policy, mode, batch_size, context, seconds):
        self._write("times", [mode.value, batch_size, context, seconds])
        return original(policy, mode, batch_size, context, seconds)

    def _write(self, kind, entry):
        with open(self.folder / f"{kind}.{rank()}", "a") as f:
            f.write(json.dumps(entry) + "\n")

    def read(self, kind):
        """[entries of rank 0, entries of rank 1]."""
        files = [self.folder / f"{kind}.{number}" for number in range(2)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


VARIANTS = {
    "eagle chain": (EAGLE_CHAIN, FLIPS, {}),
    "eagle3 tree": (EAGLE3_TREE, FLIPS, {}),
    "standalone, overlap": (CHAIN, random_schedule(1), OVERLAP),
    "eagle tree, overlap, ring of 3": (
        TREE,
        random_schedule(2),
        {**OVERLAP, "SPECFUSED_RING": "3"},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks(name, models, plain, rounds, tmp_path):
    setting, mode, env = VARIANTS[name]
    log = RankLog(tmp_path)
    outcome = run(models, setting, mode, env={**ENV, **env}, prepare=log.install, tp_size=2)[0]
    assert outcome.tokens == plain.tokens
    seen = Rounds(outcome, rounds(*setting))
    assert seen.on > 10
    assert seen.off > 10
    assert seen.wrong == []
    first, second = log.read("steps")
    assert first == second
    assert {width for width, _ in first} == {1, setting.num_draft_tokens}


def stray(original, policy, *args):
    """Rank 1 chooses otherwise, once."""
    decision = original(policy, *args)
    if rank() == 1 and policy.counters()["steps"] + 1 == STRAY_STEP:
        mode = next(mode for mode in Mode if mode is not decision.mode)
        decision = dataclasses.replace(decision, mode=mode)
    return decision


def test_stray_rank_is_named(models, capfd):
    """Control: it is, in the very step, and the engine ends."""
    with pytest.raises(EngineDied):
        run(
            models,
            EAGLE_CHAIN,
            FLIPS,
            env=ENV,
            prepare=lambda: wrap("specfused.policy.Schedule:_choose", stray),
            tp_size=2,
        )
    states = r"\['on  \w{16}', 'off \w{16}'\]"
    assert re.search(rf"{CHECK}{states} at step {STRAY_STEP}\n", capfd.readouterr().err)


def other_clock(original, clock):
    """On rank 1 drafting seems to take a hundred times as long."""
    scale = 100 if rank() == 1 else 1
    return [
        (what, seconds * (scale if what and what[0] is Mode.ON else 1))
        for what, seconds in original(clock)
    ]


def test_auto_goes_by_the_clock_of_rank_0(models, plain, tmp_path):
    log = RankLog(tmp_path)

    def prepare():
        log.install()
        wrap("specfused.sglang.clock.StepClock:finished", other_clock)

    outcome = run(models, EAGLE_CHAIN, "auto", env=ENV, prepare=prepare, repeat=2, tp_size=2)[1]
    assert outcome.tokens == plain.tokens
    first, second = log.read("steps")
    assert first == second
    first, second = log.read("times")
    assert first == second
    assert len(first) > 8


def test_clock_of_each_rank_is_noticed(models, capfd):
    """Control: without the hand-out ranks part, and are named at the first step."""

    def prepare():
        wrap("specfused.sglang.switch:_from_first", lambda original, ranks, times: times)

    with pytest.raises(EngineDied):
        run(models, EAGLE_CHAIN, "auto", env=ENV, prepare=prepare, tp_size=2)
    log = capfd.readouterr().err
    assert CHECK in log
    assert " at step 1\n" in log


def test_simulated_acceptance_is_drawn_alike(models, tmp_path):
    """SGLang draws it on each rank, from generators of the same seed."""
    from sglang.srt.speculative import spec_utils

    log = RankLog(tmp_path)

    def prepare():
        spec_utils.SIMULATE_ACC_LEN = 2.5  # before anybody reads it
        log.install()

    run(models, EAGLE_CHAIN, FLIPS, env=ENV, prepare=prepare, tp_size=2)
    first, second = log.read("steps")
    assert first == second
    lengths = {len(tokens) for width, rows in first for tokens in rows if width > 1}
    assert lengths == {2, 3}


def test_dp_attention_cannot_switch(models, capfd):
    """Its ranks have batches of their own, and a collective in every layer of all of them."""
    setting = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    with pytest.raises(RuntimeError):
        run(models, EAGLE_CHAIN, "auto", env=ENV, **setting)
    assert (
        "specfused: switching (SPECFUSED_MODE) with --enable-dp-attention is not supported; "
        "set SPECFUSED_MODE=stock or leave it unset"
    ) in capfd.readouterr().err


class Coins:
    """Coins of an own generator for each rank, in the place of SGLang's."""

    def __init__(self):
        self.generator = None

    def __call__(self, original, *, candidates, **kwargs):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(5 + rank())
        shapes = candidates.shape, candidates.shape[:1]
        return tuple(torch.rand(shape, generator=self.generator) for shape in shapes)

    def install(self):
        wrap("sglang.srt.speculative.eagle_utils:_verify_coins", self)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 50}], ids=["by commit", "by rank 0"])
def test_sampling_goes_by_the_coins_of_rank_0(sampling, models, plain, tmp_path):
    """Ranks with coins of their own emit what a single rank would have."""
    log = RankLog(tmp_path)

    def prepare():
        log.install()
        Coins().install()

    options = {"temperature": 1.0, "sampling": sampling}
    two = run(models, TREE, FLIPS, env={**ENV, **SAMPLING}, prepare=prepare, tp_size=2, **options)[
        0
    ]
    first, second = log.read("steps")
    assert first == second
    assert {width for width, _ in first} == {1, TREE.num_draft_tokens}
    one = run(models, TREE, FLIPS, env=SAMPLING, prepare=Coins().install, **options)[0]
    assert two.tokens == one.tokens != plain.tokens
    assert (two.ops["commit"] > one.ops["commit"]) == (not sampling)  # each rank's, or SGLang's


def test_sampling_by_each_rank_is_noticed(models, capfd):
    """Control: ranks that go by their own coins part, which a policy that counts tokens shows."""

    def prepare():
        from specfused.sglang.commit import Verifier

        Coins().install()
        Verifier.tp_size = property(lambda verifier: 1, lambda verifier, size: None)
        wrap("specfused.policy.Schedule:_state", counted)

    def counted(original, policy):
        return original(policy), policy.counters()["tokens_on"]

    with pytest.raises(EngineDied):
        run(
            models,
            EAGLE_CHAIN,
            FLIPS,
            env={**ENV, **SAMPLING},
            prepare=prepare,
            temperature=1.0,
            tp_size=2,
        )
    assert CHECK in capfd.readouterr().err
