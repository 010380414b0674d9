# SPDX-License-Identifier: Apache-2.0
"""Random draft trees, as parents and as the links that the engine hands over."""

import torch


def randint(rng, low, high):
    """One integer of [low, high)."""
    return int(torch.randint(low, high, (1,), generator=rng))


def random_parents(width, rng, keep=1.0):
    """Parents of a random tree: a lower index each; each but the root is cut off at 1 - keep."""
    parents = [None]
    for node in range(1, width):
        kept = float(torch.rand(1, generator=rng)) < keep
        parents.append(randint(rng, 0, node) if kept else None)
    return parents


def chain_parents(width):
    return [None, *range(width - 1)]


def links_of_parents(parents):
    """First-child and next-sibling links, siblings in ascending order."""
    width = len(parents)
    next_token, next_sibling = [-1] * width, [-1] * width
    last_child = {}
    for node, parent in enumerate(parents):
        if parent is None:
            continue
        if parent in last_child:
            next_sibling[last_child[parent]] = node
        else:
            next_token[parent] = node
        last_child[parent] = node
    return next_token, next_sibling


def links_tensors(trees, device="cpu"):
    """[bs, W] int64 link tensors of one tree per request."""
    links = [links_of_parents(parents) for parents in trees]
    width = len(trees[0]) if trees else 1
    return tuple(
        torch.tensor([pair[i] for pair in links], dtype=torch.int64, device=device).view(-1, width)
        for i in range(2)
    )
