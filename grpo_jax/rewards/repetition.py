"""Repetition: down to -1 for a completion of the same few words over and over."""

from grpo_jax.example import Example
from grpo_jax.ranges import Count


def reward(completion: str, example: Example, *, n: Count) -> float:
    """-(1 - distinct n-grams / n-grams) of words between white space, in lower case; 0.0 with fewer than n words.

    As in arXiv 2502.03373, appendix C.2, but as a reward of the whole completion. Text without spaces is a single word.
    """
    words = completion.lower().split()
    if len(words) < n:
        return 0.0
    distinct = set(zip(*(words[i:] for i in range(n)), strict=False))
    return len(distinct) / (len(words) - n + 1) - 1.0
