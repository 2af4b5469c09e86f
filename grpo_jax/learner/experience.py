"""From rewards to what the learner eats."""

import jax.numpy as jnp
import numpy as np

from grpo_jax import algorithms
from grpo_jax.hosts import processes
from grpo_jax.types import Experience


def make_experience(algorithm, aux, rollout, rewards, scores, put, *, dead, **known):
    """(Experience, statistics dict of floats) of a rollout and its rewards f64[P, G] (NaN: unscorable).

    aux is the TrainState's; scores holds what the learner's score found; known, what else an advantage may read
    (step_rewards, parts, part_weights; see algorithms.advantages). With dead_groups other than 'keep' and
    'reweight', tokens of groups that are dead (bool[P], by rewards before shaping) leave the completion mask, and
    so every denominator. put lays host arrays of rows out on the mesh.
    """
    prompts, group = rewards.shape
    kl_coef = float(aux['coefficients']['kl_coef'])

    def by_row(array):
        return lambda: processes.fetch(array).reshape(prompts, group, -1)

    def kl():
        difference = scores['old_logprobs'] - scores['ref_logprobs']
        return by_row(jnp.where(rollout.loss_mask, difference, 0.0))().astype(float)

    def initial_entropy():
        first = float(aux['initial_entropy'])
        if not np.isnan(first):
            return first
        entropy, mask = processes.fetch((scores['old_entropy'], rollout.loss_mask))
        return np.mean(entropy[mask])

    data = {name: by_row(array) for name, array in scores.items()}
    data |= dict(
        mask=by_row(rollout.loss_mask),
        tokens=by_row(rollout.tokens[:, rollout.prompt_mask.shape[1] :]),
        kl=kl,
        sampler_logprobs=by_row(rollout.logprobs),
        initial_entropy=initial_entropy,
        **known,
    )
    advantages = algorithms.compute_advantages(algorithm, rewards, kl_coef=kl_coef, **data)
    if 'values' in scores:
        targets = algorithms.critic_targets(algorithm, rewards, kl_coef=kl_coef, **data)
        scores = scores | {'returns': put(targets)}

    if algorithm.dead_groups in ('drop', 'resample', 'replay'):
        alive = put(np.repeat(~dead, group))
        rollout = rollout.replace(completion_mask=jnp.where(alive[:, None], rollout.completion_mask, False))
    experience = Experience(
        rollout=rollout,
        advantages=put(advantages),
        rewards=put(rewards.reshape(-1).astype(np.float32)),
        group_ids=put(np.repeat(np.arange(prompts, dtype=np.int32), group)),
        **dict(old_logprobs=None, ref_logprobs=None) | scores,
    )
    return experience, _statistics(rewards, advantages, dead)


def _statistics(rewards, advantages, dead):
    highest = np.where(np.isfinite(rewards), rewards, -np.inf).max(1)
    return {
        'reward': np.nanmean(rewards),
        'reward_std': np.nanstd(rewards),
        'dead_groups': np.mean(dead),
        'dead_groups_best': np.mean(dead & (highest == highest.max())),
        'advantage_abs': np.mean(np.abs(advantages)),
        'advantage_abs_max': np.max(np.abs(advantages)),
        'unscorable': np.mean(~np.isfinite(rewards)),
    }
