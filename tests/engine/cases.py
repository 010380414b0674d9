# SPDX-License-Identifier: Apache-2.0
"""The prompts and speculative settings that the engine tests share."""

import random
from typing import NamedTuple

_random = random.Random(3)
PROMPTS = [[_random.randrange(3, 512) for _ in range(n)] for n in (8, 5, 40, 1, 17, 64, 2, 33)]
MAX_NEW_TOKENS = 32
SECOND_TURN = 2  # the prompt whose answer becomes part of another prompt


class Setting(NamedTuple):
    algorithm: str
    steps: int
    topk: int
    num_draft_tokens: int

    def __str__(self):
        numbers = f"{self.steps}-{self.topk}-{self.num_draft_tokens}"
        return f"{self.algorithm.lower()}-{numbers}"


CHAIN = Setting("STANDALONE", 3, 1, 4)
TREE = Setting("EAGLE", 4, 4, 16)
SETTINGS = [
    CHAIN,
    Setting("STANDALONE", 4, 4, 16),
    Setting("STANDALONE", 5, 8, 32),
    Setting("EAGLE", 3, 1, 4),
    TREE,
    Setting("EAGLE", 5, 8, 32),
    Setting("EAGLE3", 3, 1, 4),
    Setting("EAGLE3", 4, 4, 16),
    Setting("EAGLE3", 5, 8, 32),
    Setting("STANDALONE", 1, 1, 2),  # no draft decode step at all
    Setting("EAGLE", 2, 2, 5),  # a tree wider than its depth allows for a chain
]


def padded(histograms, steps):
    """SGLang leaves off trailing zeros."""
    return [list(counts) + [0] * (steps + 1 - len(counts)) for counts in histograms]
