"""Statistics of groups, from which advantages are computed, on the host in float64; NaN rewards count in none."""

import math

from jaxtyping import Bool, Float, Int, Num
import numpy as np

GATES = ('outcome', 'reward', 'none')  # what says that a group is dead


def judge_groups(
    gate: str, rewards: Float[np.ndarray, 'P G'], correct: Float[np.ndarray, 'P G'] | None = None
) -> Bool[np.ndarray, ' P']:
    """Which groups are dead, bool[P].

    gate 'reward': a group is dead if its finite rewards are all equal. 'outcome': also if all its completions are
    right or all are wrong, so that rewards for format or length do not teach alone; a group that the verifier cannot
    judge is judged by its rewards. An unscorable completion's outcome does not count. 'none': no group is dead.

    rewards: before shaping. correct: 1 right, 0 wrong, NaN unknown; None: all unknown.
    """
    equal = find_equal(rewards)
    if gate == 'none':
        return np.zeros_like(equal)
    if gate == 'reward' or correct is None:
        return equal
    judged = np.where(np.isfinite(rewards), correct, np.nan)
    return equal | (find_equal(judged) & np.isfinite(judged).any(1))


def find_equal(values: Num[np.ndarray, 'P G']) -> Bool[np.ndarray, ' P']:
    """Which groups have equal finite values, bool[P]; a group without finite values counts as one of them."""
    low = np.where(np.isfinite(values), values, np.inf).min(1)
    high = np.where(np.isfinite(values), values, -np.inf).max(1)
    return ~(high > low)


def group_means(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P 1']:
    """The mean of each group's finite rewards, 0 for a group without any."""
    counts = np.maximum(np.sum(np.isfinite(rewards), 1, keepdims=True), 1)
    return np.nansum(rewards, 1, keepdims=True) / counts


def centre(rewards: Float[np.ndarray, 'P G'], mean: Float[np.ndarray, 'P 1']) -> Float[np.ndarray, 'P G']:
    """rewards minus the mean, and exactly 0 in groups whose rewards are all equal."""
    return np.where(find_equal(rewards)[:, None], 0.0, rewards - mean)


def group_std(rewards: Float[np.ndarray, 'P G'], ddof: int) -> Float[np.ndarray, 'P 1']:
    """The standard deviation of each group's finite rewards; the divisor is their number minus ddof, at least 1."""
    counts = np.sum(np.isfinite(rewards), 1, keepdims=True)
    variance = np.nansum((rewards - group_means(rewards)) ** 2, 1, keepdims=True) / np.maximum(counts - ddof, 1)
    return np.sqrt(variance)


def batch_std(values: Float[np.ndarray, 'P G'], ddof: int) -> float:
    """The standard deviation of all finite values; the divisor is their number minus ddof, at least 1."""
    return group_std(values.reshape(1, -1), ddof)[0, 0]


def completion_means(x: Float[np.ndarray, 'P G C'], mask: Bool[np.ndarray, 'P G C']) -> Float[np.ndarray, 'P G']:
    """The mean of x over each completion's tokens, 0 for a completion without any."""
    return np.sum(np.where(mask, x, 0.0), -1) / np.maximum(mask.sum(-1), 1)


def whiten(
    values: Float[np.ndarray, '*shape'], weights: Num[np.ndarray, '*shape'] | Bool[np.ndarray, '*shape'], ddof: int
) -> Float[np.ndarray, '*shape']:
    """(values - weighted mean) / weighted std, 0 where the weight is 0; ddof is subtracted from the sum of weights."""
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
    """Generalized advantages (arXiv 1506.02438): A_t = sum over k of (discount trace)^k delta_(t+k).

    delta is r + discount V_next - V, of token_rewards r and values V. trace is the paper's lambda, one number or one a
    row. A masked token is passed over, as if its neighbours were adjacent, and has advantage 0. These advantages plus
    the values are the critic's targets.
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
    """Each completion's reward for the pass@k of its group (arXiv 2505.15201, section 3).

    k / n for a right completion; for a wrong one, k / n times the chance that at least one of k - 1 others is right
    (1 where n < k). n: how many values of the group are finite. correct: 1 right, 0 wrong; NaN stays.
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
    """The rewards of one group: 0 for wrong completions, and 1 - alpha sigmoid(standardized length) for right ones.

    Lengths are standardized over the right completions. A single right completion, or several of one length, gets
    1 - alpha / 2.
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
    """The weights of one group's tokens: for a conflicting token 2 if A > 0 and 0 if A < 0, and 1 for other tokens.

    A token conflicts if a completion whose advantage A has the other sign holds the same token at the same position,
    counted from the front or from the end, in an unbroken run from that side (arXiv 2508.03772, section 3). mask: the
    tokens of completions. forced: tokens among them that were not sampled; they conflict with nothing and break no run.
    """
    forced = np.zeros_like(mask) if forced is None else forced & mask
    good, bad, lengths = advantages > 1e-9, advantages < -1e-9, mask.sum(1)  # 1e-9 is above the rounding of a mean
    opposite = (good[:, None] & bad[None]) | (bad[:, None] & good[None])
    from_front = _mark_conflicts(tokens, mask, forced, opposite)
    backwards = (lengths[:, None] - 1 - np.arange(tokens.shape[1])) % tokens.shape[1]
    reversed_tokens, reversed_forced = (np.take_along_axis(x, backwards, 1) for x in (tokens, forced))
    from_back = np.take_along_axis(_mark_conflicts(reversed_tokens, mask, reversed_forced, opposite), backwards, 1)
    conflict = (from_front | from_back) & mask
    return np.where(~conflict, 1.0, np.where(good[:, None], 2.0, np.where(bad[:, None], 0.0, 1.0)))


def _mark_conflicts(tokens, mask, forced, opposite):
    """bool[G, C]: the tokens that a row of the other sign has in the same position, in an unbroken run from the front.

    The run is unbroken if, in each earlier position, some such row has the same token, or one of the two is forced.
    opposite: bool[G, G], which rows have advantages of opposite signs.
    """
    both_GGC = mask[:, None] & mask[None] & opposite[..., None]
    forced_GGC = forced[:, None] | forced[None]
    same_GGC = (tokens[:, None] == tokens[None]) & both_GGC
    unbroken = np.cumprod(np.any(same_GGC | (forced_GGC & both_GGC), 1), 1).astype(bool)
    return unbroken & np.any(same_GGC & ~forced_GGC, 1)
