# SPDX-License-Identifier: Apache-2.0
"""Sampled acceptance in double, from its definition, and the statistic that judges samplers.

One tree for the whole batch, so that every node is one step of tensor arithmetic. Shares no code
with the C++.
"""

import torch

FAULTS = ("keep the rejected", "count twice", "one coin", "ignore q", "plain bonus")


def children_of(links, width):
    """Children of each node in order; a link that does not point forward ends the list."""
    if links is None:
        return [[node + 1] if node + 1 < width else [] for node in range(width)]
    lists = []
    for node in range(width):
        found, at, floor = [], links[0][node], node
        while floor < at < width:
            found.append(at)
            at, floor = links[1][at], at
        lists.append(found)
    return lists


def pick(probs, rows, tokens):
    """probs[row, token], 0 for a token outside of the vocabulary."""
    known = (tokens >= 0) & (tokens < probs.shape[-1])
    return torch.where(known, probs[rows, tokens.clamp(0, probs.shape[-1] - 1)], 0)


def sampled_step(links, draft, probs, coins, final, *, path, single=1.0, acc=1.0, q=None, fault=""):
    """The walk and the bonus token of every request.

    draft [bs, W], probs [bs, W, vocab] double, coins [bs, W], final [bs], q [bs, rows, vocab].

    Returns:
        list of accepted nodes per request, bonus [bs], and how far the nearest coin is from the
        border of its decision [bs]: where that is rounding, another answer is right too.
    """
    bs, width = draft.shape
    every = torch.arange(bs)
    coins, final = coins.double(), final.double()
    at, depth = torch.zeros(bs, dtype=torch.int64), torch.zeros(bs, dtype=torch.int64)
    bonus, margin = torch.zeros(bs, dtype=torch.int64), torch.full((bs,), 1.0).double()
    paths = [[0] for _ in range(bs)]
    for node, children in enumerate(children_of(links, width)):
        here = at == node
        if not here.any():
            continue
        p = probs[:, node]
        asked = here & (depth + 1 < path)
        total, left = torch.zeros(bs).double(), p.clone()
        coin, rejected = coins[:, node], torch.zeros(bs, dtype=torch.bool)
        for place, child in enumerate(children):
            token = draft[:, child]
            of_token = pick(p, every, token)
            if q is not None:
                of_draft = pick(q[:, min(node, q.shape[1] - 1)].double(), every, token)
                new = asked if place == 0 else torch.zeros_like(asked)
                border = torch.where(of_draft > 0, of_token / of_draft, 0)
                if fault == "ignore q":
                    border = of_token
                accepted = new & (of_draft > 0) & (coin < border)
            else:
                seen = torch.stack(
                    [draft[:, c] == token for c in children[:place]] or [~asked | asked]
                )
                seen = seen.any(0) if place else torch.zeros_like(asked)
                new = asked & (~seen if fault != "count twice" else True)
                total = torch.where(new, total + of_token, total)
                border = total / max(acc, 1e-9)
                accepted = new & (of_token > 0) & ((coin < border) | (of_token >= single))
                away = torch.where(of_token == single, 1, (of_token - single).abs())
                margin = torch.where(new, margin.minimum(away), margin)
            margin = torch.where(new, margin.minimum((coin - border).abs()), margin)
            for r in accepted.nonzero().flatten().tolist() if fault == "" else []:
                paths[r].append(child)
            at, depth = torch.where(accepted, child, at), depth + accepted
            out = new & ~accepted
            rejected |= out
            asked &= ~accepted
            if q is None and fault != "keep the rejected":
                known = (token >= 0) & (token < p.shape[1])
                left[every[out & known], token[out & known]] = 0
        if q is not None and fault != "plain bonus":
            residual = (p - q[:, min(node, q.shape[1] - 1)].double()).clamp(min=0)
            left = torch.where(rejected[:, None], residual, p)
        last = at == node
        cumulative = left.cumsum(1)
        u = (coin if fault == "one coin" else final) * cumulative[:, -1]
        drawn = (cumulative > u[:, None]).int().argmax(1)
        edges = (cumulative - u[:, None]).abs() / cumulative[:, -1:].clamp(min=1e-300)
        bonus = torch.where(last, drawn, bonus)
        margin = torch.where(last, margin.minimum(edges.min(1).values), margin)
        margin = torch.where(last & (cumulative[:, -1] < 1e-6), 0, margin)
    if fault:
        paths = at
    return paths, bonus, margin


def normal_score(counts, probs):
    """Chi-square of counts against probabilities as a standard normal score (Wilson-Hilferty)."""
    expected = probs * counts.sum()
    assert expected.min() > 20, "too few draws for the statistic"
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    df = counts.numel() - 1
    return ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5
