"""The critic of PPO: the policy's own decoder with a scalar head, trained on returns by the same descent."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32
import numpy as np

from grpo_jax.algorithms import Algorithm, group_math, host_advantages, pieces, weights
from grpo_jax.learner import descent
from grpo_jax.learner.options import Learning, Minibatching
from grpo_jax.models import heads
from grpo_jax.models.mesh_ops import ALONE, MeshOps
from grpo_jax.models.transformer import ModelConfig
from grpo_jax.types import Array, Experience, Rollout


def new_params(params):
    """A critic's first parameters: a copy of the policy's decoder, and a head of zeros, so that all values are 0."""
    body = {name: leaf for name, leaf in params.items() if name != 'lm_head'}
    return jax.tree.map(jnp.copy, body) | {'value_head': jnp.zeros_like(params['final_norm'])}


def values(
    critic, rollout: Rollout, model_config: ModelConfig, *, remat: str, dtype, mesh_ops: MeshOps = ALONE
) -> Float[Array, 'B C']:
    """The critic's value, f32[B, C], of the prompt and the completion up to, but without, each completion token.

    Masked columns hold meaningless numbers. remat: see transformer.forward. dtype: the dtype of the computation.
    """
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    columns = heads.values(critic, rollout.tokens, mask, model_config, remat=remat, dtype=dtype, mesh_ops=mesh_ops)
    return columns[:, rollout.prompt_mask.shape[1] - 1 : -1]


def update_critic(
    critic,
    experience: Experience,
    model_config: ModelConfig,
    optimizer,
    learning: Learning,
    minibatching: Minibatching,
    mesh_ops=ALONE,
):
    """Updates a critic, {'params', 'opt_state'}; returns (the new one, skipped i32[], metrics f32[] by name).

    The loss is the mean over tokens of `value_loss`. skipped counts updates that are not finite (see descent.descend).
    The metric explained_variance compares the returns with the values from before the update.
    """

    def loss_of(params, weighted_microbatch):
        microbatch, token_weights = weighted_microbatch
        new_values = values(
            params, microbatch.rollout, model_config, remat=learning.remat, dtype=learning.dtype, mesh_ops=mesh_ops
        )
        returns, mask = _targets(microbatch)
        error = value_loss(new_values, microbatch.values, returns, learning.value_clip)
        return jnp.sum(token_weights * jnp.where(mask, error, 0.0)), ()

    def gradient(params, minibatch, _):
        weighted = minibatch, weights.token_mean(_targets(minibatch)[1])
        loss, grads, _ = descent.accumulate(loss_of, params, descent.cut_rows(weighted, learning.microbatches, 1))
        return loss, grads, {}

    params, opt_state, skipped, metrics = descent.descend(
        critic['params'], critic['opt_state'], experience, None, gradient, optimizer, minibatching
    )
    assert experience.values is not None, 'a critic learns from values and returns'
    metrics['explained_variance'] = explained_variance(experience.values, *_targets(experience))
    return {'params': params, 'opt_state': opt_state}, skipped, metrics


def critic_targets(
    algorithm: Algorithm, rewards: Float[np.ndarray, 'P G'], *, kl_coef: float, **data: Any
) -> Float32[np.ndarray, 'B C']:
    """The returns that a critic learns, f32[P * G, C]: its values plus generalized advantages with critic_lambda.

    Rows whose reward is not finite are NaN, and teach the critic nothing. kl_coef: the weight of a KL in the reward.
    data: arrays [P, G, ...] by name that advantages read, `values` and `mask` among them (see algorithms.advantages).
    """
    inputs = pieces.Inputs(data)
    values = inputs['values']
    token_rewards = host_advantages.token_rewards(algorithm, rewards, kl_coef, inputs)
    advantages = group_math.generalized_advantages(
        token_rewards, inputs['mask'], values, algorithm.discount, algorithm.critic_lambda
    )
    targets = np.where(np.isfinite(rewards)[..., None], advantages + values, np.nan)
    return targets.reshape(-1, targets.shape[-1]).astype(np.float32)


def _targets(experience):
    """(returns f32[B, C], mask bool[B, C] of the tokens with a return).

    The returns of unscorable completions are NaN; they become 0 here, since a masked NaN would spoil the gradient.
    """
    mask = experience.loss_mask & jnp.isfinite(experience.returns)
    return jnp.where(mask, experience.returns, 0.0), mask


def value_loss(
    new_values: Float[Array, '*N'], old_values: Float[Array, '*N'], returns: Float[Array, '*N'], value_clip: float
) -> Float[Array, '*N']:
    """max((V - R)^2, (clip(V, old - value_clip, old + value_clip) - R)^2) / 2, elementwise (arXiv 2005.12729).

    V are new_values, R the returns. With value_clip 0 nothing is clipped.
    """
    error = jnp.square(new_values - returns)
    if value_clip:
        clipped = jnp.clip(new_values, old_values - value_clip, old_values + value_clip)
        error = jnp.maximum(error, jnp.square(clipped - returns))
    return 0.5 * error


def explained_variance(
    predicted: Float[Array, '*N'], returns: Float[Array, '*N'], mask: Bool[Array, '*N']
) -> Float[Array, '']:
    """f32[]: 1 - var(returns - predicted) / var(returns) over the mask; 0 where the returns do not vary."""

    def variance(x):
        count = jnp.maximum(jnp.sum(mask), 1)
        mean = jnp.sum(jnp.where(mask, x, 0.0)) / count
        return jnp.sum(jnp.where(mask, jnp.square(x - mean), 0.0)) / count

    total = variance(returns)
    return jnp.where(total > 1e-12, 1 - variance(returns - predicted) / jnp.maximum(total, 1e-12), 0.0)
