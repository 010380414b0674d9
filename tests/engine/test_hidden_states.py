# SPDX-License-Identifier: Apache-2.0
"""Hidden states that a request asks for: those of SGLang's own worker, whatever each step did."""

import pytest
import torch
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, TREE
from harness import run_engine, speculation
from switching import EAGLE3_TREE, EAGLE_CHAIN, FLIPS, OVERLAP, random_schedule, run

pytestmark = pytest.mark.engine

# One kind after the other: batches hold requests of all three.
ASKED = [(True, "last", False)[i % 3] for i in range(len(PROMPTS))]
OPTIONS = {"return_hidden_states": ASKED, "enable_return_hidden_states": True}


def rows(outcome, index):
    """[rows, H'] of a request: its prompt's, then one for each token fed back."""
    prompt, *following = outcome.meta[index]["hidden_states"]
    return torch.tensor([*prompt, *following])


def same(ours, reference):
    return torch.allclose(ours, reference, rtol=1e-4, atol=1e-4)


VARIANTS = {
    "eagle chain, overlap": (EAGLE_CHAIN, random_schedule(3), OVERLAP),
    "tree, overlap": (TREE, FLIPS, OVERLAP),
    "eagle3 tree": (EAGLE3_TREE, random_schedule(4), {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states(name, models, plain):
    setting, mode, env = VARIANTS[name]
    ours = run(models, setting, mode, env=env, **OPTIONS)[0]
    options = {**OPTIONS, **speculation(models, *setting)}
    reference = run_engine(models, PROMPTS, MAX_NEW_TOKENS, **options)[0]
    assert ours.tokens == reference.tokens == plain.tokens
    for index, asked in enumerate(ASKED):
        if asked is True:
            mine, expected = rows(ours, index), rows(reference, index)
            # A step that drafts also returns what it accepted beyond the last token.
            length = len(PROMPTS[index]) + MAX_NEW_TOKENS - 1
            assert min(len(mine), len(expected)) >= length
            assert same(mine[:length], expected[:length])
        elif asked == "last":
            assert same(*(torch.tensor(o.meta[index]["hidden_states"]) for o in (ours, reference)))
        else:
            assert "hidden_states" not in ours.meta[index]


def test_standalone_returns_none(models, plain):
    """SGLang keeps no hidden states where the draft takes none, and neither do off steps."""
    outcome = run(models, CHAIN, FLIPS, **OPTIONS)[0]
    assert outcome.tokens == plain.tokens
    assert not any(meta.get("hidden_states") for meta in outcome.meta)
