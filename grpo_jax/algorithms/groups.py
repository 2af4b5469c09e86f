"""What estimators of advantages are made of, on the host in float64; NaN rewards are left out of every statistic."""

import math

from jaxtyping import Bool, Float, Int, Num
import numpy as np


def dead_groups(rewards: Num[np.ndarray, 'P G']) -> Bool[np.ndarray, ' P']:
    """Which groups are dead: their finite rewards are all equal."""
    low = np.where(np.isfinite(rewards), rewards, np.inf).min(1)
    high = np.where(np.isfinite(rewards), rewards, -np.inf).max(1)
    return ~(high > low)


def group_means(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P 1']:
    """The means of groups, 0 for one without a finite reward."""
    counts = np.maximum(np.sum(np.isfinite(rewards), 1, keepdims=True), 1)
    return np.nansum(rewards, 1, keepdims=True) / counts


def centre(rewards: Float[np.ndarray, 'P G'], mean: Float[np.ndarray, 'P 1']) -> Float[np.ndarray, 'P G']:
    """rewards less the mean, and exactly 0 in dead groups."""
    return np.where(dead_groups(rewards)[:, None], 0.0, rewards - mean)


def group_std(rewards: Float[np.ndarray, 'P G'], ddof: int) -> Float[np.ndarray, 'P 1']:
    """The standard deviations of groups."""
    counts = np.sum(np.isfinite(rewards), 1, keepdims=True)
    variance = np.nansum((rewards - group_means(rewards)) ** 2, 1, keepdims=True) / np.maximum(counts - ddof, 1)
    return np.sqrt(variance)


def batch_std(values: Float[np.ndarray, 'P G'], ddof: int) -> float:
    """The standard deviation of all values."""
    return group_std(values.reshape(1, -1), ddof)[0, 0]


def completion_means(x: Float[np.ndarray, 'P G C'], mask: Bool[np.ndarray, 'P G C']) -> Float[np.ndarray, 'P G']:
    """Means over completions' tokens, 0 for one without any."""
    return np.sum(np.where(mask, x, 0.0), -1) / np.maximum(mask.sum(-1), 1)


def whiten(
    values: Float[np.ndarray, '*shape'], weights: Num[np.ndarray, '*shape'] | Bool[np.ndarray, '*shape'], ddof: int
) -> Float[np.ndarray, '*shape']:
    """values less their weighted mean, over their weighted std; 0 where the weight is 0."""
    count = weights.sum()
    mean = np.sum(values * weights) / max(count, 1)
    variance = np.sum(weights * (values - mean) ** 2) / max(count - ddof, 1)
    return np.where(weights > 0, (values - mean) / np.sqrt(variance + 1e-8), 0.0)


def generalized_advantages(
    token_rewards: Float[np.ndarray, '*rows C'],
    mask: Bool[np.ndarray, '*rows C'],
    values: Float[np.ndarray, '*rows C'],
    discount: float,
    trace: float | Float[np.ndarray, '*rows'],
) -> Float[np.ndarray, '*rows C']:
    """The sums over k of (discount trace)^k delta, carried across masked gaps (arXiv 1506.02438).

    trace is the lambda of the paper. The sums plus the values are the critic's targets.
    """
    total, next_value, sums = 0.0, 0.0, np.zeros_like(values)
    for t in reversed(range(mask.shape[-1])):
        valid = mask[..., t]
        delta = token_rewards[..., t] + discount * next_value - values[..., t]
        total = np.where(valid, delta + discount * trace * total, total)
        next_value = np.where(valid, values[..., t], next_value)
        sums[..., t] = np.where(valid, total, 0.0)
    return sums


def pass_at_k_rewards(rewards: Float[np.ndarray, 'P G'], k: int) -> Float[np.ndarray, 'P G']:
    """Shares in pass@k of completions with binary rewards (arXiv 2505.15201, section 3).

    k / n for a right completion; for a wrong one k / n times the chance that one of k - 1 others is right.
    """
    counts = np.sum(np.isfinite(rewards), 1)
    hits = np.sum(rewards > 0, 1)
    others = [
        1 - math.comb(max(n - 1 - c, 0), k - 1) / math.comb(n - 1, k - 1) if n >= k else 1.0
        for n, c in zip(counts.tolist(), hits.tolist(), strict=True)
    ]
    share = k / np.maximum(counts, 1)[:, None]
    return np.where(np.isfinite(rewards), share * np.where(rewards > 0, 1.0, np.array(others)[:, None]), np.nan)


def efficient_rewards(
    right: Bool[np.ndarray, ' G'], lengths: Int[np.ndarray, ' G'], alpha: float
) -> Float[np.ndarray, ' G']:
    """The rewards of one group: 1 - alpha sigmoid of the standardized length where right, else 0.

    One correct completion alone, or all of one length, loses alpha / 2.
    """
    right_lengths = lengths[right]
    if not len(right_lengths):
        return np.zeros(len(lengths))
    standardized = (lengths - right_lengths.mean()) / (right_lengths.std() or np.inf)
    return np.where(right, 1 - alpha / (1 + np.exp(-standardized)), 0.0)


def conflict_weights(
    tokens: Int[np.ndarray, 'G C'], mask: Bool[np.ndarray, 'G C'], advantages: Float[np.ndarray, ' G']
) -> Float[np.ndarray, 'G C']:
    """The weights of one group's tokens: 2 for a conflicting token of a good completion, 0 of a bad one, else 1.

    A token conflicts when a completion of the other sign has the same token at the same position, counted from the
    front or from the end, in an unbroken run from that side (arXiv 2508.03772, section 3).
    """
    good, bad, lengths = advantages > 1e-9, advantages < -1e-9, mask.sum(1)  # beyond the rounding of a mean
    from_front = _shared_run(tokens, mask, good, bad)
    back = (lengths[:, None] - 1 - np.arange(tokens.shape[1])) % tokens.shape[1]
    from_back = np.take_along_axis(_shared_run(np.take_along_axis(tokens, back, 1), mask, good, bad), back, 1)
    conflict = (from_front | from_back) & mask
    return np.where(~conflict, 1.0, np.where(good[:, None], 2.0, np.where(bad[:, None], 0.0, 1.0)))


def _shared_run(tokens, mask, good, bad):
    """bool[G, C]: whether a row and, at each place up to here, some row of the other sign have the same token."""
    same = (tokens[:, None] == tokens[None]) & mask[:, None] & mask[None]
    opposite = (good[:, None] & bad[None]) | (bad[:, None] & good[None])
    return np.cumprod(np.any(same & opposite[..., None], 1), 1).astype(bool)
