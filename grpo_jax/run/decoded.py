"""A rollout's logprobs by the programs that sampled it, token by token: learner.old_logprobs='decode'."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from grpo_jax.algorithms import Algorithm
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.learner.state import fetch_reference
from grpo_jax.run.collect import READ_FROM_DATA
from grpo_jax.sampler.engine import Engine
from grpo_jax.sharding import batches
from grpo_jax.types import Prompts, Rollout, TrainState


def check(experiment: Any, algorithm: Algorithm) -> None:
    """BadInput where the rows of a step are not those of one rollout by the policy, in the dtype of the learner."""
    if not experiment.settings.learning.decoded:
        return
    sampling, section = experiment.sampling, experiment.config.collection
    hindered = {
        f'collection.source = {algorithm.source}': algorithm.source in ('reference', *READ_FROM_DATA),
        f'collection.dead_groups = {section.dead_groups}': section.dead_groups in ('resample', 'replay'),
        f'collection.allocation = {section.allocation}': section.allocation != 'equal',
        'rollout.weights_dtype = int8': sampling.weights_dtype == 'int8',
        'rollout.cache_dtype = int8': sampling.cache_dtype == 'int8',
    }
    for setting, hinders in hindered.items():
        if hinders:
            raise BadInput(
                'learner.old_logprobs',
                'decode',
                f'is for rollouts that the policy samples at once; {setting} is not so',
            )


def policy_logprobs(
    experiment: Any, algorithm: Algorithm, sample: Engine | None, state: TrainState, rollout: Rollout
) -> dict[str, jax.Array]:
    """old_logprobs of a step's rollout by name, and ref_logprobs where there is a reference; {} unless asked for.

    The engine decodes the rollout's tokens again in the same shapes; with the weights that sampled them, the numbers
    are the sampler's bit for bit. All processes must call it.
    """
    if sample is None or not experiment.settings.learning.decoded:
        return {}
    policies: Mapping[str, Any] = {'old_logprobs': state.params}
    if algorithm.needs_reference:
        policies |= {'ref_logprobs': fetch_reference(state)}
    queries, group_size = rollout.prompt_mask.shape[1], experiment.settings.group_size
    tokens, masks = processes.fetch((rollout.tokens, (rollout.prompt_mask, rollout.completion_mask)))
    ids = np.arange(len(tokens) // group_size, dtype=np.int32)
    prompts = Prompts(tokens[::group_size, :queries], masks[0][::group_size], ids)
    given = np.where(masks[1], tokens[:, queries:], -1)
    prompts, given = batches.put_rows((prompts, given), experiment.mesh)
    stats, inspection, fields = sample.stats, sample.programs.inspection, {}
    for name, params in policies.items():
        fields[name] = sample(params, prompts, experiment.key, int(state.step), given=given).logprobs
    sample.stats, sample.programs.inspection = stats, inspection  # a step's figures are those of its sampling
    return fields
