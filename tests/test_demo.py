# SPDX-License-Identifier: Apache-2.0
"""How the demo tells a tie from an error; no engine runs here."""

import argparse

import pytest

from specfused.demo import TIE, positive, same_but_for_ties

PLAIN = {
    "output_ids": [5, 6, 7],
    "ranks": [
        [(-0.1, 5), (-3.0, 9)],
        [(-0.7, 6), (-0.7 - TIE / 2, 8)],
        [(-0.2, 7), (-0.2 - 2 * TIE, 3)],
    ],
}


@pytest.mark.parametrize(
    "tokens, same",
    [
        ([5, 6, 7], True),
        ([5, 8, 1], True),  # a tie at the second token; what follows it is another text
        ([9, 6, 7], False),  # second choice, but far away
        ([5, 4, 7], False),  # not among the likeliest two
        ([5, 6, 3], False),  # just beyond the limit
    ],
)
def test_ties(tokens, same):
    assert same_but_for_ties(PLAIN, {"output_ids": tokens}) is same


def test_lengths_must_agree():
    with pytest.raises(ValueError):
        same_but_for_ties(PLAIN, {"output_ids": [5, 6]})


@pytest.mark.parametrize("text", ["7", "-1", "x"])
def test_too_few_tokens(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"at least 8, got '{text}'"):
        positive(text)
