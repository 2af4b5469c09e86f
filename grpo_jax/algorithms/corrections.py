"""Weights f32[B, C] against the sampler's mismatch with the learner, multiplied on the policy loss, not differentiated.

log_rho f32[B, C] is the old policy's logprob less the sampler's, 0 on masked tokens. A correction may also
read mask bool[B, C], advantages f32[B, 1 or C] and drift f32[B, C], the sampler's logprobs less those now.
"product" is over a row's tokens, "geometric" its mean over them: other code calls both "sequence".
"""

import jax.numpy as jnp

from grpo_jax.algorithms import reductions


def none(mask):
    """1."""
    return jnp.ones(mask.shape, jnp.float32)


def truncated(log_rho, *, rho_max):
    """min(rho, rho_max) by token: TIS (https://fengyao.notion.site/off-policy-rl)."""
    return jnp.minimum(reductions.exp(log_rho), rho_max)


def icepop(log_rho, *, icepop_low, icepop_high):
    """rho by token, 0 outside [icepop_low, icepop_high]: IcePop (arXiv 2510.18855)."""
    return _within(reductions.exp(log_rho), reductions.exp(log_rho), icepop_low, icepop_high)


def truncated_product(log_rho, mask, *, rho_max):
    """min(product of rho, rho_max), on each of a row's tokens."""
    return jnp.broadcast_to(jnp.minimum(reductions.exp(reductions.total(log_rho, mask)), rho_max), mask.shape)


def masked_product(log_rho, mask, *, product_max):
    """Product of rho on each of a row's tokens, 0 for rows above product_max: MIS, as TRL's sequence_mask."""
    product = reductions.exp(reductions.total(log_rho, mask))
    return jnp.broadcast_to(_within(product, product, 0.0, product_max), mask.shape)


def masked_geometric(log_rho, mask, *, geometric_low, geometric_high):
    """rho by token, 0 for rows whose geometric mean is outside [geometric_low, geometric_high]."""
    mean = reductions.mean(log_rho, mask)
    return _within(reductions.exp(log_rho), reductions.exp(mean), geometric_low, geometric_high)


def veto(log_rho, mask, *, veto_below):
    """1, or 0 for rows with a token whose rho is below veto_below."""
    worst = jnp.min(jnp.where(mask, log_rho, 0.0), -1, keepdims=True)
    return jnp.broadcast_to(jnp.where(reductions.exp(worst) < veto_below, 0.0, 1.0), mask.shape)


def opsm(drift, mask, advantages, *, opsm_delta):
    """1, or 0 for rows with A < 0 whose mean drift is above opsm_delta: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).

    The paper gives no delta; 0.5 is TRL's suggestion.
    """
    mean = reductions.mean(drift, mask)
    return jnp.broadcast_to(jnp.where((advantages < 0) & (mean > opsm_delta), 0.0, 1.0), mask.shape)


def _within(weight, value, low, high):
    return jnp.where((value >= low) & (value <= high), weight, 0.0)
