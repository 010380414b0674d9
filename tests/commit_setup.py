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
    "next_token_ids",
    "select_index",
    "positions",
    "window_ends",
    "invalid_logits",
)


def outputs(bs, path, device, width=None):
    """Poisoned, so that what is not written shows. With the width: optional ones too."""

    def poison(*shape, dtype=torch.int32):
        return torch.full(shape, -99, dtype=dtype, device=device)

    out = {
        "accept_index": poison(bs, path),
        "num_correct_drafts": poison(bs),
        "accept_lens": poison(bs),
        "accept_tokens": poison(bs, path),
        "bonus_tokens": poison(bs),
        "new_seq_lens": poison(bs, dtype=torch.int64),
    }
    if width is not None:
        out |= {
            "next_token_ids": poison(bs * width, dtype=torch.int64),
            "select_index": poison(bs, dtype=torch.int64),
            "positions": poison(bs * width, dtype=torch.int64),
            "window_ends": poison(bs, dtype=torch.int64),
            "invalid_logits": poison(bs),
        }
    return out


def int64s(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def run(draft, targets, device, *, links=None, path=None, lengths=None, **kv):
    """commit with given targets; returns the outputs as lists."""
    bs, width = len(draft), len(draft[0])
    out = outputs(bs, path or width, device, width)
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


def bookkeeping(paths, tokens, lengths, width, max_path, invalid=None):
    """Every output from the accepted nodes and the emitted tokens of each request."""
    want = {name: [] for name in OUTPUTS}
    for r, (nodes, emitted) in enumerate(zip(paths, tokens, strict=True)):
        count, rest = len(nodes), [-1] * (max_path - len(nodes))
        want["accept_index"].append([r * width + node for node in nodes] + rest)
        want["accept_tokens"].append(emitted + rest)
        want["num_correct_drafts"].append(count - 1)
        want["accept_lens"].append(count)
        want["bonus_tokens"].append(emitted[-1])
        want["new_seq_lens"].append(lengths[r] + count)
        want["next_token_ids"] += emitted + [0] * (width - count)
        want["select_index"].append(r * width + count - 1)
        want["positions"] += [lengths[r] + j for j in range(width)]
        want["window_ends"].append(lengths[r] + width)
        want["invalid_logits"].append(invalid[r] if invalid else 0)
    return want


def expected(draft, targets, links=None, path=None, lengths=None):
    """(outputs, paths) by the reference walk."""
    bs, width = len(draft), len(draft[0])
    path = path or width
    lengths = lengths or [10 * r for r in range(bs)]
    paths = []
    for r in range(bs):
        pair = (links[0][r], links[1][r]) if links else (None, None)
        paths.append(reference.greedy_path(*pair, draft[r], targets[r], path))
    tokens = [[targets[r][node] for node in nodes] for r, nodes in enumerate(paths)]
    return bookkeeping(paths, tokens, lengths, width, path), paths


def random_tree_batch(rng, bs, width):
    """Few distinct tokens, so that paths are long and siblings often equal."""
    trees = [random_parents(width, rng, keep=0.9) for _ in range(bs)]
    links = [links_of_parents(tree) for tree in trees]
    draft, targets = (torch.randint(0, 3, (bs, width), generator=rng).tolist() for _ in range(2))
    return draft, targets, tuple([pair[i] for pair in links] for i in range(2))
