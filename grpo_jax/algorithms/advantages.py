"""Advantages f64[P, G], or f64[P, G, C] by token, on the host in float64.

What an estimator may read: rewards f64[P, G]; mask bool[P, G, C], tokens i32[P, G, C], token_rewards,
sampler_logprobs, old_entropy, values, step_rewards f64[P, G, C]; parts f64[K, P, G] and part_weights f64[K];
initial_entropy f64[]. NaN rewards are unscorable completions: outside every statistic, advantage 0.
Where an estimator compares within a group, a group whose rewards are all equal gets exactly 0, by
max == min: through eps, float rounding would leak.
"""
import math

import numpy as np


def ones(rewards):
    """1 for every completion: supervised learning on what is there."""
    return np.ones_like(rewards)


def correct(rewards):
    """1 for completions with a positive reward, else 0: rejection-sampling fine-tuning (arXiv 2308.01825).

    Wrong completions are ignored, not punished.
    """
    return (rewards > 0).astype(float)


def best_and_worst(rewards):
    """+1 for a group's best and -1 for its worst completion, the first of equals, else 0: the pairs of DPO."""
    signs = np.zeros_like(rewards)
    rows = np.flatnonzero(~dead_groups(rewards))
    if len(rows):
        signs[rows, np.nanargmax(rewards[rows], 1)] = 1
        signs[rows, np.nanargmin(rewards[rows], 1)] = -1
    return signs


def reward(rewards, *, baseline):
    """r - baseline, a constant: REINFORCE."""
    return rewards - baseline


def group_norm(rewards, *, std_ddof, std_eps):
    """(r - mean) / (std + eps) within the group: GRPO (arXiv 2402.03300, section 4.1.2).

    The paper leaves ddof and eps open; both are arguments here.
    """
    return group_mean(rewards) / (_group_std(rewards, std_ddof) + std_eps)


def group_mean(rewards):
    """r - mean within the group: Dr. GRPO (arXiv 2503.20783, section 3.2)."""
    return _centred(rewards, _mean(rewards))


def leave_one_out(rewards):
    """r minus the mean of the others = G / (G - 1) times group_mean: RLOO (arXiv 2402.14740, eq. 8)."""
    counts = np.sum(np.isfinite(rewards), 1, keepdims=True)
    return group_mean(rewards) * counts / np.maximum(counts - 1, 1)


def leave_one_out_norm(rewards, *, std_ddof, std_eps):
    """leave_one_out / (std + eps) within the group."""
    return leave_one_out(rewards) / (_group_std(rewards, std_ddof) + std_eps)


def hybrid(rewards, *, std_ddof, std_eps):
    """(r - group mean) / (std + eps) of all raw rewards of the batch: Lite PPO (arXiv 2508.08221).

    Dead groups enter the std, as published; their own advantage stays 0.
    """
    return group_mean(rewards) / (_std(rewards, std_ddof) + std_eps)


def batch_centred_std(rewards, *, std_ddof, std_eps):
    """a / (std + eps) of the batch, with a = r - group mean: ScaleRL (arXiv 2510.13786)."""
    centred = group_mean(rewards)
    return centred / (_std(centred, std_ddof) + std_eps)


def group_mean_batch_std(rewards, mask, *, std_ddof):
    """a whitened over all tokens of the batch, with a = r - group mean: REINFORCE++-baseline (arXiv 2501.03262).

    The mean over tokens takes groups off their centre where length goes with reward; dead groups stay at 0.
    """
    centred = group_mean(rewards)
    weights = mask.sum(-1) * np.isfinite(rewards)
    whitened = _whiten(np.nan_to_num(centred), weights, std_ddof)
    return np.where(dead_groups(rewards)[:, None], 0.0, whitened)


def reinforce_pp(token_rewards, mask, *, discount, std_ddof):
    """Discounted sums of token rewards to come, whitened over the batch's tokens: REINFORCE++ (arXiv 2501.03262)."""
    total, sums = 0.0, np.zeros_like(token_rewards)
    for t in reversed(range(mask.shape[-1])):
        # a masked token hands on what comes after it unchanged
        total = np.where(mask[..., t], token_rewards[..., t] + discount * total, total)
        sums[..., t] = total
    return _whiten(sums, mask, std_ddof)


def gae(token_rewards, mask, values, *, discount, gae_lambda):
    """Generalized advantages, whitened over the batch's tokens: PPO (arXiv 1506.02438, eq. 16; 1707.06347, eq. 11)."""
    return _whiten(generalized(token_rewards, mask, values, discount, gae_lambda), mask, 1)


def gae_by_length(token_rewards, mask, values, *, discount, length_alpha):
    """gae with lambda = 1 - 1 / (length_alpha n) for a completion of n tokens: VAPO (arXiv 2504.05118, eq. 8)."""
    lengths = np.maximum(mask.sum(-1), 1)
    lambdas = np.clip(1 - 1 / (length_alpha * lengths), 0.0, 1.0)
    return _whiten(generalized(token_rewards, mask, values, discount, lambdas), mask, 1)


def process(step_rewards, mask, *, std_ddof, std_eps):
    """Sum of the normalized rewards of steps that end at or after a token (arXiv 2402.03300, section 4.1.3).

    Normalized over all steps of all completions of the group; step_rewards is NaN where no step ends.
    """
    flat = step_rewards.reshape(len(step_rewards), -1)
    scale = _group_std(flat, std_ddof) + std_eps
    normalized = np.nan_to_num(group_mean(flat) / scale).reshape(step_rewards.shape)
    return np.flip(np.cumsum(np.flip(normalized, -1), -1), -1) * mask


def maxrl(rewards, *, std_eps):
    """(r - mean) / (mean + eps) within the group, 0 where the mean is not positive: MaxRL (arXiv 2602.02710)."""
    mean = _mean(rewards)
    return np.where(mean > 0, group_mean(rewards) / (np.maximum(mean, 0) + std_eps), 0.0)


def opo(rewards, mask):
    """r minus the group's mean weighted by lengths: OPO (arXiv 2505.23585)."""
    lengths = mask.sum(-1) * np.isfinite(rewards)
    mean = np.nansum(rewards * lengths, 1, keepdims=True) / np.maximum(lengths.sum(1, keepdims=True), 1)
    return _centred(rewards, mean)


def pkpo(rewards, *, pass_k):
    """pass_at_k_rewards less their group mean: PKPO (arXiv 2505.15201)."""
    return group_mean(pass_at_k_rewards(rewards, pass_k))


def gdpo(parts, part_weights, *, std_ddof, std_eps):
    """Reward parts normalized in their groups, and their weighted sum in the batch: GDPO (arXiv 2601.05242)."""
    normed = np.stack([group_norm(part, std_ddof=std_ddof, std_eps=std_eps) for part in parts])
    total = np.sum(part_weights[:, None, None] * np.nan_to_num(normed), 0)
    dead = np.all([dead_groups(part) for part in parts], 0)
    return np.where(dead[:, None], 0.0, total - total.mean()) / (total.std(ddof=std_ddof) + std_eps)


def xrpo_sharpen(rewards, mask, sampler_logprobs, *, std_ddof, std_eps, sharpen, sharpen_cap):
    """group_norm, and for correct completions a bonus where they were unlikely: XRPO (arXiv 2510.06672).

    bonus = min(max(sharpen (1 - exp(s - mean s)), 0), sharpen_cap A), s being the mean logprob of the tokens.
    The paper's constants are not verified; 1 and 0.5 come from secondary sources.
    """
    values = group_norm(rewards, std_ddof=std_ddof, std_eps=std_eps)
    likelihood = np.sum(np.where(mask, sampler_logprobs, 0.0), -1) / np.maximum(mask.sum(-1), 1)
    novelty = np.exp(np.minimum(likelihood - likelihood.mean(1, keepdims=True), 20.0))
    bonus = np.minimum(np.maximum(sharpen * (1 - novelty), 0), sharpen_cap * values)
    return values + np.where(rewards > 0, np.maximum(bonus, 0), 0.0)


def grpo_lambda(rewards, mask, *, efficient_share, efficient_alpha, std_ddof, std_eps):
    """group_norm of rewards that fall with length in the best groups: GRPO-lambda (arXiv 2505.18086, section 3).

    In the efficient_share of groups with the highest pass rate, a correct completion of n tokens is worth
    1 - efficient_alpha sigmoid((n - mean) / std) of the group's correct lengths, a wrong one 0.
    """
    right, lengths = rewards > 0, mask.sum(-1)
    best = np.argsort(-right.mean(1), kind='stable')[:round(efficient_share * len(rewards))]
    shaped = rewards.copy()
    for group in best:
        shaped[group] = np.where(np.isnan(rewards[group]), np.nan,
                                 efficient_rewards(right[group], lengths[group], efficient_alpha))
    return group_norm(shaped, std_ddof=std_ddof, std_eps=std_eps)


def gtpo(rewards, tokens, mask, old_entropy, initial_entropy, *, std_ddof, std_eps, entropy_penalty, entropy_cut):
    """(A - entropy_penalty H) delta lambda by token: GTPO (arXiv 2508.03772), the printed objective.

    H is the completion's mean entropy; delta drops completions with H above entropy_cut (ln 2) when the run
    began below it; lambda is conflict_weights. The authors' code differs: cut 0.7 without the initial branch,
    prefix and suffix weights multiplied.
    """
    values = group_norm(rewards, std_ddof=std_ddof, std_eps=std_eps)
    entropy = np.sum(np.where(mask, old_entropy, 0.0), -1) / np.maximum(mask.sum(-1), 1)
    kept = (entropy <= entropy_cut) | (initial_entropy > entropy_cut)
    shaped = np.where(dead_groups(rewards)[:, None], 0.0, (values - entropy_penalty * entropy) * kept)
    weights = np.stack([conflict_weights(*group) for group in zip(tokens, mask, values, strict=True)])
    return shaped[..., None] * weights


def conflict_weights(tokens, mask, advantages):
    """f64[G, C] of one group's tokens i32[G, C]: 2 or 0 for conflicting tokens of good or bad completions, else 1.

    A token conflicts when at its position, counted from the front or from the end, a completion of the
    other sign has the same one, in an unbroken run from that side (arXiv 2508.03772, section 3).
    """
    good, bad, lengths = advantages > 0, advantages < 0, mask.sum(1)
    from_front = _shared_run(tokens, mask, good, bad)
    back = (lengths[:, None] - 1 - np.arange(tokens.shape[1])) % tokens.shape[1]
    from_back = np.take_along_axis(_shared_run(np.take_along_axis(tokens, back, 1), mask, good, bad), back, 1)
    conflict = (from_front | from_back) & mask
    return np.where(~conflict, 1.0, np.where(good[:, None], 2.0, np.where(bad[:, None], 0.0, 1.0)))


def efficient_rewards(right, lengths, alpha):
    """f64[G] of one group: 1 - alpha sigmoid of the standardized length where right, else 0.

    One correct completion alone, or all of one length, loses alpha / 2.
    """
    among = lengths[right]
    if not len(among):
        return np.zeros(len(lengths))
    standardized = (lengths - among.mean()) / (among.std() or np.inf)
    return np.where(right, 1 - alpha / (1 + np.exp(-standardized)), 0.0)


def pass_at_k_rewards(rewards, k):
    """f64[P, G] shares in pass@k of completions with binary rewards: k / n when right, else k / n times the chance
    that the k - 1 others hold a right one (arXiv 2505.15201, section 3)."""
    counts = np.sum(np.isfinite(rewards), 1)
    hits = np.sum(rewards > 0, 1)
    others = [1 - math.comb(max(n - 1 - c, 0), k - 1) / math.comb(n - 1, k - 1) if n >= k else 1.0
              for n, c in zip(counts.tolist(), hits.tolist(), strict=True)]
    share = k / np.maximum(counts, 1)[:, None]
    return np.where(np.isfinite(rewards), share * np.where(rewards > 0, 1.0, np.array(others)[:, None]), np.nan)


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


def dead_groups(rewards):
    """bool[P]: the groups of rewards [P, G] whose finite rewards are all equal."""
    low = np.where(np.isfinite(rewards), rewards, np.inf).min(1)
    high = np.where(np.isfinite(rewards), rewards, -np.inf).max(1)
    return ~(high > low)


def _mean(rewards):
    counts = np.maximum(np.sum(np.isfinite(rewards), 1, keepdims=True), 1)
    return np.nansum(rewards, 1, keepdims=True) / counts


def _centred(rewards, mean):
    return np.where(dead_groups(rewards)[:, None], 0.0, rewards - mean)


def _group_std(rewards, ddof):
    counts = np.sum(np.isfinite(rewards), 1, keepdims=True)
    variance = np.nansum((rewards - _mean(rewards)) ** 2, 1, keepdims=True) / np.maximum(counts - ddof, 1)
    return np.sqrt(variance)


def _std(values, ddof):
    return _group_std(values.reshape(1, -1), ddof)[0, 0]


def _whiten(values, weights, ddof):
    """values less their weighted mean, over their weighted std; 0 where the weight is 0."""
    count = weights.sum()
    mean = np.sum(values * weights) / max(count, 1)
    variance = np.sum(weights * (values - mean) ** 2) / max(count - ddof, 1)
    return np.where(weights > 0, (values - mean) / np.sqrt(variance + 1e-8), 0.0)


def _shared_run(tokens, mask, good, bad):
    """bool[G, C]: whether all tokens of a row up to here stand at the same place in a row of the other sign too."""
    same = (tokens[:, None] == tokens[None]) & mask[:, None] & mask[None]
    opposite = (good[:, None] & bad[None]) | (bad[:, None] & good[None])
    return np.cumprod(np.any(same & opposite[..., None], 1), 1).astype(bool)
