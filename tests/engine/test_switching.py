# SPDX-License-Identifier: Apache-2.0
"""Drafting switched on and off from step to step: lossless in tokens, in slots, in acceptance."""

import itertools
import re

import pytest
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, SECOND_TURN, TREE
from harness import run_engine, speculation
from switching import (
    EAGLE3_TREE,
    EAGLE_CHAIN,
    FLIPS,
    OVERLAP,
    RUNS,
    Rounds,
    random_schedule,
    run,
)

pytestmark = pytest.mark.engine

DRAFT_TREE = TREE._replace(algorithm="STANDALONE")
HYBRID = {
    "attention_backend": "triton",
    "decode_attention_backend": "specfused",
    "speculative_attention_mode": "decode",
}


@pytest.mark.parametrize("setting", [CHAIN, TREE, EAGLE3_TREE], ids=str)
@pytest.mark.parametrize("mode", ["on", "off", FLIPS, RUNS])
def test_modes(mode, setting, models, plain, rounds):
    """Tokens of plain decoding, and rounds as if drafting had never been off."""
    outcome = run(models, setting, mode)[0]
    assert outcome.tokens == plain.tokens
    seen = Rounds(outcome, rounds(*setting))
    assert (seen.on > 0, seen.off > 0) == (mode != "off", mode != "on")
    assert seen.wrong == []
    assert outcome.ops["commit"] == len(outcome.steps)  # one call a step, and no other
    assert outcome.ops["moved_rows"] == outcome.ops["compact"] == 0
    assert (outcome.ops["catch_ups"] > 0) == (mode in (FLIPS, RUNS))


VARIANTS = {
    "overlap, chain": (CHAIN, {"env": OVERLAP}),
    "overlap, eagle chain": (EAGLE_CHAIN, {"env": OVERLAP}),
    "overlap, tree": (TREE, {"env": OVERLAP}),
    "overlap, ring of 3": (TREE, {"env": {**OVERLAP, "SPECFUSED_RING": "3"}}),
    "ring of 1": (EAGLE3_TREE, {"env": {"SPECFUSED_RING": "1"}}),
    "chain on pages": (CHAIN, {"page_size": 16, "env": OVERLAP}),
    "tree on pages": (TREE, {"page_size": 16, **HYBRID}),
    "chunked prefill": (TREE, {"chunked_prefill_size": 16, "env": OVERLAP}),
    "no radix cache": (EAGLE_CHAIN, {"disable_radix_cache": True, "env": OVERLAP}),
    "one request at a time": (TREE, {"max_running_requests": 1}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, models, plain, rounds):
    setting, options = VARIANTS[name]
    outcome = run(models, setting, random_schedule(name), **options)[0]
    assert outcome.tokens == plain.tokens
    seen = Rounds(outcome, rounds(*setting))
    assert seen.on > 10
    assert seen.off > 10
    assert seen.wrong == []


@pytest.mark.parametrize("setting", [CHAIN, EAGLE3_TREE], ids=str)
def test_wide_catch_up(setting, models, plain, rounds):
    """More pairs than W go in one forward, at the very end of a request's table row as well."""
    mode = f"schedule:{'1' * 3}{'0' * 20}"
    length = max(map(len, PROMPTS)) + MAX_NEW_TOKENS + setting.num_draft_tokens
    outcome = run(models, setting, mode, context_length=length)[0]
    assert outcome.tokens == plain.tokens
    seen = Rounds(outcome, rounds(*setting))
    assert seen.wrong == []
    widths = [batch[0].width for batch in outcome.steps]
    resumed = sum(a == 1 and b > 1 for a, b in itertools.pairwise(widths))
    assert outcome.ops["catch_ups"] == resumed > 0


@pytest.mark.parametrize("env", [{}, OVERLAP], ids=["sync", "overlap"])
def test_coming_and_going(env, models, plain, rounds):
    """Requests of unequal length over three running slots: rows change hands all the time."""
    lengths = [5, 32, 9, 1, 17, 30, 2, 24]
    outcome = run(
        models,
        TREE,
        random_schedule(5),
        env=env,
        max_running_requests=3,
        sampling=[{"max_new_tokens": n} for n in lengths],
    )[0]
    assert outcome.tokens == [t[:n] for t, n in zip(plain.tokens, lengths, strict=True)]
    seen = Rounds(outcome, rounds(*TREE))
    assert seen.on > 10
    assert seen.off > 10
    assert seen.wrong == []


@pytest.mark.parametrize(
    ("setting", "pool", "env"),
    [(CHAIN, 230, OVERLAP), (TREE, 330, {}), (TREE, 330, OVERLAP)],
    ids=["chain", "tree", "tree-overlap"],
)
def test_retraction(setting, pool, env, models, plain, rounds):
    """Requests lose their slots in any mode and start again, with nothing pending."""
    env = {"SGLANG_INIT_NEW_TOKEN_RATIO": "0.01", **env}
    outcome = run(models, setting, random_schedule(7), env=env, max_total_tokens=pool)[0]
    assert outcome.tokens == plain.tokens
    assert outcome.total("num_retractions") > 0
    assert Rounds(outcome, rounds(*setting)).wrong == []


SECOND_TURNS = {
    "chain": (EAGLE_CHAIN, {}),
    "standalone": (CHAIN, {}),
    "tree": (TREE, {}),
    "tree, overlap": (TREE, OVERLAP),
    "tree, ring of 8": (TREE, {"SPECFUSED_RING": "8"}),
    "tree, ring of 8, overlap": (TREE, {"SPECFUSED_RING": "8", **OVERLAP}),
}


def two_turns(models, setting, answers, env, **options):
    """A prompt answered without drafting; then one that goes on from the answer, with it."""
    tokens, _ = answers[SECOND_TURN]
    length = len(PROMPTS[SECOND_TURN])
    prompt, longer = tokens[:length], tokens[: length + MAX_NEW_TOKENS]
    # Overlap launches a step that turns out to be one too many.
    off = "0" * (MAX_NEW_TOKENS - 1 + ("STANDINS_OVERLAP" in env))
    mode = f"schedule:{off}{'1' * 999}"
    first, second = run(models, setting, mode, [prompt], env=env, then=[[longer]], **options)
    assert first.tokens == [tokens[length : length + MAX_NEW_TOKENS]]
    assert second.tokens == [tokens[len(longer) : len(longer) + MAX_NEW_TOKENS]]
    seen = Rounds(second, answers)
    assert seen.off == len(off)
    assert seen.on > 5
    return seen, second.meta[0]["cached_tokens"] - length


@pytest.mark.parametrize("name", SECOND_TURNS)
def test_second_turn(name, models, rounds):
    """What was decoded off enters the prefix cache only as far as it has draft KV."""
    setting, env = SECOND_TURNS[name]
    seen, cached = two_turns(models, setting, rounds(*setting), env)
    assert seen.wrong == []
    if "SPECFUSED_RING" in env:  # what was extended when the ring was full is kept
        assert 10 < cached < MAX_NEW_TOKENS - 1
    else:
        assert cached in (-1, 0)


def test_off_for_ever_caches_everything(models, rounds):
    """Without a draft there is no hole to keep out of the cache."""
    (tokens, _), length = rounds(*CHAIN)[SECOND_TURN], len(PROMPTS[SECOND_TURN])
    longer = tokens[: length + MAX_NEW_TOKENS]
    first, second = run(models, CHAIN, "off", [tokens[:length]], then=[[longer]])
    assert first.tokens + second.tokens == [
        longer[length:],
        tokens[len(longer) : len(longer) + MAX_NEW_TOKENS],
    ]
    assert second.meta[0]["cached_tokens"] > len(longer) - 3


def test_cached_hole_changes_acceptance(models, rounds):
    """Control: the same prefix, cached to its end."""
    seen, cached = two_turns(models, CHAIN, rounds(*CHAIN), {}, fault="cache_all")
    assert cached > MAX_NEW_TOKENS - 3
    assert seen.wrong != []


def test_off_steps_publish_the_end_of_reads(models):
    """Without it the scheduler waits for the whole step, and nothing overlaps."""
    outcome = run(models, CHAIN, RUNS, env=OVERLAP)[0]
    off = sum(batch[0].width == 1 for batch in outcome.steps)
    assert outcome.ops["reads_done"] == off > 0


def test_auto_is_the_default(models, plain, capfd):
    """Where decode runs on specfused and nothing is said: measured at start, and while it runs."""
    outcome = run(models, CHAIN, "", log_level="info", decode_log_interval=4)[0]
    assert outcome.tokens == plain.tokens
    assert outcome.ops["commit"] == len(outcome.steps) > 0
    log = capfd.readouterr().err
    assert "specfused worker: SPECFUSED_MODE=auto; ring of 32 tokens" in log
    assert int(re.search(r"together as much as (\d+) KV tokens", log)[1]) > 0
    assert re.search(r"step times in ms .*on 1 x 256: \d.*off 8 x 256: \d", log)
    assert re.search(r"specfused: drafting (on|off), .*; auto: .* ms = ", log)


def test_logprobs(models, plain):
    outcome = run(models, TREE, RUNS, return_logprob=True)[0]
    assert outcome.tokens == plain.tokens
    for ours, reference in zip(outcome.logprobs, plain.logprobs, strict=True):
        assert ours == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("setting", [CHAIN, TREE], ids=str)
@pytest.mark.parametrize(
    ("temperature", "sampling"),
    [(1e-4, {}), (1.0, {"top_p": 1e-6}), (1.0, {"top_p": 1e-6, "top_k": 5})],
    ids=["cold", "top_p", "top_k and top_p"],
)
def test_sampled(temperature, sampling, setting, models, plain):
    """Where the second choice has no chance, sampling must equal greedy."""
    outcome = run(models, setting, RUNS, temperature=temperature, sampling=sampling)[0]
    assert [t[1:] for t in outcome.tokens] == [t[1:] for t in plain.tokens]
    assert outcome.ops["commit"] == len(outcome.steps)
    assert outcome.ops["compact"] == 0


ADJUSTED = {
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {"7": 9.0, "300": 11.0}},
}


@pytest.mark.parametrize("name", ADJUSTED)
def test_adjusted_logits(name, models, plain):
    """Penalties and bias count as they do in SGLang's own worker."""
    options = {"sampling": ADJUSTED[name], **speculation(models, *TREE)}
    stock = run_engine(models, PROMPTS, MAX_NEW_TOKENS, **options)[0]
    ours = run(models, TREE, "on", sampling=ADJUSTED[name])[0]
    assert ours.tokens == stock.tokens != plain.tokens
    assert ours.histograms == stock.histograms


@pytest.mark.parametrize("mode", ["on", RUNS])
def test_simulated_acceptance(mode, models):
    """SGLANG_SIMULATE_ACC_LEN is obeyed: 3 tokens a round, the one that is made up."""
    simulate = {"sglang.srt.speculative.spec_utils:SIMULATE_ACC_LEN": 3.0}
    outcome = run(models, TREE, mode, attributes=simulate)[0]
    rounds = [sum(column) for column in itertools.zip_longest(*outcome.histograms, fillvalue=0)]
    assert rounds[2] > 10
    assert sum(rounds[:1]) > 0 or mode == "on"
    assert rounds[1] == sum(rounds[3:]) == 0
    assert {token for tokens in outcome.tokens for token in tokens[1:]} == {100}
    assert outcome.ops["compact"] == 0 < outcome.ops["commit"]


@pytest.mark.parametrize("setting", [CHAIN, DRAFT_TREE], ids=str)
def test_hole_changes_acceptance(setting, models, plain, rounds):
    """Control: pairs whose draft KV goes nowhere cost acceptance, and no token."""
    outcome = run(models, setting, random_schedule(3), fault="hole")[0]
    assert outcome.tokens == plain.tokens
    assert len(Rounds(outcome, rounds(*setting)).wrong) > 3
