"""Repetition: a penalty, down to -1 for a completion that repeats the same few words."""

from grpo_jax.example import Example
from grpo_jax.ranges import Count


def reward(completion: str, example: Example, *, n: Count) -> float:
    """-(1 - distinct n-grams / n-grams) over words in lower case, split at white space; 0.0 with fewer than n words.

    In arXiv 2502.03373, appendix C.2, single tokens are penalized; here the whole completion gets one penalty. Text
    without spaces is a single word.
    """
    words = completion.lower().split()
    if len(words) < n:
        return 0.0
    distinct = set(zip(*(words[i:] for i in range(n)), strict=False))
    return len(distinct) / (len(words) - n + 1) - 1.0
