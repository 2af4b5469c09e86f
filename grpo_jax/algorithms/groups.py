"""What estimators of advantages are made of, on the host in float64; NaN rewards are left out of every statistic."""

import math

import numpy as np


def dead_groups(rewards):
    """bool[P]: the groups of rewards [P, G] whose finite rewards are all equal."""
    low = np.where(np.isfinite(rewards), rewards, np.inf).min(1)
    high = np.where(np.isfinite(rewards), rewards, -np.inf).max(1)
    return ~(high > low)


def mean_of(rewards):
    """f64[P, 1]: the means of groups."""
    counts = np.maximum(np.sum(np.isfinite(rewards), 1, keepdims=True), 1)
    return np.nansum(rewards, 1, keepdims=True) / counts


def centred(rewards, mean):
    """rewards less the mean, and exactly 0 in dead groups."""
    return np.where(dead_groups(rewards)[:, None], 0.0, rewards - mean)


def group_std(rewards, ddof):
    """f64[P, 1]: the standard deviations of groups."""
    counts = np.sum(np.isfinite(rewards), 1, keepdims=True)
    variance = np.nansum((rewards - mean_of(rewards)) ** 2, 1, keepdims=True) / np.maximum(counts - ddof, 1)
    return np.sqrt(variance)


def batch_std(values, ddof):
    """The standard deviation of all values."""
    return group_std(values.reshape(1, -1), ddof)[0, 0]


def token_mean(x, mask):
    """f64[P, G]: means over completions' tokens, 0 for one without any."""
    return np.sum(np.where(mask, x, 0.0), -1) / np.maximum(mask.sum(-1), 1)


def whiten(values, weights, ddof):
    """values less their weighted mean, over their weighted std; 0 where the weight is 0."""
    count = weights.sum()
    mean = np.sum(values * weights) / max(count, 1)
    variance = np.sum(weights * (values - mean) ** 2) / max(count - ddof, 1)
    return np.where(weights > 0, (values - mean) / np.sqrt(variance + 1e-8), 0.0)


def generalized(token_rewards, mask, values, discount, lambda_):
    """f64[..., C] advantages sum over k of (discount lambda)^k delta, carried across masked gaps (arXiv 1506.02438).

    lambda_ is a number or f64[...]; add the values for the critic's targets.
    """
    total, next_value, found = 0.0, 0.0, np.zeros_like(values)
    for t in reversed(range(mask.shape[-1])):
        valid = mask[..., t]
        delta = token_rewards[..., t] + discount * next_value - values[..., t]
        total = np.where(valid, delta + discount * lambda_ * total, total)
        next_value = np.where(valid, values[..., t], next_value)
        found[..., t] = np.where(valid, total, 0.0)
    return found


def pass_at_k_rewards(rewards, k):
    """f64[P, G] shares in pass@k of completions with binary rewards: k / n when right, else k / n times the chance
    that the k - 1 others hold a right one (arXiv 2505.15201, section 3)."""
    counts = np.sum(np.isfinite(rewards), 1)
    hits = np.sum(rewards > 0, 1)
    others = [
        1 - math.comb(max(n - 1 - c, 0), k - 1) / math.comb(n - 1, k - 1) if n >= k else 1.0
        for n, c in zip(counts.tolist(), hits.tolist(), strict=True)
    ]
    share = k / np.maximum(counts, 1)[:, None]
    return np.where(np.isfinite(rewards), share * np.where(rewards > 0, 1.0, np.array(others)[:, None]), np.nan)


def efficient_rewards(right, lengths, alpha):
    """f64[G] of one group: 1 - alpha sigmoid of the standardized length where right, else 0.

    One correct completion alone, or all of one length, loses alpha / 2.
    """
    among = lengths[right]
    if not len(among):
        return np.zeros(len(lengths))
    standardized = (lengths - among.mean()) / (among.std() or np.inf)
    return np.where(right, 1 - alpha / (1 + np.exp(-standardized)), 0.0)


def conflict_weights(tokens, mask, advantages):
    """f64[G, C] of one group's tokens i32[G, C]: 2 or 0 for conflicting tokens of good or bad completions, else 1.

    A token conflicts when at its position, counted from the front or from the end, a completion of the
    other sign has the same one, in an unbroken run from that side (arXiv 2508.03772, section 3).
    """
    good, bad, lengths = advantages > 1e-9, advantages < -1e-9, mask.sum(1)  # beyond the rounding of a mean
    from_front = _shared_run(tokens, mask, good, bad)
    back = (lengths[:, None] - 1 - np.arange(tokens.shape[1])) % tokens.shape[1]
    from_back = np.take_along_axis(_shared_run(np.take_along_axis(tokens, back, 1), mask, good, bad), back, 1)
    conflict = (from_front | from_back) & mask
    return np.where(~conflict, 1.0, np.where(good[:, None], 2.0, np.where(bad[:, None], 0.0, 1.0)))


def _shared_run(tokens, mask, good, bad):
    """bool[G, C]: whether all tokens of a row up to here stand at the same place in a row of the other sign too."""
    same = (tokens[:, None] == tokens[None]) & mask[:, None] & mask[None]
    opposite = (good[:, None] & bad[None]) | (bad[:, None] & good[None])
    return np.cumprod(np.any(same & opposite[..., None], 1), 1).astype(bool)
