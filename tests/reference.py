# SPDX-License-Identifier: Apache-2.0
"""What every op must compute, in readable torch and Python. Shares no code with the C++."""

import torch


def attention(q, k, v, visible, scale, dtype=torch.float64):
    """One request: softmax(scale q k^T) v over the visible pairs, and the log of the softmax sum.

    q [W, Hq, D], k and v [T, Hkv, D], visible [W, T] bool. A row that sees nothing: 0 and -inf.
    In another dtype than float64 it is the yardstick of what that dtype can reach.
    """
    group = q.shape[1] // k.shape[1]
    seen = visible.any(0)[:, None, None]
    # What nobody sees may be NaN, and 0 x NaN is NaN: take it out before it meets a weight of 0.
    k = torch.where(seen, k, 0).to(dtype).repeat_interleave(group, dim=1)
    v = torch.where(seen, v, 0).to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("whd,thd->hwt", q.to(dtype), k) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(1)[:, None], 0)
    out = torch.einsum("hwt,thd->whd", weights, v)
    return out, lse.transpose(0, 1)


def ancestors_and_self(parents):
    """[W, W] bool: which nodes each node of a tree sees. parents[i] < i, or None for a root."""
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        at = node
        while at is not None:
            visible[node, at] = True
            at = parents[at]
    return visible


def parents_of_links(next_token, next_sibling):
    """Parents from first-child and next-sibling links; a link that does not point forward is none.

    Follows every list of children from its head; nodes that no list reaches have no parent.
    """
    width = len(next_token)
    parents = [None] * width
    for node in range(width):
        at, floor = next_token[node], node
        while floor < at < width:
            parents[at] = node
            at, floor = next_sibling[at], at
    return parents


def to_words(visible):
    """[..., W, C] bool -> [..., W] int64: bit c of a row's word says that it sees column c."""
    words = torch.zeros(visible.shape[:-1], dtype=torch.int64)
    for column in range(visible.shape[-1]):
        bit = (1 << column) - (1 << 64 if column == 63 else 0)
        words |= torch.where(visible[..., column], bit, 0)
    return words


def from_words(words, columns):
    """The inverse of to_words, for the first `columns` columns."""
    words = words.cpu()
    return torch.stack([(words >> column) & 1 == 1 for column in range(columns)], dim=-1)


def greedy_path(next_token, next_sibling, draft_tokens, targets, max_path):
    """Accepted nodes, root first. next_token None: a chain."""
    width = len(draft_tokens)
    path = [0]
    while len(path) < max_path:
        node = path[-1]
        if next_token is None:
            children = [node + 1] if node + 1 < width else []
        else:
            children, at, floor = [], next_token[node], node
            while floor < at < width:
                children.append(at)
                at, floor = next_sibling[at], at
        chosen = [child for child in children if draft_tokens[child] == targets[node]]
        if not chosen:
            break
        path.append(chosen[0])
    return path


def first_argmax(logits):
    """Per row the lowest index of the largest logit; NaN counts as the largest."""
    choice = []
    for row in logits.double().cpu():
        nan = row.isnan().nonzero()
        choice.append(int(nan[0]) if len(nan) else int((row == row.max()).nonzero()[0]))
    return choice


def compacted(buffer, slots, path):
    """A copy of the buffer in which row j of the path is in the slot of window column j."""
    after = buffer.clone()
    for column, node in enumerate(path):
        if 0 <= slots[node] < len(buffer) and 0 <= slots[column] < len(buffer):
            after[slots[column]] = buffer[slots[node]]
    return after


def plan_segments(lengths, num_kv_heads, num_ctas, tile=64, min_tiles=1):
    """The work of every CTA, from the definition: one line of tiles, cut into equal pieces."""
    line = [
        (request, head, index)
        for request, committed in enumerate(lengths)
        for head in range(num_kv_heads)
        for index in range(max(committed, 0) // tile + 1)
    ]
    per_cta = max(-(-len(line) // num_ctas), min_tiles)
    owners = {}  # unit -> the CTAs that share it, in order
    for place, (request, head, _) in enumerate(line):
        ctas = owners.setdefault((request, head), [])
        if place // per_cta not in ctas:
            ctas.append(place // per_cta)
    segments = []
    for cta in range(num_ctas):
        mine = line[cta * per_cta : (cta + 1) * per_cta]
        for unit in dict.fromkeys(entry[:2] for entry in mine):
            tiles = [index for *of, index in mine if tuple(of) == unit]
            last = max(lengths[unit[0]], 0) // tile
            segments.append(
                {
                    "cta": cta,
                    "request": unit[0],
                    "kv_head": unit[1],
                    "tiles": (tiles[0], tiles[-1] + 1),
                    "split": owners[unit].index(cta),
                    "num_splits": len(owners[unit]),
                    "tail": tiles[-1] == last,
                }
            )
    return segments
