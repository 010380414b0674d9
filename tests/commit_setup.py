# SPDX-License-Identifier: Apache-2.0
"""Calls of commit with poisoned outputs, and what the reference expects of them."""

import reference
import torch
from tree_setup import links_of_parents, random_parents

from specfused import ops

OUTPUTS = (
    "accept_index",
    "num_correct_drafts",
    "accept_lens",
    "accept_tokens",
    "bonus_tokens",
    "new_seq_lens",
)


def outputs(bs, path, device):
    """Poisoned, so that what is not written shows."""

    def poison(*shape, dtype=torch.int32):
        return torch.full(shape, -99, dtype=dtype, device=device)

    return {
        "accept_index": poison(bs, path),
        "num_correct_drafts": poison(bs),
        "accept_lens": poison(bs),
        "accept_tokens": poison(bs, path),
        "bonus_tokens": poison(bs),
        "new_seq_lens": poison(bs, dtype=torch.int64),
    }


def int64s(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def run(draft, targets, device, *, links=None, path=None, lengths=None, **kv):
    """commit with given targets; returns the outputs as lists."""
    bs, width = len(draft), len(draft[0])
    out = outputs(bs, path or width, device)
    lengths = lengths or [10 * r for r in range(bs)]
    if links is not None:
        kv["retrieve_next_token"] = int64s(links[0], device)
        kv["retrieve_next_sibling"] = int64s(links[1], device)
    choice = {"logits": targets} if isinstance(targets, torch.Tensor) else {}
    if choice:
        size = ops.commit_workspace_bytes(bs, width, targets.shape[1])
        kv["workspace"] = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
    else:
        choice = {"targets": int64s(targets, device)}
    ops.commit(int64s(draft, device), int64s(lengths, device), **out, **choice, **kv)
    return {name: tensor.tolist() for name, tensor in out.items()}


def expected(draft, targets, links=None, path=None, lengths=None):
    """(outputs, paths) by the reference walk."""
    bs, width = len(draft), len(draft[0])
    path = path or width
    lengths = lengths or [10 * r for r in range(bs)]
    want, paths = {name: [] for name in OUTPUTS}, []
    for r in range(bs):
        pair = (links[0][r], links[1][r]) if links else (None, None)
        nodes = reference.greedy_path(*pair, draft[r], targets[r], path)
        tokens = [targets[r][node] for node in nodes]
        rest = [-1] * (path - len(nodes))
        want["accept_index"].append([r * width + node for node in nodes] + rest)
        want["accept_tokens"].append(tokens + rest)
        want["num_correct_drafts"].append(len(nodes) - 1)
        want["accept_lens"].append(len(nodes))
        want["bonus_tokens"].append(tokens[-1])
        want["new_seq_lens"].append(lengths[r] + len(nodes))
        paths.append(nodes)
    return want, paths


def random_tree_batch(rng, bs, width):
    """Few distinct tokens, so that paths are long and siblings often equal."""
    trees = [random_parents(width, rng, keep=0.9) for _ in range(bs)]
    links = [links_of_parents(tree) for tree in trees]
    draft, targets = (torch.randint(0, 3, (bs, width), generator=rng).tolist() for _ in range(2))
    return draft, targets, tuple([pair[i] for pair in links] for i in range(2))
