# SPDX-License-Identifier: Apache-2.0
"""What a server does around the step: pages, chunks, the radix cache, a full pool, overlap."""

import pytest
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, TREE, padded
from harness import run_engine, speculation

pytestmark = pytest.mark.engine

WIDE_TREE = TREE._replace(steps=5, topk=8, num_draft_tokens=32)
# Trees on pages: SGLang has a list of backend names for them, which the prefill name must be on.
# "triton" is served by torch_native here, see standins/specfused_standins.py.
HYBRID = {
    "attention_backend": "triton",
    "decode_attention_backend": "specfused",
    "speculative_attention_mode": "decode",
}
VARIANTS = {
    "chain on pages": (CHAIN, {"page_size": 16}),
    "eagle chain on pages": (TREE._replace(steps=3, topk=1, num_draft_tokens=4), {"page_size": 16}),
    "tree on pages": (TREE, {"page_size": 16, **HYBRID}),
    "wide tree on pages": (WIDE_TREE, {"page_size": 16, **HYBRID}),
    "tree, hybrid form on single slots": (TREE, HYBRID),
    "chunked prefill": (TREE, {"chunked_prefill_size": 16}),
    "chunked prefill on pages": (TREE, {"chunked_prefill_size": 32, "page_size": 16, **HYBRID}),
    "no radix cache": (TREE, {"disable_radix_cache": True}),
    "one request at a time": (TREE, {"max_running_requests": 1}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, models, plain, truth):
    """Neither tokens nor acceptance depend on how the server keeps its slots."""
    setting, engine_args = VARIANTS[name]
    outcome = run_engine(
        models, PROMPTS, MAX_NEW_TOKENS, **speculation(models, *setting), **engine_args
    )[0]
    assert outcome.tokens == plain.tokens
    assert outcome.total("num_retractions") == 0  # it would start a histogram anew
    expected = [answer.histogram for answer in truth(*setting, MAX_NEW_TOKENS)]
    assert padded(outcome.histograms, setting.steps) == expected
    assert outcome.phases["target.TARGET_VERIFY"] > 0
    assert outcome.phases["draft.DECODE"] > 0


@pytest.mark.parametrize("setting", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_overlap_schedule(setting, models, plain):
    """The scheduler prepares a step while the one before runs; lengths stay on the device."""
    engine_args = speculation(models, *setting) if setting else {}
    outcome = run_engine(
        models, PROMPTS, MAX_NEW_TOKENS, env={"STANDINS_OVERLAP": "1"}, **engine_args
    )[0]
    assert outcome.tokens == plain.tokens
    assert outcome.ops["event_loop_overlap"] == 1


def test_radix_reuse(models, plain, truth):
    """The second time everything but the last token comes from the cache."""
    first, second = run_engine(
        models, PROMPTS, MAX_NEW_TOKENS, repeat=2, **speculation(models, *TREE)
    )
    assert first.total("cached_tokens") == 0
    assert second.total("cached_tokens") > sum(map(len, PROMPTS)) // 2
    expected = [answer.histogram for answer in truth(*TREE, MAX_NEW_TOKENS)]
    for outcome in (first, second):
        assert outcome.tokens == plain.tokens
        assert padded(outcome.histograms, TREE.steps) == expected


@pytest.mark.parametrize("setting", [CHAIN, TREE], ids=["chain", "tree"])
def test_shared_prefixes(setting, models):
    """Requests that branch off a cached prefix."""
    prompts = [PROMPTS[5], PROMPTS[5][:30] + [400], PROMPTS[5][:50] + [7, 8], PROMPTS[5]]
    reference = run_engine(models, prompts, MAX_NEW_TOKENS, attention_backend="torch_native")[0]
    ours = run_engine(models, prompts, MAX_NEW_TOKENS, repeat=2, **speculation(models, *setting))
    assert ours[1].total("cached_tokens") > 0
    assert [outcome.tokens for outcome in ours] == [reference.tokens] * 2


@pytest.mark.parametrize(
    ("setting", "page_size", "pool"),
    [(None, 1, 200), (CHAIN, 1, 230), (CHAIN, 16, 320), (TREE, 1, 330)],
    ids=["plain", "chain", "chain on pages", "tree"],
)
def test_retraction(setting, page_size, pool, models, plain):
    """A pool too small for the batch: requests lose their slots and start again."""
    engine_args = speculation(models, *setting) if setting else {}
    outcome = run_engine(
        models,
        PROMPTS,
        MAX_NEW_TOKENS,
        max_total_tokens=pool,
        page_size=page_size,
        # Admit as if no request would generate anything.
        env={"SGLANG_INIT_NEW_TOKEN_RATIO": "0.01"},
        **engine_args,
    )[0]
    assert outcome.tokens == plain.tokens
    assert outcome.total("num_retractions") > 0


@pytest.mark.parametrize("setting", [CHAIN, TREE], ids=["chain", "tree"])
def test_logprobs(setting, models, plain):
    outcome = run_engine(
        models,
        PROMPTS,
        MAX_NEW_TOKENS,
        return_logprob=True,
        **speculation(models, *setting),
    )[0]
    assert outcome.tokens == plain.tokens
    for ours, reference in zip(outcome.logprobs, plain.logprobs, strict=True):
        assert ours == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("setting", [CHAIN, TREE], ids=["chain", "tree"])
def test_sampled_verify(setting, models, plain):
    """At a temperature that leaves the second choice no chance, sampling must equal greedy."""
    outcome = run_engine(
        models,
        PROMPTS,
        MAX_NEW_TOKENS,
        temperature=1e-4,
        env={"STANDINS_SAMPLING": "1"},
        **speculation(models, *setting),
    )[0]
    assert outcome.tokens == plain.tokens
    assert outcome.ops["tree_speculative_sampling_target_only"] > 0
