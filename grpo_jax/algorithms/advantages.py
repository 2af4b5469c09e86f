"""Estimators of advantages: each returns f64[P, G], or f64[P, G, C] by token, on the host in float64.

What an estimator may read: rewards f64[P, G]; correct f64[P, G], what the verifier says (1 right, 0 wrong, NaN: it
cannot tell); mask bool[P, G, C], the sampled tokens; completion_mask bool[P, G, C], the forced tokens too; tokens
i32[P, G, C]; token_rewards, sampler_logprobs, teacher_logprobs, old_entropy, values, step_rewards f64[P, G, C]; parts
f64[K, P, G], the K rewards that are summed, and part_weights f64[K]; initial_entropy f64[]; discount f64[], the
algorithm's; run_baseline f64[] and prompt_baselines f64[P, G], moving averages of earlier steps' rewards; old_logprobs
f64[P, G, C], the policy's own; dead bool[P], the groups that the gate finds dead; sizes i64[P], how many of the G
completions are real where groups differ in size.

A NaN reward marks an unscorable completion: it counts in no statistic, and its advantage is 0, unless the estimator has
the property `unrewarded` and so does not read rewards. An estimator that compares within a group gives exactly 0 to a
group whose rewards are all equal. That is found by max == min; a division by std + eps alone would let float rounding
through.
"""

from typing import Annotated

from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.algorithms import group_math, pieces, reductions
from grpo_jax.ranges import Coefficient, Count, NotNegative, OneOf, Range, Share

Ddof = Annotated[int, OneOf((0, 1))]
Eps = Annotated[float, Range(above=0, most=1e3)]  # 0 would divide a group of equal rewards by 0


@pieces.properties(alone=True, unrewarded=True)
def ones(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """1 for every completion: supervised learning on the completions at hand."""
    return np.ones_like(rewards)


@pieces.properties(alone=True, unrewarded=True)
def zeros(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """0 for every completion: what is learned comes from a teacher or a regularizer alone."""
    return np.zeros_like(rewards)


@pieces.properties(alone=True)
def correct(correct: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """1 for right completions, else 0: rejection-sampling fine-tuning (arXiv 2308.01825).

    Wrong completions are ignored, not punished.
    """
    return (correct >= 1).astype(float)


def best_and_worst(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """+1 for a group's best and -1 for its worst completion, the first of equals, else 0: the pairs of DPO."""
    signs = np.zeros_like(rewards)
    alive = np.flatnonzero(~group_math.find_equal(rewards))
    if len(alive):
        signs[alive, np.nanargmax(rewards[alive], 1)] = 1
        signs[alive, np.nanargmin(rewards[alive], 1)] = -1
    return signs


@pieces.properties(alone=True)
def reward(
    rewards: Float[np.ndarray, 'P G'],
    *,
    baseline: Annotated[float, Range(least=-1e6, most=1e6)] = 0.0,  # subtracted from every reward
) -> Float[np.ndarray, 'P G']:
    """r - baseline, where the baseline is a constant: REINFORCE."""
    return rewards - baseline


@pieces.properties(alone=True)
def moving_mean(rewards: Float[np.ndarray, 'P G'], run_baseline: float | np.floating) -> Float[np.ndarray, 'P G']:
    """r minus the moving average of the run's earlier rewards: REINFORCE with a baseline (Williams 1992)."""
    return rewards - run_baseline


@pieces.properties(alone=True)
def prompt_moving_mean(
    rewards: Float[np.ndarray, 'P G'], prompt_baselines: Float[np.ndarray, 'P G']
) -> Float[np.ndarray, 'P G']:
    """r minus the moving average of the prompt's earlier rewards; a new prompt has the average of the run."""
    return rewards - prompt_baselines


def group_norm(
    rewards: Float[np.ndarray, 'P G'],
    *,
    std_ddof: Ddof = 1,  # 1: divided by G - 1, as in TRL, verl and OpenRLHF; 0: by G; the papers do not say
    std_eps: Eps = 1e-6,  # added to the standard deviation that divides; in maxrl to the mean
) -> Float[np.ndarray, 'P G']:
    """(r - mean) / (std + eps) within the group: GRPO (arXiv 2402.03300, section 4.1.2)."""
    return group_mean(rewards) / (group_math.group_std(rewards, std_ddof) + std_eps)


def group_mean(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """r - mean within the group: Dr. GRPO (arXiv 2503.20783, section 3.2)."""
    return group_math.centre(rewards, group_math.group_means(rewards))


def leave_one_out(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, 'P G']:
    """r minus the mean of the others = G / (G - 1) times group_mean: RLOO (arXiv 2402.14740, eq. 8)."""
    counts = np.sum(np.isfinite(rewards), 1, keepdims=True)
    return group_mean(rewards) * counts / np.maximum(counts - 1, 1)


def leave_one_out_norm(
    rewards: Float[np.ndarray, 'P G'], *, std_ddof: Ddof = 1, std_eps: Eps = 1e-6
) -> Float[np.ndarray, 'P G']:
    """leave_one_out divided by (std + eps), where std is the standard deviation of the group's rewards."""
    return leave_one_out(rewards) / (group_math.group_std(rewards, std_ddof) + std_eps)


@pieces.properties(over_batch=True)
def hybrid(rewards: Float[np.ndarray, 'P G'], *, std_ddof: Ddof = 1, std_eps: Eps = 1e-6) -> Float[np.ndarray, 'P G']:
    """(r - group mean) / (std + eps), with the std of the batch's raw rewards: Lite PPO (arXiv 2508.08221).

    Dead groups enter the std, as published; their own advantage stays 0.
    """
    return group_mean(rewards) / (group_math.batch_std(rewards, std_ddof) + std_eps)


@pieces.properties(over_batch=True)
def batch_centred_std(
    rewards: Float[np.ndarray, 'P G'], *, std_ddof: Ddof = 1, std_eps: Eps = 1e-6
) -> Float[np.ndarray, 'P G']:
    """r - group mean, divided by (std of these differences in the batch + eps): ScaleRL (arXiv 2510.13786)."""
    centred = group_mean(rewards)
    scored = np.where(np.isfinite(rewards), centred, np.nan)
    return centred / (group_math.batch_std(scored, std_ddof) + std_eps)


@pieces.properties(over_batch=True, by_token=False)
def group_mean_batch_std(
    rewards: Float[np.ndarray, 'P G'], mask: Bool[np.ndarray, 'P G C'], *, std_ddof: Ddof = 1
) -> Float[np.ndarray, 'P G']:
    """r - group mean, whitened over all tokens of the batch: REINFORCE++-baseline (arXiv 2501.03262).

    The mean and std count a completion once for each token, so a group's advantages need not add up to 0. Groups of
    equal rewards stay at 0.
    """
    centred = group_mean(rewards)
    weights = mask.sum(-1) * np.isfinite(rewards)
    whitened = group_math.whiten(np.nan_to_num(centred), weights, std_ddof)
    return np.where(group_math.find_equal(rewards)[:, None], 0.0, whitened)


@pieces.properties(alone=True)
def reinforce_pp(
    token_rewards: Float[np.ndarray, 'P G C'], mask: Bool[np.ndarray, 'P G C'], discount: float, *, std_ddof: Ddof = 1
) -> Float[np.ndarray, 'P G C']:
    """Discounted sums of the rewards from each token on, whitened over all tokens: REINFORCE++ (arXiv 2501.03262)."""
    total, sums = 0.0, np.zeros_like(token_rewards)
    for t in reversed(range(mask.shape[-1])):
        # the sum passes a masked token unchanged
        total = np.where(mask[..., t], token_rewards[..., t] + discount * total, total)
        sums[..., t] = total
    return group_math.whiten(sums, mask, std_ddof)


@pieces.properties(alone=True)
def gae(
    token_rewards: Float[np.ndarray, 'P G C'],
    mask: Bool[np.ndarray, 'P G C'],
    values: Float[np.ndarray, 'P G C'],
    discount: float,
    *,
    gae_lambda: Share = 0.95,  # 1: all rewards to come count; 0: the next token's value alone
) -> Float[np.ndarray, 'P G C']:
    """Generalized advantages, whitened over the batch's tokens: PPO (arXiv 1506.02438, eq. 16; 1707.06347, eq. 11)."""
    return group_math.whiten(
        group_math.generalized_advantages(token_rewards, mask, values, discount, gae_lambda), mask, 1
    )


@pieces.properties(alone=True)
def gae_by_length(
    token_rewards: Float[np.ndarray, 'P G C'],
    mask: Bool[np.ndarray, 'P G C'],
    values: Float[np.ndarray, 'P G C'],
    discount: float,
    *,
    # lambda is 1 - 1 / (length_alpha n) for a completion of n tokens: larger looks further ahead
    length_alpha: Annotated[float, Range(above=0, most=1e6)] = 0.05,
) -> Float[np.ndarray, 'P G C']:
    """gae with lambda = max(1 - 1 / (length_alpha n), 0) for n sampled tokens: VAPO (arXiv 2504.05118, eq. 8)."""
    lengths = np.maximum(mask.sum(-1), 1)
    lambdas = np.clip(1 - 1 / (length_alpha * lengths), 0.0, 1.0)
    return group_math.whiten(group_math.generalized_advantages(token_rewards, mask, values, discount, lambdas), mask, 1)


def process(
    step_rewards: Float[np.ndarray, 'P G C'],
    mask: Bool[np.ndarray, 'P G C'],
    *,
    std_ddof: Ddof = 1,
    std_eps: Eps = 1e-6,
) -> Float[np.ndarray, 'P G C']:
    """At each token, the sum of normalized rewards for steps that end there or later (arXiv 2402.03300, section 4.1.3).

    Rewards are normalized over all steps in the group's completions. step_rewards is NaN where no step ends.
    """
    flat = step_rewards.reshape(len(step_rewards), -1)
    scale = group_math.group_std(flat, std_ddof) + std_eps
    normalized = np.nan_to_num(group_mean(flat) / scale).reshape(step_rewards.shape)
    return np.flip(np.cumsum(np.flip(normalized, -1), -1), -1) * mask


@pieces.properties(nonnegative=True)
def maxrl(correct: Float[np.ndarray, 'P G'], *, std_eps: Eps = 1e-6) -> Float[np.ndarray, 'P G']:
    """(c - mean) / (mean + eps) within the group, c = correct; 0 if no completion is right: MaxRL (arXiv 2602.02710).

    A completion that the verifier cannot judge has 0.
    """
    mean = group_math.group_means(correct)
    return np.where((mean > 0) & np.isfinite(correct), group_mean(correct) / (mean + std_eps), 0.0)


@pieces.properties(by_token=False)
def opo(rewards: Float[np.ndarray, 'P G'], mask: Bool[np.ndarray, 'P G C']) -> Float[np.ndarray, 'P G']:
    """r minus the group's mean reward, a mean weighted by lengths in sampled tokens: OPO (arXiv 2505.23585)."""
    lengths = mask.sum(-1) * np.isfinite(rewards)
    mean = np.nansum(rewards * lengths, 1, keepdims=True) / np.maximum(lengths.sum(1, keepdims=True), 1)
    return group_math.centre(rewards, mean)


@pieces.properties(nonnegative=True)
def pkpo(
    correct: Float[np.ndarray, 'P G'],
    *,
    pass_k: Count = 4,  # k of the pass@k that is maximized
) -> Float[np.ndarray, 'P G']:
    """group_math.pass_at_k_rewards minus their group mean: PKPO (arXiv 2505.15201).

    A completion that the verifier cannot judge has 0.
    """
    return np.where(np.isfinite(correct), group_mean(group_math.pass_at_k_rewards(correct, pass_k)), 0.0)


@pieces.properties(over_batch=True)
def gdpo(
    parts: Float[np.ndarray, 'K P G'], part_weights: Float[np.ndarray, ' K'], *, std_ddof: Ddof = 1, std_eps: Eps = 1e-6
) -> Float[np.ndarray, 'P G']:
    """The weighted sum of group_norm of each reward part, normalized over the batch: GDPO (arXiv 2601.05242).

    It is 0 in a group where each part gives all completions the same reward.
    """
    normed = np.stack([group_norm(part, std_ddof=std_ddof, std_eps=std_eps) for part in parts])
    total = np.sum(part_weights[:, None, None] * np.nan_to_num(normed), 0)
    total = np.where(np.isfinite(parts).any(0), total, np.nan)
    dead = np.all([group_math.find_equal(part) for part in parts], 0)
    scale = group_math.batch_std(total, std_ddof) + std_eps
    return np.where(dead[:, None], 0.0, total - group_math.group_means(total.reshape(1, -1))) / scale


@pieces.properties(by_token=False)
def xrpo_sharpen(
    rewards: Float[np.ndarray, 'P G'],
    correct: Float[np.ndarray, 'P G'],
    mask: Bool[np.ndarray, 'P G C'],
    sampler_logprobs: Float[np.ndarray, 'P G C'],
    *,
    std_ddof: Ddof = 1,
    std_eps: Eps = 1e-6,
    sharpen: Coefficient = 1.0,  # size of the bonus for right completions that were unlikely
    sharpen_cap: Coefficient = 0.5,  # largest bonus, as a share of the advantage
) -> Float[np.ndarray, 'P G']:
    """group_norm, plus a bonus for correct completions that were unlikely: XRPO (arXiv 2510.06672).

    bonus = min(max(sharpen (1 - exp(s - mean s)), 0), sharpen_cap A), where A is group_norm and s a completion's mean
    logprob by token, by the sampler.
    As in the paper's text, the bonus is never below 0, and 0 for wrong completions; the paper's printed formula differs
    from its text if rewards are not binary. The default numbers 1 and 0.5 come from secondary sources.
    """
    values = group_norm(rewards, std_ddof=std_ddof, std_eps=std_eps)
    likelihood = group_math.completion_means(sampler_logprobs, mask)
    mean = group_math.group_means(np.where(mask.any(-1), likelihood, np.nan))
    novelty = np.exp(np.minimum(likelihood - mean, reductions.MAX_LOG_RATIO))
    bonus = np.minimum(np.maximum(sharpen * (1 - novelty), 0), sharpen_cap * values)
    return values + np.where(correct >= 1, np.maximum(bonus, 0), 0.0)


@pieces.properties(by_token=False)
def grpo_lambda(
    rewards: Float[np.ndarray, 'P G'],
    correct: Float[np.ndarray, 'P G'],
    mask: Bool[np.ndarray, 'P G C'],
    *,
    efficient_share: Share = 0.2,  # of groups, the best ones, in which long answers earn less
    efficient_alpha: Share = 0.2,  # largest part of its reward of 1 that a right answer in a best group loses
    std_ddof: Ddof = 1,
    std_eps: Eps = 1e-6,
) -> Float[np.ndarray, 'P G']:
    """group_norm, where long answers earn less in the best groups: GRPO-lambda (arXiv 2505.18086, section 3).

    The best groups are the efficient_share with the highest pass rates. In these, a wrong completion earns 0, and a
    correct one of n tokens 1 - efficient_alpha sigmoid((n - mean) / std), with mean and std of the correct lengths in
    its group; a completion that the verifier cannot judge is left out. The number of best groups is rounded: with 2
    prompts and a share of 0.2 there is none.
    """
    judged, right, lengths = np.isfinite(correct), correct >= 1, mask.sum(-1)
    pass_rate = np.where(judged.any(1), group_math.group_means(np.where(judged, right, np.nan))[:, 0], -1)
    best = np.argsort(-pass_rate, kind='stable')[: round(efficient_share * len(rewards))]
    shaped = rewards.copy()
    for group in best:
        earned = group_math.efficient_rewards(right[group], lengths[group], efficient_alpha)
        shaped[group] = np.where(judged[group], earned, np.nan)
    return np.nan_to_num(group_norm(shaped, std_ddof=std_ddof, std_eps=std_eps))


def gtpo(
    rewards: Float[np.ndarray, 'P G'],
    tokens: Int[np.ndarray, 'P G C'],
    mask: Bool[np.ndarray, 'P G C'],
    completion_mask: Bool[np.ndarray, 'P G C'],
    old_entropy: Float[np.ndarray, 'P G C'],
    initial_entropy: float | np.floating,
    *,
    std_ddof: Ddof = 1,
    std_eps: Eps = 1e-6,
    entropy_penalty: Coefficient = 0.1,  # what a nat of mean entropy takes off a completion's advantage
    entropy_cut: NotNegative = 0.6931,  # nats (ln 2): a completion above it teaches nothing if the run began below it
) -> Float[np.ndarray, 'P G C']:
    """(A - entropy_penalty * H) * delta * lambda by token: GTPO (arXiv 2508.03772), the printed objective.

    A is group_norm; H the completion's mean entropy; lambda group_math.conflict_weights. delta is 0 if H is above
    entropy_cut (ln 2) and the run began at or below it, else 1. In a group of equal rewards A is 0, and the rest still
    acts if collection.gate is none. The authors' code differs: its cut is 0.7 wherever the run began, and it multiplies
    the weights from front and end.
    """
    values = group_norm(rewards, std_ddof=std_ddof, std_eps=std_eps)
    entropy = group_math.completion_means(old_entropy, mask)
    delta = (entropy <= entropy_cut) | (initial_entropy > entropy_cut)
    shaped = (values - entropy_penalty * entropy) * delta
    by_group = zip(tokens, completion_mask, values, ~mask, strict=True)
    weights = np.stack([group_math.conflict_weights(*group) for group in by_group])
    return shaped[..., None] * weights
