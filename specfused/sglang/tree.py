# SPDX-License-Identifier: Apache-2.0
"""A draft tree of topk branches: grown a step at a time, then cut to its best W nodes.

Candidates of a request are numbered as SGLang numbers them: topk of the first step, then topk
groups of topk for every later step, a group for each branch. The parents of group g > 0 of a step
are the candidates that its branches stand for.
"""

import torch


class Tree:
    """Candidates of bs requests.

    Args:
        topk, num_steps: of the draft.
    """

    def __init__(self, bs: int, topk: int, num_steps: int, device):
        self.topk = topk
        count = topk + (num_steps - 1) * topk * topk
        self.scores = torch.empty((bs, count), dtype=torch.float32, device=device)
        self.tokens = torch.empty((bs, count), dtype=torch.int64, device=device)
        groups = 1 + (num_steps - 1) * topk
        self.parents = torch.empty((bs, groups), dtype=torch.int64, device=device)
        self.frontier = None  # [bs, topk] scores of the branches

    def start(self, topk_p, topk_index, hidden_states):
        """Takes the first step's candidates, all of which become branches.

        Args:
            topk_p, topk_index: [bs, topk].
            hidden_states: [bs, hidden] or None.

        Returns:
            Tokens [bs*topk] and hidden states [bs*topk, hidden] of the branches.
        """
        topk = self.topk
        self.scores[:, :topk] = self.frontier = topk_p
        self.tokens[:, :topk] = topk_index
        self.parents[:, 0] = -1
        if hidden_states is not None:
            hidden_states = hidden_states.repeat_interleave(topk, dim=0)
        self.parents[:, 1 : 1 + topk] = torch.arange(topk, device=topk_p.device)
        return topk_index.flatten(), hidden_states

    def grow(self, step: int, topk_p, topk_index, hidden_states):
        """Takes the candidates of step >= 1 and makes the best topk of them the branches.

        Args:
            topk_p, topk_index: [bs*topk, topk], a row a branch.
            hidden_states: [bs*topk, hidden] or None.

        Returns:
            As `start`.
        """
        topk, bs = self.topk, self.scores.shape[0]
        first = topk + (step - 1) * topk * topk
        scores = (self.frontier[:, :, None] * topk_p.view(bs, topk, topk)).flatten(1)
        tokens = topk_index.view(bs, topk * topk)
        self.scores[:, first : first + topk * topk] = scores
        self.tokens[:, first : first + topk * topk] = tokens
        self.frontier, best = torch.topk(scores, topk, dim=-1)
        group = 1 + step * topk
        if group < self.parents.shape[1]:
            self.parents[:, group : group + topk] = best + first
        if hidden_states is not None:
            rows = torch.arange(0, bs * topk, topk, device=best.device)[:, None] + best // topk
            hidden_states = hidden_states[rows.flatten()]
        return tokens.gather(1, best).flatten(), hidden_states

    def finish(self, roots, seq_lens, out) -> None:
        """The best W - 1 candidates under the roots.

        Args:
            roots: [bs] int64 tokens.
            seq_lens: [bs] int64 position of the roots.
            out: `Nodes` of these requests, written.
        """
        bs, width = out.tokens.shape
        best = torch.topk(self.scores, width - 1, dim=-1).indices.sort(dim=-1).values
        out.tokens[:, 0] = roots
        out.tokens[:, 1:] = self.tokens.gather(1, best)
        above = self.parents.gather(1, best // self.topk)
        parent = torch.where(above < 0, 0, torch.searchsorted(best, above) + 1)
        sees = torch.eye(width, dtype=torch.bool, device=roots.device).repeat(bs, 1, 1)
        sees[:, :, 0] = True
        out.next_token.fill_(-1)
        out.next_sibling.fill_(-1)
        request = torch.arange(bs, device=roots.device)
        for node in range(width - 1, 0, -1):  # children in rising order, the lowest one first
            up = parent[:, node - 1]
            out.next_sibling[request, node] = out.next_token[request, up]
            out.next_token[request, up] = node
        for node in range(1, width):  # a parent comes before its children
            sees[:, node] |= sees[request, parent[:, node - 1]]
        torch.add(seq_lens[:, None], sees.sum(-1) - 1, out=out.positions)
        if out.mask is not None:
            out.mask.view(bs, width, width).copy_(sees)
