# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults: the comparisons of the other tests must see each of them."""

import pytest
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, TREE, padded
from harness import EngineDied, call, run_engine, speculation, wrap

pytestmark = pytest.mark.engine

DRAFT_TREE = TREE._replace(algorithm="STANDALONE")


def test_causal_mask_changes_tokens(models, plain):
    """A tree verified as if it were a chain."""
    outcome = run_engine(
        models, PROMPTS, MAX_NEW_TOKENS, fault="mask", **speculation(models, *TREE)
    )[0]
    assert outcome.tokens != plain.tokens


@pytest.mark.parametrize("setting", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_wrong_slot_changes_tokens(setting, models, plain):
    """One committed position of the target reads another one's slot."""
    engine_args = speculation(models, *setting) if setting else {}
    outcome = run_engine(models, PROMPTS, MAX_NEW_TOKENS, fault="slot", **engine_args)[0]
    assert outcome.tokens != plain.tokens


@pytest.mark.parametrize("fault", ["draft_slot", "draft_mask"])
def test_draft_fault_changes_acceptance(fault, models, plain, truth):
    """What the draft reads decides no token, so only the histograms can show it."""
    outcome = run_engine(
        models, PROMPTS, MAX_NEW_TOKENS, fault=fault, **speculation(models, *DRAFT_TREE)
    )[0]
    assert outcome.tokens == plain.tokens
    expected = [answer.histogram for answer in truth(*DRAFT_TREE, MAX_NEW_TOKENS)]
    assert padded(outcome.histograms, DRAFT_TREE.steps) != expected


def test_failed_scheduler_is_contained(models, capfd):
    """An exception in an op ends that engine and nothing else."""
    with pytest.raises(EngineDied):
        run_engine(models, PROMPTS[:1], 4, fault="raise")
    assert "deliberate fault" in capfd.readouterr().err


def test_heads_are_checked_before_weights_load(models, capfd):
    """Without the check of device and model: the GPU's answer to what this machine could serve."""

    def prepare():
        wrap("specfused.sglang.ranks:check_split", lambda original, runner: refuse(runner))

    def refuse(runner):
        from specfused.sglang import features

        features.refuse(f"a model of {hasattr(runner, 'model')}")

    with pytest.raises(EngineDied):
        run_engine(models, PROMPTS[:1], 4, prepare=prepare)
    assert "specfused: a model of False is not supported" in capfd.readouterr().err


def test_missing_plugin_is_an_error(models, capfd):
    """Without the plugin the name is unknown; no other backend may answer in its place."""
    with pytest.raises(EngineDied):
        run_engine(models, PROMPTS[:1], 4, env={"SGLANG_PLUGINS": "specfused_standins"})
    assert "Invalid attention backend: specfused" in capfd.readouterr().err


def _leave():
    raise SystemExit(3)


def test_failure_in_the_child_is_raised():
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        call(_leave)
