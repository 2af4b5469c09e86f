"""A control that tells how hard a prompt is and nothing else: numeric's rewards, permuted within each prompt.

A group's rewards keep their mean and standard deviation, so the same groups are dead. Chance decides which completion
gets which reward.
"""

from collections.abc import Sequence

import numpy as np

from grpo_jax.example import Example
from grpo_jax.rewards import numeric


def reward(completions: Sequence[str], examples: Sequence[Example]) -> list[float | None]:
    """numeric.reward of each completion, permuted among the completions of a prompt; the prompt's id is the seed."""
    groups = {}
    for row, example in enumerate(examples):
        groups.setdefault(example.id, []).append(row)
    rewards: list[float | None] = [None] * len(completions)
    for key, rows in groups.items():
        # any permutation, the identity too: if each reward had to move, a right completion would expect less
        for row, source in zip(rows, np.random.default_rng(key).permutation(rows), strict=True):
            rewards[row] = numeric.reward(completions[int(source)], examples[int(source)])
    return rewards
