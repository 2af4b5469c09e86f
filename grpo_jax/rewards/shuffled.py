"""A control that knows how hard a prompt is and nothing else: numeric's rewards, dealt out anew within each prompt.

Every group keeps its rewards, and with them its mean, its spread and whether it is dead; who gets which is chance.
"""

import numpy as np

from grpo_jax.rewards import numeric


def reward(completions, examples):
    """numeric.reward of each completion, permuted among those of its prompt by the prompt's id; of all at once."""
    groups = {}
    for row, example in enumerate(examples):
        groups.setdefault(example.id, []).append(row)
    dealt = [None] * len(completions)
    for key, rows in groups.items():
        # any permutation, the identity too: were each reward sure to move, a right completion would expect less
        for row, giver in zip(rows, np.random.default_rng(key).permutation(rows), strict=True):
            dealt[row] = numeric.reward(completions[giver], examples[giver])
    return dealt
