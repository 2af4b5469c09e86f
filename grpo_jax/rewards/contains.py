"""A requested word: 1 if the completion uses the example's answer as a word, else 0."""

import re

from grpo_jax.example import Example


def reward(completion: str, example: Example) -> float | None:
    """1.0 if example.answer occurs in the completion as a whole word, in any case, else 0.0; None without an answer."""
    word = rf'(?<!\w){re.escape(example.answer)}(?!\w)'  # it may end in a sign, as C++
    return float(re.search(word, completion, re.IGNORECASE) is not None) if example.answer else None
