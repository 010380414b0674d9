# SPDX-License-Identifier: Apache-2.0
"""Plain decoding and every speculative setting: tokens, acceptance, and that our ops ran."""

import pytest
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, SETTINGS, padded
from harness import run_engine, speculation

pytestmark = pytest.mark.engine


def assert_our_ops(outcome, setting):
    """The ops, and by the backend's own count the phases, that this setting must have used."""
    assert outcome.ops["verify_attn"] > 0
    assert outcome.phases["target.TARGET_VERIFY"] > 0
    assert outcome.phases["draft.DRAFT_EXTEND_V2"] > 0
    assert (outcome.phases.get("draft.DECODE", 0) > 0) == (setting.steps > 1)


def test_reference_backend_is_greedy(plain, truth):
    """SGLang's torch_native and transformers agree on what is to be generated."""
    assert plain.tokens == [answer.tokens for answer in truth(*CHAIN, MAX_NEW_TOKENS)]


def test_plain(models, plain):
    outcome = run_engine(models, PROMPTS, MAX_NEW_TOKENS, return_logprob=True)[0]
    assert outcome.tokens == plain.tokens
    assert outcome.ops["decode_attn"] > 0
    assert outcome.phases["target.DECODE"] > 0
    for ours, reference in zip(outcome.logprobs, plain.logprobs, strict=True):
        assert ours == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_speculation(setting, models, plain, truth):
    outcome = run_engine(models, PROMPTS, MAX_NEW_TOKENS, **speculation(models, *setting))[0]
    assert outcome.tokens == plain.tokens
    expected = [answer.histogram for answer in truth(*setting, MAX_NEW_TOKENS)]
    assert padded(outcome.histograms, setting.steps) == expected
    assert_our_ops(outcome, setting)
