"""Shaping by length, added to the rewards of a step's groups. Lengths, and the budget `limit`, are in tokens.

Rewards before shaping decide whether a group is dead. Otherwise a difference of one token would make any group alive.
"""

from collections.abc import Sequence
from typing import Annotated

from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.ranges import Count, Length

Ends = Annotated[Sequence[float], Length(2, 2)]
READS_CORRECT = ('kimi', 'cosine', 'mean_scaled')  # these need a verifier; overlong treats all completions alike


def overlong(
    lengths: Int[np.ndarray, 'P G'], correct: Bool[np.ndarray, 'P G'], *, limit: int, margin: Count
) -> Float[np.ndarray, 'P G']:
    """0 for lengths up to limit - margin, falling to -1 at the limit and beyond: DAPO (arXiv 2503.14476, eq. 13)."""
    return np.clip((limit - margin - lengths) / margin, -1.0, 0.0)


def kimi(lengths: Int[np.ndarray, 'P G'], correct: Bool[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """0.5 - (n - min) / (max - min) over the group's lengths n, and at most 0 for a wrong completion.

    0 in a group whose lengths are all equal. Kimi k1.5 (arXiv 2501.12599, section 2.3.3).
    """
    shortest, longest = lengths.min(1, keepdims=True), lengths.max(1, keepdims=True)
    value = 0.5 - (lengths - shortest) / np.maximum(longest - shortest, 1)
    return np.where(longest == shortest, 0.0, np.where(correct, value, np.minimum(value, 0.0)))


def cosine(
    lengths: Int[np.ndarray, 'P G'], correct: Bool[np.ndarray, 'P G'], *, limit: int, right: Ends, wrong: Ends
) -> Float[np.ndarray, 'P G']:
    """last + (first - last) (1 + cos(pi n / limit)) / 2 - [correct] (arXiv 2502.03373, appendix C.1).

    (first, last) are the values at length 0 and at `limit` or more: the pair `right` for a correct completion, the pair
    `wrong` for another. In the paper the value replaces the reward of 1 for a correct completion; here it is added, so
    1 is subtracted. With length_shaping_weight 1 and the verifier's weight 1 the total equals the paper's.
    """
    first, last = (np.where(correct, *ends) for ends in zip(right, wrong, strict=True))
    return last + (first - last) * (1 + np.cos(np.pi * np.minimum(lengths / limit, 1))) / 2 - correct


def mean_scaled(lengths: Int[np.ndarray, 'P G'], correct: Bool[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """-(share of the group that is correct) n / max n: a token costs more in a group that is solved more often.

    n: tokens of a completion; max n: of the longest one of its group. As in prime-rl, which uses the group's mean
    reward instead of the share. The two are equal where only the verifier pays.
    """
    return -correct.mean(1, keepdims=True) * lengths / np.maximum(lengths.max(1, keepdims=True), 1)
