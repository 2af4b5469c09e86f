"""A control that knows how hard a prompt is and nothing else: numeric's rewards, dealt out anew within each prompt.

Every group keeps its rewards, and with them its mean and its spread, and is dead or not as before. Chance decides
which completion gets which reward.
"""

from collections.abc import Sequence

import numpy as np

from grpo_jax.example import Example
from grpo_jax.rewards import numeric


def reward(completions: Sequence[str], examples: Sequence[Example]) -> list[float | None]:
    """numeric.reward of each completion, permuted among those of its prompt by the prompt's id; of all at once."""
    groups = {}
    for row, example in enumerate(examples):
        groups.setdefault(example.id, []).append(row)
    dealt: list[float | None] = [None] * len(completions)
    for key, rows in groups.items():
        # any permutation, the identity too: if each reward had to move, a right completion would expect less
        for row, giver in zip(rows, np.random.default_rng(key).permutation(rows), strict=True):
            dealt[row] = numeric.reward(completions[int(giver)], examples[int(giver)])
    return dealt
