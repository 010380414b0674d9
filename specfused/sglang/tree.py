# SPDX-License-Identifier: Apache-2.0
"""What a draft proposes: one branch, which is a chain, or a tree cut to its best nodes."""

from dataclasses import dataclass

import torch

from specfused.sglang.tree_ops import draft_grow, draft_tree


@dataclass
class Nodes:
    """Trees of bs requests with W nodes each, as a verify takes them."""

    tokens: torch.Tensor  # [bs, W] int64
    index: torch.Tensor  # [bs, W] int64: flat number
    next_token: torch.Tensor  # [bs, W] int64: first child
    next_sibling: torch.Tensor  # [bs, W] int64
    positions: torch.Tensor  # [bs, W] int64

    @classmethod
    def new(cls, bs: int, width: int, device) -> "Nodes":
        """Nodes that nobody has written yet."""
        return cls(*torch.zeros((5, bs, width), dtype=torch.int64, device=device))

    def of(self, bs: int) -> "Nodes":
        """Those of the first requests."""
        return Nodes(*(tensor[:bs] for tensor in vars(self).values()))

    def build(self, tokens, roots, seq_lens, mask=None, **tree) -> None:
        """Writes all of them, see `draft_tree`."""
        draft_tree(
            tokens,
            roots,
            seq_lens,
            self.tokens,
            self.index,
            self.next_token,
            self.next_sibling,
            self.positions.view(-1),
            mask=mask,
            **tree,
        )


class Chain:
    """The tokens of bs requests, a row a step.

    Args:
        shape: bs, topk and num_steps of the draft.
    """

    def __init__(self, shape: tuple[int, int, int], device):
        bs, _, num_steps = shape
        self.tokens = torch.empty((num_steps, bs), dtype=torch.int64, device=device)

    def start(self, topk_p, topk_index, hidden_states):
        """Takes the first step's candidates.

        Args:
            topk_p, topk_index: [bs, topk].
            hidden_states: [bs, hidden] or None.

        Returns:
            Tokens [bs*topk] and hidden states [bs*topk, hidden] of the next step's branches.
        """
        self.tokens[0].copy_(topk_index[:, 0])
        return self.tokens[0], hidden_states

    def grow(self, step: int, output, choose):
        """Takes the candidates of a step > 0.

        Args:
            output: of the draft model, a row a branch.
            choose: (logits, topk_p or None, topk_index) -> None, writes them.

        Returns:
            As `start`; nothing after the last step.
        """
        tokens = self.tokens[step]
        choose(output.next_token_logits, None, tokens[:, None])
        return tokens, output.hidden_states

    def finish(self, nodes: Nodes, roots, seq_lens, mask) -> None:
        """Writes the nodes below the roots [bs], which are at seq_lens [bs] int64."""
        nodes.build(self.tokens.T, roots, seq_lens)


class Tree:
    """All candidates of bs requests. Arguments and methods are those of `Chain`.

    They are numbered as SGLang numbers them: topk of the first step, then topk groups of topk for
    every later step, a group for each branch; parents are what the groups belong to.
    """

    def __init__(self, shape: tuple[int, int, int], device):
        bs, self.topk, self.num_steps = shape
        groups = 1 + self.topk * (self.num_steps - 1)
        count = groups * self.topk
        self.scores = torch.empty((bs, count), dtype=torch.float32, device=device)
        self.tokens = torch.empty((bs, count), dtype=torch.int64, device=device)
        self.parents = torch.empty((bs, groups), dtype=torch.int64, device=device)
        self.input_ids = torch.empty(bs * self.topk, dtype=torch.int64, device=device)

    def start(self, topk_p, topk_index, hidden_states):
        return self._grow(0, topk_p, topk_index, hidden_states)

    def grow(self, step: int, output, choose):
        shape, logits = (self.input_ids.shape[0], self.topk), output.next_token_logits
        topk_p = torch.empty(shape, dtype=torch.float32, device=logits.device)
        topk_index = torch.empty(shape, dtype=torch.int64, device=logits.device)
        choose(logits, topk_p, topk_index)
        return self._grow(step, topk_p, topk_index, output.hidden_states)

    def _grow(self, step: int, topk_p, topk_index, hidden_states):
        history = (self.scores, self.tokens, self.parents)
        if step == self.num_steps - 1:
            draft_grow(topk_p, topk_index, *history, step=step)
            return None
        chosen = None
        if hidden_states is not None:
            chosen = hidden_states.new_empty((self.input_ids.shape[0], hidden_states.shape[1]))
        draft_grow(
            topk_p,
            topk_index,
            *history,
            step=step,
            input_ids=self.input_ids,
            hidden_in=hidden_states,
            hidden_out=chosen,
        )
        return self.input_ids, chosen

    def finish(self, nodes: Nodes, roots, seq_lens, mask) -> None:
        nodes.build(
            self.tokens, roots, seq_lens, mask=mask, scores=self.scores, parents=self.parents
        )
