# SPDX-License-Identifier: Apache-2.0
"""What the tests of the switching worker share: schedules, a checked run, the oracle's rounds."""

import random

from cases import MAX_NEW_TOKENS, PROMPTS, TREE
from harness import run_engine, speculation

EAGLE3_TREE = TREE._replace(algorithm="EAGLE3")
EAGLE_CHAIN = TREE._replace(steps=3, topk=1, num_draft_tokens=4)
FLIPS = "schedule:10"
RUNS = "schedule:1101000000111"
OVERLAP = {"STANDINS_OVERLAP": "1"}


def random_schedule(seed):
    """Runs of 1 to 9 steps, off as often as on."""
    numbers = random.Random(seed)
    return "schedule:" + "".join(bit * numbers.randint(1, 9) for bit in "10" * 20)


def run(models, setting, mode, prompts=PROMPTS, max_new_tokens=MAX_NEW_TOKENS, env=None, **options):
    """run_engine of one speculative setting in a mode; no KV slot is lost."""
    outcomes = run_engine(
        models,
        prompts,
        max_new_tokens,
        env={"SPECFUSED_MODE": mode, **(env or {})},
        log_commits=True,
        **{**speculation(models, *setting), **options},
    )
    for outcome in outcomes:
        assert outcome.ops["flush_cache"] > 0
        assert outcome.ops["lost_slots"] == 0
    return outcomes


class Rounds:
    """What the oracle says of the steps that drafted.

    A row of a batch is known by its length and root; if these fit several prompts, any may be
    meant, and if none (a prompt that is not the oracle's), the row says nothing.
    """

    def __init__(self, outcome, answers):
        expected = {}
        for prompt, (tokens, accepted) in zip(PROMPTS, answers, strict=True):
            for committed, count in enumerate(accepted, start=len(prompt)):
                expected.setdefault((committed, tokens[committed]), set()).add(count)
        rows = [step for batch in outcome.steps for step in batch]
        self.off = sum(step.width == 1 for step in rows)
        known = [s for s in rows if s.width > 1 and (s.committed, s.root) in expected]
        self.on = len(known)
        self.wrong = [s for s in known if s.accepted not in expected[s.committed, s.root]]
