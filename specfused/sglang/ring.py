# SPDX-License-Identifier: Apache-2.0
"""Draft KV that is still to be written: what the draft model needs for tokens decoded without it.

The draft's KV at position p is a function of the target's hidden state at p and of token p + 1. An
off step leaves that pair in a ring of the request's pool row, at p modulo the ring's size, so the
device needs no counter: with n pairs pending and C committed tokens they are positions C-n..C-1.
The count n lives on the host, on the request object itself, so that a recycled row starts at 0.
"""

import os

import torch

VARIABLE = "SPECFUSED_RING"
DEFAULT = 32  # at 128 requests about a plain step to catch up, see bench/NOTES.md


def configured_size() -> int:
    """SPECFUSED_RING: off steps that a request may lag behind with its draft KV."""
    text = os.environ.get(VARIABLE, "").strip() or str(DEFAULT)
    valid = text.isascii() and text.isdigit() and len(text) <= 6 and int(text) >= 1
    if not valid:
        raise ValueError(f"specfused: {VARIABLE} must be an integer of 1 to 999999, got {text}")
    return int(text)


_PENDING = "specfused_pending"  # pairs left by the steps launched so far
_LAST_OFF = "specfused_last_off"  # number of the last off step with this request


class PendingRing:
    """Pairs (hidden state, next token) of each request that the draft has not seen yet.

    Args:
        table_shape: of req_to_token, (rows, row width).
        size: pairs per row, R.
        hidden_size: H', width of what the target hands to the draft; None: the draft takes tokens
            only (STANDALONE).
        dtype, device: of the hidden states.
    """

    def __init__(self, table_shape, size: int, hidden_size: int | None, dtype, device):
        num_rows, self.row_width = table_shape
        self.size = size
        # Zeros: a row that nobody filled must be finite, the chain mask does the rest.
        self.tokens = torch.zeros(num_rows * size, dtype=torch.int64, device=device)
        self.hidden_states = None
        if hidden_size is not None:
            shape = (num_rows * size, hidden_size)
            self.hidden_states = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory of the ring."""
        hidden = self.hidden_states
        return self.tokens.nbytes + (hidden.nbytes if hidden is not None else 0)

    # -- device

    def push(self, req_pool_indices, seq_lens, tokens, hidden_states) -> None:
        """Stores the pair of an off step for every request of the batch.

        Args:
            req_pool_indices: [bs] int64.
            seq_lens: [bs] int64 committed lengths before the step = the position of its one row.
            tokens: [bs] int64, emitted by the step.
            hidden_states: [bs, H'] of that row; None without hidden states.
        """
        where = self._cells(req_pool_indices, seq_lens)
        self.tokens[where] = tokens
        if self.hidden_states is not None:
            self.hidden_states[where] = hidden_states

    def read(self, req_pool_indices, positions):
        """Pairs at positions [bs, n]: tokens [bs*n] int64 and hidden states [bs*n, H'] or None."""
        where = self._cells(req_pool_indices[:, None], positions).flatten()
        hidden = None if self.hidden_states is None else self.hidden_states[where]
        return self.tokens[where], hidden

    def _cells(self, req_pool_indices, positions):
        return torch.add(positions % self.size, req_pool_indices, alpha=self.size)


def pending(req) -> int:
    """Pairs of this request in the ring, counting all steps that were launched."""
    return getattr(req, _PENDING, 0)


def note_off_step(reqs, step: int) -> None:
    """One more pair for each request; `step` numbers the decode steps."""
    for req in reqs:
        setattr(req, _PENDING, pending(req) + 1)
        setattr(req, _LAST_OFF, step)


def clear(reqs) -> None:
    """Nothing is pending: the draft's KV is whole up to the committed length, or the row is new."""
    for req in reqs:
        if pending(req):
            setattr(req, _PENDING, 0)


def missing_draft_kv(req, last_processed_step: int) -> int:
    """Committed positions of `req` without draft KV, as of the result that is being processed.

    The overlap schedule launches one step ahead: the pair of a step whose result is not processed
    yet belongs to a position that is not committed for the scheduler.
    """
    count = pending(req)
    if count and getattr(req, _LAST_OFF) > last_processed_step:
        count -= 1
    return count
