"""Shaping by length, f64[P, G], added to the rewards of a step's groups; lengths i64[P, G] are in tokens.

Groups count as dead by their rewards before shaping: else a token more or less would make every group differ.
"""
import numpy as np


def overlong(lengths, correct, limit, margin):
    """0 up to limit - margin, then falling to -1 at the limit and beyond: DAPO (arXiv 2503.14476, eq. 13)."""
    return np.clip((limit - margin - lengths) / margin, -1.0, 0.0)


def kimi(lengths, correct, limit, margin):
    """0.5 - (n - min) / (max - min) in the group when correct, at most 0 when not; 0 in a group of one length.

    Kimi k1.5 (arXiv 2501.12599, section 2.3.3); limit and margin are not used.
    """
    shortest, longest = lengths.min(1, keepdims=True), lengths.max(1, keepdims=True)
    value = 0.5 - (lengths - shortest) / np.maximum(longest - shortest, 1)
    return np.where(longest == shortest, 0.0, np.where(correct, value, np.minimum(value, 0.0)))
