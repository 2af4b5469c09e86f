"""Advantages f64[P, G] of rewards f64[P, G]; computed on the host, in float64.

NaN rewards are unscorable completions: outside the group's statistics, advantage 0. Groups whose
rewards are all equal are handled by the caller (algorithm.compute_advantages), exactly and not by eps.
"""
import numpy as np


def group_norm(rewards, *, std_ddof, std_eps):
    """(r - mean) / (std + eps) within the group: GRPO (arXiv 2402.03300, section 4.1.2).

    The paper leaves ddof and eps open; both are arguments here.
    """
    counts = np.sum(np.isfinite(rewards), 1, keepdims=True)
    centred = group_mean(rewards)
    variance = np.nansum(centred**2, 1, keepdims=True) / np.maximum(counts - std_ddof, 1)
    return centred / (np.sqrt(variance) + std_eps)


def group_mean(rewards):
    """r - mean within the group: Dr. GRPO (arXiv 2503.20783, section 3.2)."""
    counts = np.maximum(np.sum(np.isfinite(rewards), 1, keepdims=True), 1)
    return rewards - np.nansum(rewards, 1, keepdims=True) / counts


def leave_one_out(rewards):
    """r minus the mean of the others = G / (G - 1) times group_mean: RLOO (arXiv 2402.14740, eq. 8)."""
    counts = np.sum(np.isfinite(rewards), 1, keepdims=True)
    return group_mean(rewards) * counts / np.maximum(counts - 1, 1)
