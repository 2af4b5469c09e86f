"""Shaping by length, f64[P, G], added to the rewards of a step's groups; lengths i64[P, G] are in tokens.

correct is bool[P, G], limit the budget in tokens. Groups count as dead by their rewards before shaping: else a token
more or less would make every group differ.
"""

import numpy as np


def overlong(lengths, correct, *, limit, margin):
    """0 up to limit - margin, then falling to -1 at the limit and beyond: DAPO (arXiv 2503.14476, eq. 13)."""
    return np.clip((limit - margin - lengths) / margin, -1.0, 0.0)


def kimi(lengths, correct):
    """0.5 - (n - min) / (max - min) in the group when correct, at most 0 when not; 0 in a group of one length.

    Kimi k1.5 (arXiv 2501.12599, section 2.3.3).
    """
    shortest, longest = lengths.min(1, keepdims=True), lengths.max(1, keepdims=True)
    value = 0.5 - (lengths - shortest) / np.maximum(longest - shortest, 1)
    return np.where(longest == shortest, 0.0, np.where(correct, value, np.minimum(value, 0.0)))


def cosine(lengths, correct, *, limit, right, wrong):
    """last + (first - last) (1 + cos(pi n / limit)) / 2, less the 1 of a correct one: arXiv 2502.03373, appendix C.1.

    first, at length 0, and last, at the limit and beyond, are those of `right` when correct and of `wrong` when not. In
    the paper the value replaces the reward of correctness, so here the term takes that off: with length_weight and the
    verifier's weight both 1 the total is the paper's.
    """
    first, last = (np.where(correct, *ends) for ends in zip(right, wrong, strict=True))
    return last + (first - last) * (1 + np.cos(np.pi * np.minimum(lengths / limit, 1))) / 2 - correct


def mean_scaled(lengths, correct):
    """-(share of the group that is correct) n / max n: the more of a group is solved, the more a token costs.

    As in prime-rl, which takes the group's mean reward: the same where the verifier alone is rewarded.
    """
    return -correct.mean(1, keepdims=True) * lengths / np.maximum(lengths.max(1, keepdims=True), 1)
