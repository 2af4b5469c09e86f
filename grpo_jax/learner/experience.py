"""From rewards to what the learner eats."""
import jax.numpy as jnp
import numpy as np

from grpo_jax import algorithms
from grpo_jax.types import Experience


def make_experience(algorithm, rollout, rewards, old_logprobs, ref_logprobs, put):
    """(Experience, statistics dict of floats) of a rollout and its rewards f64[P, G] (NaN: unscorable).

    With dead_groups 'drop', tokens of groups without differing rewards leave the completion mask, and
    so every denominator. put lays host arrays of rows out on the mesh.
    """
    prompts, group = rewards.shape
    advantages, dead = algorithms.compute_advantages(algorithm, rewards), algorithms.dead_groups(rewards)
    group_ids = np.repeat(np.arange(prompts, dtype=np.int32), group)
    if algorithm.dead_groups == 'drop':
        alive = put(np.repeat(~dead, group))
        rollout = rollout.replace(completion_mask=jnp.where(alive[:, None], rollout.completion_mask, False))
    experience = Experience(
        rollout=rollout, advantages=put(advantages), rewards=put(rewards.reshape(-1).astype(np.float32)),
        old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, group_ids=put(group_ids))
    return experience, _statistics(rewards, advantages, dead)


def _statistics(rewards, advantages, dead):
    highest = np.where(np.isfinite(rewards), rewards, -np.inf).max(1)
    return {
        'reward': np.nanmean(rewards), 'reward_std': np.nanstd(rewards),
        'dead_groups': np.mean(dead),
        'dead_groups_best': np.mean(dead & (highest == highest.max())),
        'advantage_abs': np.mean(np.abs(advantages)),
        'unscorable': np.mean(~np.isfinite(rewards)),
    }

