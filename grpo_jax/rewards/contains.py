"""A requested word: 1 if the completion uses the example's answer as a word, else 0."""

import re

from grpo_jax.example import Example


def reward(completion: str, example: Example) -> float:
    """1.0 if example.answer occurs in the completion as a whole word, in any case, else 0.0."""
    return float(re.search(rf'\b{re.escape(example.answer)}\b', completion, re.IGNORECASE) is not None)
