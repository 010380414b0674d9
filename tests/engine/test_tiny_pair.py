# SPDX-License-Identifier: Apache-2.0
"""Real text on the trained pair that specfused ships.

Random weights accept by accident and nearly tie. A trained pair accepts by agreement, so here
acceptance is long and ragged, the accepted nodes lie anywhere in the tree, and what a mistake does
to the text is no accident either. The second opinion is models/simulate.py of the source tree,
which decides from the tokens alone, without SGLang and without any cache.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import Setting, padded
from harness import run_engine, speculation

import specfused.models

pytestmark = pytest.mark.engine

# Of unequal length and unequal difficulty, the last one easy; two bytes are one character.
PROMPTS = [
    "    # Copyright 1999 by ",
    "    raise ValueError(",
    "def quicksort(items):\n    ",
    "# Größe: the number of bytes that ",
    "SELECT name FROM people WHERE ",
    'def fibonacci(n):\n    """Return the n-th ',
    "lambda a, b: ",
    "import os\nimport sys\n\ndef main():\n    for name in ",
]
MAX_NEW_TOKENS = 40
CHAIN = Setting("EAGLE3", 3, 1, 4)
TREE = Setting("EAGLE3", 3, 4, 16)
EAGLE_TREE = Setting("EAGLE", 3, 4, 16)
TEXT = {"skip_tokenizer_init": False}
# A request that ends early is in no batch with the others; the end itself is the grammar's test.
NO_EOS = {"ignore_eos": True}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "kind": {"enum": ["file", "folder", "link"]},
        "hidden": {"type": "boolean"},
    },
    "required": ["name", "kind", "hidden"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pair(models):
    """The installed checkpoints; `models` has checked SGLang and imported what an engine needs."""
    for name in specfused.models.NAMES:
        specfused.models.path(name)
    return specfused.models.TINY


@pytest.fixture(scope="module")
def source(pair):
    """load(name) and generate() of the source tree's models/, which no wheel has."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
    try:
        import nets
        import simulate
    finally:
        del sys.path[0]
    return SimpleNamespace(
        load=lambda name: nets.load(pair / name.lower()), generate=simulate.generate
    )


@pytest.fixture(scope="module")
def simulated(source, work_folder):
    """simulated(setting) -> (tokens, histogram of accepted drafts), each a list by prompt."""

    def compute(setting):
        stored = work_folder / f"simulated_{setting}.json"
        if not stored.exists():
            target, head = source.load("target"), source.load(setting.algorithm)
            prompts = [specfused.models.encode(prompt) for prompt in PROMPTS]
            answer = source.generate(target, head, prompts, setting[1:], MAX_NEW_TOKENS)
            stored.write_text(json.dumps(answer))
        return json.loads(stored.read_text())

    return compute


@pytest.fixture(scope="module")
def reference(pair):
    """SGLang's own backend without speculation."""
    return generate(pair, attention_backend="torch_native")


def generate(pair, setting=None, max_new_tokens=MAX_NEW_TOKENS, sampling=NO_EOS, **options):
    """Text in, text out, and every text must be that of its tokens."""
    options |= speculation(pair, *setting) if setting else {}
    outcome = run_engine(pair, PROMPTS, max_new_tokens, sampling=sampling, **TEXT, **options)[0]
    assert outcome.texts == [specfused.models.decode(tokens) for tokens in outcome.tokens]
    return outcome


def accept_length(histograms):
    """Mean tokens a round, with the one that the target adds."""
    counts = [sum(column) for column in zip(*histograms, strict=True)]
    return sum(i * count for i, count in enumerate(counts, start=1)) / sum(counts)


def test_reference_text(pair, reference, simulated):
    """The tokenizer's ids are the bytes, and SGLang generates what plain PyTorch does."""
    lengths = [meta["prompt_tokens"] for meta in reference.meta]
    assert lengths == [len(prompt.encode()) for prompt in PROMPTS]
    assert reference.tokens == simulated(CHAIN)[0]
    assert len(set(reference.texts)) == len(PROMPTS)


def test_plain_text(pair, reference):
    outcome = generate(pair)
    assert outcome.texts == reference.texts
    assert outcome.tokens == reference.tokens
    assert outcome.ops["decode_attn"] > 0


@pytest.mark.parametrize("setting", [CHAIN, TREE, EAGLE_TREE], ids=str)
def test_speculative_text(setting, pair, reference, simulated):
    """Equal text from ragged rounds, and request by request the acceptance that was computed."""
    outcome = generate(pair, setting)
    assert outcome.texts == reference.texts
    assert outcome.tokens == reference.tokens
    histograms = padded(outcome.histograms, setting.steps)
    assert histograms == simulated(setting)[1]
    # Otherwise one length for the whole batch would do.
    assert outcome.ops["ragged_rounds"] > 5
    if setting.topk == 1:
        assert accept_length(histograms) > 2
        assert outcome.ops["moved_rows"] == 0
    else:
        assert accept_length(histograms) > 2.5
        assert outcome.ops["forked_rounds"] > 5
        assert outcome.ops["moved_rows"] > 50


@pytest.mark.parametrize("setting", [CHAIN, TREE, EAGLE_TREE], ids=str)
def test_switching_worker_text(setting, pair, reference, simulated):
    """The same from the worker that ends its steps in one commit; then drafting now and then."""
    outcome = generate(pair, setting, env={"SPECFUSED_MODE": "on", "STANDINS_OVERLAP": "1"})
    assert outcome.tokens == reference.tokens
    assert padded(outcome.histograms, setting.steps) == simulated(setting)[1]
    assert outcome.ops["commit"] > 0
    assert outcome.ops["moved_rows"] == outcome.ops["compact"] == 0
    mode = "schedule:111001000011010"
    outcome = generate(pair, setting, env={"SPECFUSED_MODE": mode, "STANDINS_OVERLAP": "1"})
    assert outcome.texts == reference.texts
    assert outcome.ops["catch_ups"] > 0


def test_tree_accepts_more_than_chain(simulated):
    """What the engines accept is this, see test_speculative_text."""
    assert accept_length(simulated(TREE)[1]) > accept_length(simulated(CHAIN)[1]) + 0.2


@pytest.mark.parametrize("setting", [TREE, EAGLE_TREE], ids=str)
def test_missing_compaction_changes_text(setting, pair, reference):
    """Accepted nodes that stay where they were drafted: later rounds read refused ones."""
    outcome = generate(pair, setting, fault="move")
    assert outcome.ops["moved_rows"] > 50  # what should have moved
    changed = [a != b for a, b in zip(outcome.texts, reference.texts, strict=True)]
    assert sum(changed) > len(PROMPTS) // 2


def test_missing_compaction_is_harmless_in_a_chain(pair, reference):
    """There nothing has to move, so the fault alone is not what changes a text."""
    assert generate(pair, CHAIN, fault="move").texts == reference.texts


@pytest.fixture(scope="module")
def constrained(pair):
    return generate_json(pair, attention_backend="torch_native")


def generate_json(pair, setting=None, **options):
    """Every other request must answer in JSON, in one batch with free ones."""
    grammar = {"json_schema": json.dumps(SCHEMA)}
    sampling = [NO_EOS if i % 2 else grammar for i in range(len(PROMPTS))]
    options["constrained_json_disable_any_whitespace"] = True
    return generate(pair, setting, 64, sampling, grammar_backend="xgrammar", **options)


@pytest.mark.parametrize(
    ("setting", "mode"),
    [(None, "stock"), (CHAIN, "stock"), (TREE, "stock"), (TREE, "on"), (TREE, "schedule:110100")],
    ids=["plain", "chain", "tree", "on", "switching"],
)
def test_json(setting, mode, pair, constrained):
    """The grammar masks every node by its own path, and ends the request in mid-round."""
    outcome = generate_json(pair, setting, env={"SPECFUSED_MODE": mode, "STANDINS_OVERLAP": "1"})
    if mode != "stock":
        assert outcome.ops["commit"] > 0
    elif setting:
        assert accept_length(padded(outcome.histograms[::2], setting.steps)) > 1.5
        assert outcome.ops["ragged_rounds"] > 5
    assert outcome.texts == constrained.texts
    for text, meta in list(zip(outcome.texts, outcome.meta, strict=True))[::2]:
        answer = json.loads(text)
        assert answer.keys() == SCHEMA["properties"].keys()
        assert 1 <= len(answer["name"]) <= 8
        assert answer["kind"] in SCHEMA["properties"]["kind"]["enum"]
        assert isinstance(answer["hidden"], bool)
        assert meta["finish_reason"]["type"] == "stop"


def surprise(target, tokens, temperature):
    """Mean over all requests of -log p(token) less what it is on average for such a p.

    0 for tokens that were drawn from the target, whatever was drafted; with the 320 tokens of a
    test the deviation is 0.04. Greedy tokens have -0.3.
    """
    total = 0.0
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([specfused.models.encode(prompt) + answer])
        logp = (target(ids)[0][0, -len(answer) - 1 : -1] / temperature).log_softmax(-1)
        seen = logp.gather(1, torch.tensor(answer).view(-1, 1)).sum()
        total += float((logp.exp() * logp).sum() - seen)
    return total / sum(map(len, tokens))


@pytest.mark.parametrize("setting", [CHAIN, TREE], ids=str)
def test_sampled_text(setting, pair, reference, source):
    """Coins decide which branch is taken, and yet the tokens are distributed as the target says."""
    sampled = {"temperature": 0.8, "env": {"STANDINS_SAMPLING": "1"}}
    outcome = generate(pair, setting, **sampled)
    histograms = padded(outcome.histograms, setting.steps)
    assert outcome.ops["tree_speculative_sampling_target_only"] > 0
    assert outcome.ops["ragged_rounds"] > 5
    assert accept_length(histograms) > (2.5 if setting.topk > 1 else 2)
    target = source.load("target")
    assert [len(tokens) for tokens in outcome.tokens] == [MAX_NEW_TOKENS] * len(PROMPTS)
    assert all(0 <= token < target.s.vocab for tokens in outcome.tokens for token in tokens)
    assert outcome.texts != reference.texts
    assert abs(surprise(target, outcome.tokens, 0.8)) < 0.25
    if setting.topk > 1:
        broken = generate(pair, setting, fault="move", **sampled)
        assert surprise(target, broken.tokens, 0.8) > 0.5  # 2.9 here


@pytest.mark.parametrize("mode", ["on", "off", "schedule:1101000"])
def test_switching_worker_samples(mode, pair, reference, source):
    """Sampled by `commit`, whatever the width of the step: the same law."""
    env = {"SPECFUSED_MODE": mode, "STANDINS_OVERLAP": "1"}
    outcome = generate(pair, TREE, temperature=0.8, env=env)
    assert outcome.ops["commit"] > 0
    assert outcome.ops["tree_speculative_sampling_target_only"] == outcome.ops["compact"] == 0
    target = source.load("target")
    assert outcome.texts != reference.texts
    assert abs(surprise(target, outcome.tokens, 0.8)) < 0.25
