# SPDX-License-Identifier: Apache-2.0
"""Speculation does not change what is sampled: the joint law of the first two emitted tokens.

The target is a table P[last token]; whatever was drafted, token pairs must have the law
P[root][a] * P[a][b]. A request that emitted one token takes its second from a step of width 1, as a
server would that switched speculation off. The same statistic has to reject samplers with a fault.
"""

import pytest
import torch
from commit_setup import outputs
from sampling_reference import normal_score, sampled_step
from tree_setup import chain_parents, links_of_parents

from specfused import ops

VOCAB, ROOT, DRAWS = 6, 2, 100_000
ACCEPTED, REJECTED = 5.0, 6.0  # standard deviations; chance reaches 5 once in 3 million runs
TREES = {
    "chain 4": chain_parents(4),
    "chain 16": chain_parents(16),
    "tree 4": [None, 0, 0, 1],
    "tree 16": [None, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 8, 9, 9, 14],
}


def table(rng, sharp):
    return (torch.randn(VOCAB, VOCAB, generator=rng) * sharp).softmax(1).clamp(min=0.03)


def drafts(rng, parents, q=None):
    """Tokens of every node: drawn from q of the parent's token, or any, siblings often equal."""
    tokens = [torch.full((DRAWS,), ROOT)]
    for parent in parents[1:]:
        if q is None:
            tokens.append(torch.randint(0, VOCAB - 1, (DRAWS,), generator=rng))
        else:
            rows = q[tokens[parent]]
            tokens.append(torch.multinomial(rows, 1, generator=rng).flatten())
    return torch.stack(tokens, 1)


def coins(rng, width):
    return torch.rand(DRAWS, width, generator=rng), torch.rand(DRAWS, generator=rng)


def step(device, draft, law, rng, links=None, q=None, by="target_probs", **rule):
    """One commit of all draws; the emitted tokens [draws, width], -1 behind them."""
    bs, width = draft.shape
    walk, final = coins(rng, width)
    rows = law[draft.flatten()].float()
    args = {"draft_tokens": draft, "coins": walk, "coins_final": final, by: rows, **rule}
    if by == "logits":
        args |= {"logits": (rows.log() * 0.7).float(), "temperatures": torch.full((bs,), 0.7)}
    if q is not None:
        args["draft_probs"] = q[draft].float()
    if links is not None:
        for name, part in zip(("retrieve_next_token", "retrieve_next_sibling"), links, strict=True):
            args[name] = torch.tensor(part).repeat(bs, 1)
    args["seq_lens"] = torch.zeros(bs, dtype=torch.int64)
    size = ops.commit_workspace_bytes(bs, width, VOCAB)
    args["workspace"] = torch.zeros(size, dtype=torch.uint8)
    out = outputs(bs, width, device)
    ops.commit(**{k: v.to(device) if torch.is_tensor(v) else v for k, v in args.items()}, **out)
    return out["accept_tokens"].cpu().long()


def score(first, second, law):
    """How far the pairs are from their law."""
    law = law / law.sum(1, keepdim=True)
    want = (law[ROOT][:, None] * law).flatten()
    return normal_score(torch.bincount(first * VOCAB + second, minlength=VOCAB**2), want)


def pairs(emitted, device, law, rng, by="target_probs"):
    """The first two tokens; a missing second one from a non-spec step."""
    first, second = emitted[:, 0], emitted[:, 1]
    alone = step(device, first[:, None].contiguous(), law, rng, by=by)[:, 0]
    return first, torch.where(second < 0, alone, second)


@pytest.mark.parametrize(
    "tree,by",
    [
        ("chain 4", "logits"),
        ("chain 16", "target_probs"),
        ("tree 4", "target_probs"),
        ("tree 16", "logits"),
    ],
)
def test_target_only(tree, by, device, rng):
    law = table(rng, 1.0)
    law = law / law.sum(1, keepdim=True)
    draft, links = drafts(rng, TREES[tree]), links_of_parents(TREES[tree])
    emitted = step(device, draft, law, rng, links, by=by)
    assert 0.02 < (emitted[:, 1] >= 0).double().mean() < 0.99, "both kinds of second token"
    assert score(*pairs(emitted, device, law, rng, by), law) < ACCEPTED


@pytest.mark.parametrize("width,by", [(4, "logits"), (16, "target_probs")])
def test_draft_probs(width, by, device, rng):
    law, q = table(rng, 1.0), table(rng, 1.0)
    law, q = law / law.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    draft = drafts(rng, chain_parents(width), q)
    emitted = step(device, draft, law, rng, q=q, by=by)
    assert 0.02 < (emitted[:, 1] >= 0).double().mean() < 0.99
    assert score(*pairs(emitted, device, law, rng, by), law) < ACCEPTED


def test_a_threshold_changes_the_law(device, rng):
    """What accepts more is rejected by the statistic: it sees a bias of the op itself."""
    law = table(rng, 1.0)
    draft, links = drafts(rng, TREES["tree 16"]), links_of_parents(TREES["tree 16"])
    for rule in ({"threshold_acc": 0.8}, {"threshold_single": 0.3}):
        emitted = step(device, draft, law / law.sum(1, keepdim=True), rng, links, **rule)
        assert score(*pairs(emitted, device, law, rng), law) > REJECTED


FAULTS = {
    "keep the rejected": "tree 4",
    "count twice": "tree 4",
    "one coin": "tree 4",
    "ignore q": "chain 4",
    "plain bonus": "chain 4",
    "": "tree 4",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_statistic_rejects_a_biased_rule(fault, rng):
    """Faults planted in the reference; without one it passes."""
    parents = TREES[FAULTS[fault]]
    law, q = table(rng, 1.0).double(), table(rng, 1.0).double()
    law, q = law / law.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    chain = FAULTS[fault].startswith("chain")
    draft = drafts(rng, parents, q if chain else None)
    if fault == "count twice":
        draft[:, 1:] = 0
    walk, final = coins(rng, len(parents))
    at, bonus = sampled_step(
        *(links_of_parents(parents), draft, law[draft], walk, final),
        path=2,
        q=q[draft] if chain else None,
        fault=fault or "none",
    )[:2]
    first = torch.where(at > 0, draft.gather(1, at[:, None])[:, 0], bonus)
    alone = torch.multinomial(law[first], 1, generator=rng).flatten()
    found = score(first, torch.where(at > 0, bonus, alone), law)
    assert found < ACCEPTED if fault == "" else found > REJECTED, f"{found:.1f} deviations"
