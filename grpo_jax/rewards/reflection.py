"""Bonus for phrases like "wait" and "let me check" in correct completions. Think twice before using it.

A policy hacks it directly, by writing the phrases, and no ablation is known that supports it: DeepSeek-R1
(arXiv 2501.12948) rewards no content and saw reflection come by itself, and base models write such phrases
without any reinforcement (arXiv 2503.20783). It is no part of the default config.
"""

import functools
import itertools
import re

from grpo_jax.example import Example
from grpo_jax.ranges import Count, Texts


def reward(completion: str, example: Example, *, correct: bool | None, phrases: Texts, cap: Count) -> float | None:
    """How many of the phrases occur, in any case and as whole words, up to cap, if correct, else 0.0.

    correct is the verifier's verdict, or None.
    """
    if correct is None:
        return None
    if not correct:
        return 0.0
    return measure(completion, example, phrases=phrases, cap=cap)


def measure(completion: str, example: Example, *, phrases: Texts, cap: Count) -> float:
    """As reward, whatever the verdict: at weight 0 the part pays nothing, and counts on wrong answers too."""
    return float(sum(1 for _ in itertools.islice(pattern(tuple(phrases)).finditer(completion), cap)))


@functools.cache
def pattern(phrases: tuple[str, ...]) -> re.Pattern[str]:
    """The phrases as whole words, in any case."""
    return re.compile(rf'\b(?:{"|".join(map(re.escape, phrases))})\b', re.IGNORECASE)
