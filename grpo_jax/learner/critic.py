"""The critic of PPO: the policy's own decoder with a scalar head, trained on returns by the same descent."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32
import numpy as np

from grpo_jax.algorithms import Algorithm, advantage_inputs, groups, pieces, weights
from grpo_jax.learner import descent
from grpo_jax.learner.options import Learning, Minibatching
from grpo_jax.models import heads
from grpo_jax.models.collectives import ALONE, Collectives
from grpo_jax.models.transformer import ModelConfig
from grpo_jax.types import Array, Experience, Rollout


def new(params):
    """Critic parameters from a policy's: its decoder, and a head that says 0."""
    body = {name: leaf for name, leaf in params.items() if name != 'lm_head'}
    return jax.tree.map(jnp.copy, body) | {'value_head': jnp.zeros_like(params['final_norm'])}


def values(
    critic, rollout: Rollout, model_config: ModelConfig, *, remat: str, dtype, collectives: Collectives = ALONE
) -> Float[Array, 'B C']:
    """f32[B, C]: the critic's value of a completion before each of its tokens; not meaningful where masked."""
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    columns = heads.values(
        critic, rollout.tokens, mask, model_config, remat=remat, dtype=dtype, collectives=collectives
    )
    return columns[:, rollout.prompt_mask.shape[1] - 1 : -1]


def update_critic(
    critic,
    experience: Experience,
    model_config: ModelConfig,
    optimizer,
    learning: Learning,
    cut: Minibatching,
    collectives=ALONE,
):
    """({'params', 'opt_state'}, skipped i32[], metrics) after a descent on half the clipped squared error.

    max((V - R)^2, (clip(V, old - value_clip, old + value_clip) - R)^2) / 2, mean over tokens; value_clip 0: no clip.
    explained_variance is that of the returns by the values before the update.
    """

    def loss_of(params, part):
        microbatch, token_weights = part
        new_values = values(
            params,
            microbatch.rollout,
            model_config,
            remat=learning.remat,
            dtype=learning.dtype,
            collectives=collectives,
        )
        returns, mask = _targets(microbatch)
        error = value_loss(new_values, microbatch.values, returns, learning.value_clip)
        return jnp.sum(token_weights * jnp.where(mask, error, 0.0)), ()

    def gradient(params, minibatch, _):
        whole = minibatch, weights.token_mean(_targets(minibatch)[1])
        loss, grads, _ = descent.accumulate(loss_of, params, descent.cut_rows(whole, learning.microbatches, 1))
        return loss, grads, {}

    params, opt_state, skipped, metrics = descent.descend(
        critic['params'], critic['opt_state'], experience, None, gradient, optimizer, cut
    )
    assert experience.values is not None, 'a critic learns from values and returns'
    metrics['explained_variance'] = explained_variance(experience.values, *_targets(experience))
    return {'params': params, 'opt_state': opt_state}, skipped, metrics


def critic_targets(
    algorithm: Algorithm, rewards: Float[np.ndarray, 'P G'], *, kl_coef: float, **data: Any
) -> Float32[np.ndarray, 'B C']:
    """f32[P * G, C]: generalized advantages by the algorithm's critic_lambda, plus the values: what a critic learns.

    NaN for unscorable completions, which teach it nothing.
    """
    inputs = pieces.Inputs(data)
    values = inputs['values']
    earned = advantage_inputs.token_rewards(algorithm, rewards, kl_coef, inputs)
    advantages = groups.generalized_advantages(
        earned, inputs['mask'], values, algorithm.discount, algorithm.critic_lambda
    )
    targets = np.where(np.isfinite(rewards)[..., None], advantages + values, np.nan)
    return targets.reshape(-1, targets.shape[-1]).astype(np.float32)


def _targets(experience):
    """(returns, the tokens that have one); those of unscorable completions are NaN, here 0 for the gradient's sake."""
    known = experience.rollout.loss_mask & jnp.isfinite(experience.returns)
    return jnp.where(known, experience.returns, 0.0), known


def value_loss(
    new_values: Float[Array, '*N'], old_values: Float[Array, '*N'], returns: Float[Array, '*N'], value_clip: float
) -> Float[Array, '*N']:
    """Half the squared error, or that of the clipped value where it is larger, elementwise (arXiv 2005.12729)."""
    error = jnp.square(new_values - returns)
    if value_clip:
        clipped = jnp.clip(new_values, old_values - value_clip, old_values + value_clip)
        error = jnp.maximum(error, jnp.square(clipped - returns))
    return 0.5 * error


def explained_variance(
    predicted: Float[Array, '*N'], returns: Float[Array, '*N'], mask: Bool[Array, '*N']
) -> Float[Array, '']:
    """f32[]: 1 - var(returns - values) / var(returns) over the mask; 0 where the returns do not vary."""

    def variance(x):
        count = jnp.maximum(jnp.sum(mask), 1)
        mean = jnp.sum(jnp.where(mask, x, 0.0)) / count
        return jnp.sum(jnp.where(mask, jnp.square(x - mean), 0.0)) / count

    spread = variance(returns)
    return jnp.where(spread > 1e-12, 1 - variance(returns - predicted) / jnp.maximum(spread, 1e-12), 0.0)
