"""Advantages in plain numpy, in float64, from the papers' formulas; nothing of grpo_jax takes part.

They are [P, G], or [P, G, C] by token. A completion without a reward counts in no statistic; one that the verifier
cannot judge counts in none of what is right.
"""

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """What a step knows: [P, G] of completions, [B, C] of their tokens; NaN where something is unknown."""

    rewards: np.ndarray
    correct: np.ndarray
    completion: np.ndarray  # tokens of the completion
    forced: np.ndarray  # of these, tokens that were not sampled
    tokens: np.ndarray
    new: np.ndarray  # logprobs of the policy now
    old: np.ndarray  # as the step began
    ref: np.ndarray
    sampler: np.ndarray
    teacher: np.ndarray
    entropy: np.ndarray  # of the policy as the step began
    values: np.ndarray
    new_values: np.ndarray
    steps: np.ndarray  # rewards of steps, at their last tokens
    run_baseline: float
    prompt_baselines: np.ndarray
    initial_entropy: float  # NaN in the first step

    @property
    def mask(self):
        """Tokens that have a loss."""
        return self.completion & ~self.forced

    @property
    def known(self):
        """[P, G], completions with a reward."""
        return np.isfinite(self.rewards)

    @property
    def judged(self):
        """[P, G], completions with a reward that the verifier could judge."""
        return self.known & np.isfinite(self.correct)

    @property
    def right(self):
        """[P, G], completions that the verifier takes."""
        return self.correct == 1

    @property
    def lengths(self):
        """[P, G], tokens that have a loss."""
        return self.mask.sum(-1).reshape(self.rewards.shape)

    @property
    def whole(self):
        """[B, C], tokens with a loss in completions with a reward."""
        return self.mask & self.known.reshape(-1, 1)

    def by_group(self, x):
        """Returns [B, ...] as [P, G, ...]."""
        return x.reshape(*self.rewards.shape, *x.shape[1:])


def mean(x, among, axis=None):
    """The mean over those among, with the axis kept; 0 without any."""
    count = among.sum(axis, keepdims=True)
    return np.where(among, x, 0).sum(axis, keepdims=True) / np.maximum(count, 1)


def std(x, among, axis=None):
    """The standard deviation with count - 1, with the axis kept; 0 of fewer than two."""
    count = among.sum(axis, keepdims=True)
    squares = np.where(among, (x - mean(x, among, axis)) ** 2, 0).sum(axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def whiten(x, among, eps):
    """Less the mean, over the standard deviation, both of those among."""
    return np.where(among, (x - mean(x, among)) / np.sqrt(std(x, among) ** 2 + eps), 0)


def equal(x, among):
    """bool[P]: whether all values of a group are equal; a group with one value, or none, counts as equal."""
    high, low = (np.where(among, x, fill).max(-1) for x, fill in ((x, -np.inf), (-x, -np.inf)))
    return (among.sum(-1) <= 1) | (high == -low)


def dead_groups(batch, gate):
    """[P], groups that teach nothing; an outcome is the verifier's, where it has judged any of the group."""
    if gate == 'none':
        return np.zeros(len(batch.rewards), bool)
    dead = equal(batch.rewards, batch.known)
    if gate == 'outcome':
        dead |= batch.judged.any(-1) & equal(batch.correct, batch.judged)
    return dead


def centred(batch, rewards=None, among=None):
    among = batch.known if among is None else among
    rewards = batch.rewards if rewards is None else rewards
    return np.where(among, rewards - mean(rewards, among, -1), 0)


def group_mean(batch):
    return centred(batch)


def normalized(batch, rewards, among):
    """group_norm of other rewards."""
    rewards = np.where(equal(rewards, among)[:, None], 0, rewards)  # exactly, and not by eps
    return centred(batch, rewards, among) / (std(rewards, among, -1) + 1e-6)


def group_norm(batch):
    return normalized(batch, batch.rewards, batch.known)


def leave_one_out_norm(batch):
    return leave_one_out(batch) / (std(batch.rewards, batch.known, -1) + 1e-6)


def leave_one_out(batch):
    count = batch.known.sum(-1, keepdims=True)
    return centred(batch) * count / np.maximum(count - 1, 1)


def hybrid(batch):
    return centred(batch) / (std(batch.rewards, batch.known) + 1e-6)


def batch_centred_std(batch):
    return centred(batch) / (std(centred(batch), batch.known) + 1e-6)


def group_mean_batch_std(batch):
    by_token = np.where(batch.whole, centred(batch).reshape(-1, 1), 0)
    spread = std(by_token, batch.whole)
    return (centred(batch) - mean(by_token, batch.whole)) / np.where(spread > 0, spread, 1) * batch.known


def maxrl(batch):
    rate = mean(batch.correct, batch.judged, -1)
    return np.where(rate > 0, centred(batch, batch.correct, batch.judged) / (rate + 1e-6), 0)


def opo(batch):
    weights = batch.lengths * batch.known
    total = weights.sum(-1, keepdims=True)
    baseline = np.where(batch.known, weights * batch.rewards, 0).sum(-1, keepdims=True) / np.maximum(total, 1)
    return np.where(batch.known, batch.rewards - baseline, 0)


def choose(n, k):
    """Binomial coefficients of arrays; 0 for n below k."""
    factors = np.stack([np.maximum(n - j, 0) / (j + 1) for j in range(k)] or [np.ones_like(n, float)])
    return factors.prod(0)


def pkpo(batch, k=2):
    n = batch.judged.sum(-1, keepdims=True).astype(float)
    c = (batch.judged & batch.right).sum(-1, keepdims=True).astype(float)
    enough = n >= k  # no k of fewer
    others = np.where(enough, choose(n - 1, k - 1), 1)
    chance = 1 - choose(n - 1 - c, k - 1) / others  # that k - 1 of the others hold a right one
    rewards = k / np.maximum(n, 1) * np.where(batch.right, 1, chance)
    return centred(batch, rewards, batch.judged) * enough


def correct(batch):
    return np.where(batch.known & batch.right, 1.0, 0)


def ones(batch):
    return np.ones_like(batch.rewards)


def zeros(batch):
    return np.zeros_like(batch.rewards)


def reward(batch):
    return np.where(batch.known, batch.rewards, 0)


def moving_mean(batch):
    return np.where(batch.known, batch.rewards - batch.run_baseline, 0)


def prompt_moving_mean(batch):
    return np.where(batch.known, batch.rewards - batch.prompt_baselines, 0)


def best_and_worst(batch):
    """1 and -1, of equals the first."""
    found = np.zeros_like(batch.rewards)
    for row, rewards, among in zip(found, batch.rewards, batch.known, strict=True):
        if among.any():
            row[np.argmax(np.where(among, rewards, -np.inf))] = 1
            row[np.argmin(np.where(among, rewards, np.inf))] = -1
    return found


def xrpo_sharpen(batch, most=1.0, cap=0.5):
    plain = group_norm(batch)
    counted = batch.known & (batch.lengths > 0)
    score = mean(batch.by_group(batch.sampler), batch.by_group(batch.mask), -1)[..., 0]
    novelty = np.exp(score - mean(score, counted, -1))
    bonus = np.minimum(np.maximum(most * (1 - novelty), 0), np.maximum(cap * plain, 0))
    return plain + np.where(batch.known & batch.right, bonus, 0)


def grpo_lambda(batch, share=0.2, alpha=0.2):
    """In the groups of the batch that answer best, long right answers earn less."""
    rate = np.where(batch.judged.any(-1), mean(batch.correct, batch.judged, -1)[:, 0], -1)
    best = np.argsort(-rate, kind='stable')[: round(share * len(rate))]
    rewards, among = batch.rewards.copy(), batch.known.copy()
    for p in best:
        lengths, chosen = batch.lengths[p], batch.right[p] & batch.known[p]
        middle, spread = (lengths[chosen].mean(), lengths[chosen].std()) if chosen.any() else (0, 0)
        longer = (lengths - middle) / spread if spread > 0 else np.zeros(len(lengths))
        rewards[p], among[p] = np.where(chosen, 1 - alpha / (1 + np.exp(-longer)), 0), batch.judged[p]
    return normalized(batch, rewards, among)


def by_token_rewards(batch, kl_coef):
    """[B, C], minus the KL of each token, and the reward at the last."""
    found = np.where(batch.whole, -kl_coef * (batch.old - batch.ref), 0)
    for b in np.flatnonzero(batch.whole.any(-1)):
        found[b, np.flatnonzero(batch.mask[b])[-1]] += batch.rewards.reshape(-1)[b]
    return found


def generalized(batch, kl_coef, lambdas):
    """[B, C], generalized advantages with a discount of 1; what was not sampled is stepped over."""
    rewards, found = by_token_rewards(batch, kl_coef), np.zeros(batch.mask.shape)
    for b in range(len(found)):
        following, later = 0.0, 0.0
        for t in np.flatnonzero(batch.whole[b])[::-1]:
            later = rewards[b, t] + following - batch.values[b, t] + lambdas[b] * later
            following, found[b, t] = batch.values[b, t], later
    return found


def lambdas_by_length(batch):
    return np.maximum(1 - 1 / (0.05 * np.maximum(batch.mask.sum(-1), 1)), 0)


def gae(batch, kl_coef=0.05):
    found = generalized(batch, kl_coef, np.full(len(batch.mask), 0.95))
    return batch.by_group(whiten(found, batch.whole, 1e-8))


def gae_by_length(batch):
    return batch.by_group(whiten(generalized(batch, 0.0, lambdas_by_length(batch)), batch.whole, 1e-8))


def reinforce_pp(batch, kl_coef=0.01):
    later = np.cumsum(by_token_rewards(batch, kl_coef)[:, ::-1], -1)[:, ::-1]
    return batch.by_group(whiten(later, batch.whole, 1e-8))


def process(batch):
    """The normalized rewards of the steps that end at a token or later."""
    found = np.zeros(batch.by_group(batch.mask).shape)
    ends = batch.by_group(batch.completion & batch.known.reshape(-1, 1) & np.isfinite(batch.steps))
    for p, among in enumerate(ends):
        values = batch.by_group(batch.steps)[p]
        spread = std(values, among) if among.any() and np.ptp(values[among]) > 0 else 0.0
        steps = np.where(among & (spread > 0), (values - mean(values, among)) / (spread + 1e-6), 0)
        found[p] = np.cumsum(steps[:, ::-1], -1)[:, ::-1]
    return found


def gtpo(batch):
    plain, mask = group_norm(batch), batch.by_group(batch.mask)
    entropy = mean(batch.by_group(batch.entropy), mask, -1)[..., 0]
    initial = batch.initial_entropy
    if np.isnan(initial):
        initial = mean(batch.entropy, batch.mask).item()
    kept = np.full(entropy.shape, True) if initial > 0.6931 else entropy <= 0.6931
    return ((plain - 0.1 * entropy) * kept * batch.known)[..., None] * conflict_weights(batch, plain)


def conflict_weights(batch, signs):
    """[P, G, C], 2 for tokens of good completions that bad ones have at the same place, 0 in bad ones, else 1."""
    tokens, forced = batch.by_group(batch.tokens), batch.by_group(batch.forced)
    lengths = batch.by_group(batch.completion).sum(-1)
    found = np.ones(tokens.shape)
    for p, g in np.ndindex(*signs.shape):
        n, others = lengths[p, g], np.flatnonzero(signs[p] * signs[p, g] < 0)
        for backward in (False, True):
            for k in range(n):
                place = n - 1 - k if backward else k
                there = [(o, lengths[p, o] - 1 - k if backward else k) for o in others if k < lengths[p, o]]
                unsampled = [forced[p, g, place] or forced[p, o, q] for o, q in there]
                same = [tokens[p, o, q] == tokens[p, g, place] for o, q in there]
                if any(s and not f for s, f in zip(same, unsampled, strict=True)):
                    found[p, g, place] = 2 if signs[p, g] > 0 else 0
                elif not any(unsampled):
                    break
    return found
