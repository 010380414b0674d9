# SPDX-License-Identifier: Apache-2.0
"""The tree of drafts in torch: how it grows by a step, and how it is cut to the nodes to verify.

Shapes: bs requests, topk k, P = 1 + k*(steps - 1) groups of k candidates, N = k*P, W nodes.
"""

import torch
from sglang.srt.speculative.eagle_utils import TreeMaskMode, build_tree_kernel_efficient


def draft_grow(
    topk_p, topk_index, scores, tokens, parents, *, step, input_ids=None, hidden_in=None,
    hidden_out=None,
) -> None:  # fmt: skip
    """Adds a step's candidates to a tree and chooses the branches of the next step.

    Args:
        topk_p, topk_index: [bs, k] at step 0, then [bs*k, k].
        scores, tokens: [bs, N], written where the step's candidates are.
        parents: [bs, P], written where the next step's groups are.
        input_ids: [bs*k] int64, written; None at the last step.
        hidden_in, hidden_out: hidden states of the rows of topk_p, and of the branches.
    """
    bs, k = scores.shape[0], scores.shape[1] // parents.shape[1]
    if step == 0:
        scores[:, :k] = topk_p
        tokens[:, :k] = topk_index
        parents[:, :1].fill_(-1)
        best = torch.arange(k, device=parents.device).expand(bs, k)
        rows, first = torch.arange(bs, device=parents.device)[:, None].expand(bs, k), 0
    else:
        first, before = k + (step - 1) * k * k, max(k + (step - 2) * k * k, 0)
        frontier = torch.topk(scores[:, before:first], k, dim=-1).values
        each = (frontier[:, :, None] * topk_p.view(bs, k, k)).flatten(1)
        scores[:, first : first + k * k] = each
        tokens[:, first : first + k * k] = topk_index.view(bs, k * k)
        best = torch.topk(each, k, dim=-1).indices
        rows = best // k + torch.arange(0, bs * k, k, device=best.device)[:, None]
    if input_ids is None:
        return
    parents[:, 1 + step * k : 1 + (step + 1) * k] = best + first
    input_ids.copy_(topk_index.view(bs, -1).gather(1, best).flatten())
    if hidden_in is not None:
        torch.index_select(hidden_in, 0, rows.flatten(), out=hidden_out)


def draft_tree(
    tokens, roots, seq_lens, draft_tokens, index, next_token, next_sibling, positions, *,
    scores=None, parents=None, mask=None,
) -> None:  # fmt: skip
    """Cuts a tree to its best W - 1 candidates and links them; without scores it is a chain.

    Args:
        tokens: [bs, N], or [bs, W-1] of a chain.
        roots, seq_lens: [bs] tokens of the roots and where they are.
        draft_tokens, index, next_token, next_sibling: [bs, W] int64, written.
        positions: [bs*W] int64, written.
        scores, parents: as `draft_grow` left them.
        mask: bool, at least bs*W*W cells, written.
    """
    bs, width = draft_tokens.shape
    draft_tokens[:, 0] = roots
    if scores is None:
        draft_tokens[:, 1:] = tokens
        columns = torch.arange(width, device=index.device)
        torch.add(seq_lens[:, None], columns, out=positions.view(bs, width))
        torch.add(
            columns, torch.arange(0, bs * width, width, device=index.device)[:, None], out=index
        )
        next_token.copy_(columns + 1)
        next_token[:, -1].fill_(-1)
        next_sibling.fill_(-1)
        return
    groups = parents.shape[1]
    topk = scores.shape[1] // groups
    best = torch.topk(scores, width - 1, dim=-1).indices.sort(dim=-1).values
    draft_tokens[:, 1:] = tokens.gather(1, best)
    _, *linked, _ = build_tree_kernel_efficient(
        draft_tokens[:, 0],
        parents,
        best,
        draft_tokens[:, 1:],
        seq_lens,
        0,
        topk,
        (groups - 1) // topk + 1,
        width,
        TreeMaskMode.QLEN_ONLY,
        mask,
    )
    for written, found in zip((positions, index, next_token, next_sibling), linked, strict=True):
        written.copy_(found)
