"""From rewards to the experience that the learner updates on.

Some advantages compare a reward with earlier steps, not with its group. TrainState.aux['history'] holds the moving
averages that such advantages read. Each step adds its mean reward to the average of the whole run, and each group's
mean reward to the average of the group's prompt. A step reads the averages before it adds to them, so a baseline never
depends on the rewards from which it is subtracted.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from grpo_jax.algorithms import Algorithm, Grouping, compute_advantages
from grpo_jax.hosts import processes
from grpo_jax.learner.critic import critic_targets
from grpo_jax.sharding.batches import put_rows
from grpo_jax.types import Experience, Rollout, TrainState

HISTORY = 'history'  # in TrainState.aux


def make_experience(
    algorithm: Algorithm,
    state: TrainState,
    rollout: Rollout,
    logprobs: Mapping[str, jax.Array],
    rewards: Float[np.ndarray, 'P G'],
    inputs: Mapping[str, Any],
    mesh: jax.sharding.Mesh,
    grouping: Grouping | None = None,
) -> tuple[Experience, dict[str, Any]]:
    """Makes a rollout's Experience, with rewards, advantages and logprobs; returns (Experience, metrics by name).

    rewards: NaN marks an unscorable completion. logprobs: what Learner.logprobs returned. inputs: dead bool[P], and
    other arrays that an advantage may read (correct, step_rewards, parts, ...; see algorithms.advantages). grouping:
    which rows form a group; None: each G adjacent rows. Where groups differ in size, G is the largest, and rewards and
    inputs are NaN in the places of missing completions.

    If the algorithm drops dead groups, their tokens leave the completion mask, and so every denominator.
    """
    grouping, dead = grouping or Grouping.by_sizes(np.full(*rewards.shape)), inputs['dead']
    host = {**_rollout_inputs(state.aux, rollout, logprobs, grouping), **inputs}
    kl_coef = float(state.aux['coefficients']['kl_coef'])
    advantages = compute_advantages(algorithm, rewards, kl_coef=kl_coef, **host)
    magnitudes_P = np.abs(advantages).reshape(len(rewards), -1).sum(1)
    advantages = grouping.gather(advantages.reshape(*rewards.shape, -1))
    fields = {'old_logprobs': None, 'ref_logprobs': None, **logprobs}
    if 'values' in logprobs:
        returns = critic_targets(algorithm, rewards, kl_coef=kl_coef, **host)
        fields['returns'] = put_rows(grouping.gather(returns.reshape(*rewards.shape, -1)), mesh)
    if 'correct' in inputs:
        fields['correct'] = put_rows(grouping.gather(inputs['correct']).astype(np.float32), mesh)
    if algorithm.drops_dead_groups:
        alive = put_rows(~dead[grouping.owner], mesh)
        rollout = rollout.replace(completion_mask=jnp.where(alive[:, None], rollout.completion_mask, False))
    experience = Experience(
        rollout=rollout,
        advantages=put_rows(advantages, mesh),
        rewards=put_rows(grouping.gather(rewards).astype(np.float32), mesh),
        group_ids=put_rows(grouping.owner.astype(np.int32), mesh),
        **fields,
    )
    row = _statistics(grouping.gather(rewards), advantages, dead)
    return experience, row | _outcome_shares(inputs.get('correct'), magnitudes_P)


def drop_truncated(experience: Experience) -> Experience:
    """The Experience without the tokens of truncated completions: the overlong filter (arXiv 2503.14476, section 3)."""
    rollout = experience.rollout
    mask = jnp.where(rollout.truncated[:, None], False, rollout.completion_mask)
    return experience.replace(rollout=rollout.replace(completion_mask=mask))


def _rollout_inputs(aux, rollout, logprobs, grouping):
    """The arrays [P, G, ...] by name that an advantage may read, from the rollout and its logprobs.

    Most are functions, which `pieces.Inputs` calls, so that only arrays that are read are fetched from the devices.
    """

    def by_group(array):  # its rows as [P, G, ...], fetched when called
        return lambda: grouping.spread(processes.fetch(array))

    def kl():  # f64[P, G, C]
        difference = logprobs['old_logprobs'] - logprobs['ref_logprobs']
        return by_group(jnp.where(rollout.loss_mask, difference, 0.0))().astype(float)

    def initial_entropy():
        first = float(aux['initial_entropy'])
        if not np.isnan(first):
            return first
        entropy, mask = processes.fetch((logprobs['old_entropy'], rollout.loss_mask))
        return np.mean(entropy[mask]) if mask.any() else first

    return {name: by_group(array) for name, array in logprobs.items() if array.ndim == 2} | {
        'sizes': grouping.sizes,
        'mask': by_group(rollout.loss_mask),
        'completion_mask': by_group(rollout.completion_mask),
        'tokens': by_group(rollout.tokens[:, rollout.prompt_mask.shape[1] :]),
        'kl': kl,
        'sampler_logprobs': by_group(rollout.logprobs),
        'initial_entropy': initial_entropy,
    }


def _statistics(rewards, advantages, dead):
    """A step's metrics by name, computed from rewards f64[B], advantages f32[B, 1 or C] and dead bool[P]."""
    any_known = np.isfinite(rewards).any()
    return {
        'reward': np.nanmean(rewards) if any_known else np.nan,
        'reward_std': np.nanstd(rewards) if any_known else np.nan,
        'dead_groups': np.mean(dead),
        'advantage_abs': np.mean(np.abs(advantages)),
        'advantage_abs_max': np.max(np.abs(advantages)),
        'unscorable': np.mean(~np.isfinite(rewards)),
    }


def _outcome_shares(correct, magnitudes_P):
    """Metrics by name: the shares of groups whose completions are all right, all wrong, or mixed.

    correct: f64[P, G] or None. Completions that the verifier cannot judge (NaN) are passed over; a group of these alone
    is none of the three. {} if no completion is judged. magnitudes_P: each group's sum of abs(A). advantage_all_wrong
    is the share of the total of magnitudes_P in groups that are all wrong; NaN if the total is 0.
    """
    if correct is None or not np.isfinite(correct).any():
        return {}
    judged = np.isfinite(correct).any(1)
    some_right, some_wrong = (correct == 1).any(1), (correct == 0).any(1)
    total = magnitudes_P.sum()
    return {
        'advantage_all_wrong': magnitudes_P[judged & ~some_right].sum() / total if total else np.nan,
        'groups_all_right': np.mean(judged & ~some_wrong),
        'groups_all_wrong': np.mean(judged & ~some_right),
        'groups_mixed': np.mean(some_right & some_wrong),
    }


def abstract_history(algorithm: Algorithm, count: int) -> dict[str, Any]:
    """{'history': ShapeDtypeStructs of the moving averages for `count` examples}; {} if the algorithm reads none."""
    shapes = {name: (count,) if name == 'prompt_baselines' else () for name in algorithm.baselines}
    numbers = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return {HISTORY: {name: {'mean': x, 'weight': x} for name, x in numbers.items()}} if numbers else {}


def read_history(
    algorithm: Algorithm, state: TrainState, places: Int[np.ndarray, ' P'], rewards: Float[np.ndarray, 'P G']
) -> tuple[TrainState, dict[str, Any]]:
    """Reads the moving averages of rewards, then adds the step's rewards; returns (new TrainState, averages read).

    places: the number of each prompt's example. The averages, by name, are run_baseline, a float, 0 before any reward
    is known; and prompt_baselines f64[P, G], in which a new prompt has run_baseline. An algorithm that reads neither
    gets (the unchanged state, {}).
    """
    if not algorithm.baselines:
        return state, {}
    averages = jax.tree.map(lambda x: np.array(x, np.float64), state.aux[HISTORY])
    run, means_P, decay = averages['run_baseline'], visit_means(rewards), algorithm.baseline_decay
    baselines: dict[str, Any] = {'run_baseline': float(run['mean'])}
    if 'prompt_baselines' in averages:
        prompts = averages['prompt_baselines']
        seen_P = prompts['weight'][places] > 0
        prompt_P = np.where(seen_P, prompts['mean'][places], baselines['run_baseline'])
        baselines['prompt_baselines'] = np.repeat(prompt_P[:, None], rewards.shape[1], 1)
        for place, mean in zip(places, means_P, strict=True):
            add_to_average(prompts, place, mean, decay)
    add_to_average(run, (), visit_means(rewards.reshape(1, -1))[0], decay)
    stored = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), averages)
    return state.replace(aux=state.aux | {HISTORY: stored}), baselines


def visit_means(rewards: Float[np.ndarray, 'P G']) -> Float[np.ndarray, ' P']:
    """The mean of each group's finite rewards; NaN for a group without one."""
    known = np.isfinite(rewards)
    sums, counts = np.where(known, rewards, 0.0).sum(1), known.sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def add_to_average(averages: dict[str, np.ndarray], place: Any, value: float, decay: float) -> None:
    """Adds a value to the weighted mean averages['mean'][place], in place.

    The value has weight 1, and the weights of all earlier values are multiplied by `decay`; averages['weight'] is their
    sum. So the first value is the mean itself, and with decay 1 all values count alike. NaN changes nothing.
    """
    if np.isfinite(value):
        averages['weight'][place] = decay * averages['weight'][place] + 1
        averages['mean'][place] += (value - averages['mean'][place]) / averages['weight'][place]
