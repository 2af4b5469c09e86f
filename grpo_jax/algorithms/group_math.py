"""What estimators of advantages are made of, on the host in float64; NaN rewards are left out of every statistic."""

import math

from jaxtyping import Bool, Float, Int, Num
import numpy as np

GATES = ('auto', 'outcome', 'reward', 'none')  # what says that a group is dead


def judge_groups(
    gate: str, rewards: Float[np.ndarray, 'P G'], correct: Float[np.ndarray, 'P G'] | None = None
) -> Bool[np.ndarray, ' P']:
    """Which groups are dead, by rewards before shaping and correct (1 right, 0 wrong, NaN: unknown; None: all unknown).

    gate outcome, or auto: all are right or all are wrong, so that what else is paid for does not teach alone; a group
    of which the verifier knows nothing is judged as by gate reward: all rewards are equal. gate none: no group.
    """
    equal = dead_groups(rewards)
    if gate == 'none':
        return np.zeros_like(equal)
    if gate == 'reward' or correct is None:
        return equal
    return equal | (dead_groups(correct) & np.isfinite(correct).any(1))


def dead_groups(rewards: Num[np.ndarray, 'P G']) -> Bool[np.ndarray, ' P']:
    """Which groups' finite rewards are all equal."""
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


def pass_at_k_rewards(correct: Float[np.ndarray, 'P G'], k: int) -> Float[np.ndarray, 'P G']:
    """Shares in pass@k of completions that are right, 1, or wrong, 0 (arXiv 2505.15201, section 3).

    k / n for a right completion; for a wrong one k / n times the chance that one of k - 1 others is right.
    """
    counts = np.sum(np.isfinite(correct), 1)
    hits = np.sum(correct >= 1, 1)
    others = [
        1 - math.comb(max(n - 1 - c, 0), k - 1) / math.comb(n - 1, k - 1) if n >= k else 1.0
        for n, c in zip(counts.tolist(), hits.tolist(), strict=True)
    ]
    share = k / np.maximum(counts, 1)[:, None]
    return np.where(np.isfinite(correct), share * np.where(correct >= 1, 1.0, np.array(others)[:, None]), np.nan)


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
    tokens: Int[np.ndarray, 'G C'],
    mask: Bool[np.ndarray, 'G C'],
    advantages: Float[np.ndarray, ' G'],
    forced: Bool[np.ndarray, 'G C'] | None = None,
) -> Float[np.ndarray, 'G C']:
    """The weights of one group's tokens: 2 for a conflicting token of a good completion, 0 of a bad one, else 1.

    A token conflicts when a completion of the other sign has the same token at the same position, counted from the
    front or from the end, in an unbroken run from that side (arXiv 2508.03772, section 3). mask: the tokens of
    completions, whose places count; those of them that are forced conflict with nothing and break no run.
    """
    forced = np.zeros_like(mask) if forced is None else forced & mask
    good, bad, lengths = advantages > 1e-9, advantages < -1e-9, mask.sum(1)  # beyond the rounding of a mean
    opposite = (good[:, None] & bad[None]) | (bad[:, None] & good[None])
    from_front = _conflicts(tokens, mask, forced, opposite)
    back = (lengths[:, None] - 1 - np.arange(tokens.shape[1])) % tokens.shape[1]
    turned = (np.take_along_axis(x, back, 1) for x in (tokens, forced))
    from_back = np.take_along_axis(_conflicts(next(turned), mask, next(turned), opposite), back, 1)
    conflict = (from_front | from_back) & mask
    return np.where(~conflict, 1.0, np.where(good[:, None], 2.0, np.where(bad[:, None], 0.0, 1.0)))


def _conflicts(tokens, mask, forced, opposite):
    """bool[G, C]: whether a row shares its token with a row of the other sign, and in each place before it as well."""
    there = mask[:, None] & mask[None] & opposite[..., None]
    free = forced[:, None] | forced[None]
    same = (tokens[:, None] == tokens[None]) & there
    unbroken = np.cumprod(np.any(same | (free & there), 1), 1).astype(bool)
    return unbroken & np.any(same & ~free, 1)
