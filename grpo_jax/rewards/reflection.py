"""A bonus for phrases like "wait" and "let me check" in correct completions. Think twice before using it.

A policy can hack it by writing the phrases, and we know no ablation that supports it. DeepSeek-R1 (arXiv 2501.12948)
rewards no content and saw reflection emerge without a bonus; base models write such phrases before any reinforcement
learning (arXiv 2503.20783). No config uses it by default.
"""

import functools
import itertools
import re

from grpo_jax.example import Example
from grpo_jax.ranges import Count, Texts

# phrases of self-correction; a famous one is in DeepSeek-R1 (arXiv 2501.12948, table 3)
CORRECTIONS = (
    *('actually', 'let me re-check', 'let me recheck', 'let me check again', 'let me correct'),
    *('this calculation seems wrong', "that's wrong", 'that is wrong', 'i made a mistake'),
)


def reward(completion: str, example: Example, *, correct: bool | None, phrases: Texts, cap: Count) -> float | None:
    """The number of occurrences of the phrases, at most cap, in a correct completion; 0.0 in a wrong one.

    Phrases count as whole words, in any case. correct: the verifier's verdict; where it is None, so is the reward.
    """
    if correct is None:
        return None
    if not correct:
        return 0.0
    return measure(completion, example, phrases=phrases, cap=cap)


def measure(completion: str, example: Example, *, phrases: Texts, cap: Count) -> float:
    """The number of occurrences of the phrases, at most cap, in any completion; called where the part's weight is 0."""
    return float(sum(1 for _ in itertools.islice(pattern(tuple(phrases)).finditer(completion), cap)))


@functools.cache
def pattern(phrases: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that matches any of the phrases as whole words, in any case."""
    return re.compile(rf'\b(?:{"|".join(map(re.escape, phrases))})\b', re.IGNORECASE)
