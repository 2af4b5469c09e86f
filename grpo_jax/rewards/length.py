"""Shaping by length, added to the rewards of a step's groups; lengths are in tokens, and so is limit, the budget.

Whether a group is dead is decided by its rewards before shaping: else a token more or less would make every group
alive.
"""

from collections.abc import Sequence
from typing import Annotated

from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.ranges import Count, Length

Ends = Annotated[Sequence[float], Length(2, 2)]
READS_CORRECT = ('kimi', 'cosine', 'mean_scaled')  # what the verifier says; overlong treats all alike


def overlong(
    lengths: Int[np.ndarray, 'P G'], correct: Bool[np.ndarray, 'P G'], *, limit: int, margin: Count
) -> Float[np.ndarray, 'P G']:
    """0 up to limit - margin, then a fall to -1 at the limit and beyond: DAPO (arXiv 2503.14476, eq. 13)."""
    return np.clip((limit - margin - lengths) / margin, -1.0, 0.0)


def kimi(lengths: Int[np.ndarray, 'P G'], correct: Bool[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """0.5 - (n - min) / (max - min) in the group when correct, at most 0 when not; 0 in a group of one length.

    Kimi k1.5 (arXiv 2501.12599, section 2.3.3).
    """
    shortest, longest = lengths.min(1, keepdims=True), lengths.max(1, keepdims=True)
    value = 0.5 - (lengths - shortest) / np.maximum(longest - shortest, 1)
    return np.where(longest == shortest, 0.0, np.where(correct, value, np.minimum(value, 0.0)))


def cosine(
    lengths: Int[np.ndarray, 'P G'], correct: Bool[np.ndarray, 'P G'], *, limit: int, right: Ends, wrong: Ends
) -> Float[np.ndarray, 'P G']:
    """last + (first - last) (1 + cos(pi n / limit)) / 2, less the 1 of a correct one: arXiv 2502.03373, appendix C.1.

    (first, last), at length 0 and at the limit and beyond, is `right` when correct and `wrong` when not. In the paper
    the value replaces the reward of correctness, so the term takes that off: with length_shaping_weight and the
    verifier's weight both 1 the total is the paper's.
    """
    first, last = (np.where(correct, *ends) for ends in zip(right, wrong, strict=True))
    return last + (first - last) * (1 + np.cos(np.pi * np.minimum(lengths / limit, 1))) / 2 - correct


def mean_scaled(lengths: Int[np.ndarray, 'P G'], correct: Bool[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """-(share of the group that is correct) n / max n: the more of a group is solved, the more a token costs.

    As in prime-rl, which has the group's mean reward in place of the share: the same where only the verifier pays.
    """
    return -correct.mean(1, keepdims=True) * lengths / np.maximum(lengths.max(1, keepdims=True), 1)
