"""Which tokens of a minibatch the policy loss is for, f32[B, C]; chosen on the whole minibatch, before it is cut.

What a selection may read: mask bool[B, C], advantages f32[B, 1 or C], old_logprobs, old_entropy and log_rho
f32[B, C], all of the policy at the start of the step.
"""

import jax.numpy as jnp

from grpo_jax.algorithms import covariance as covariances
from grpo_jax.algorithms import reductions


def all_tokens(mask):
    """1."""
    return jnp.ones(mask.shape, jnp.float32)


def high_entropy(old_entropy, mask, *, entropy_share):
    """Tokens whose entropy is in the batch's highest entropy_share (arXiv 2506.01939, eq. 5).

    The loss is still divided by all tokens, as in TRL, unless denominator is 'selected'.
    """
    threshold = reductions.quantile(old_entropy, mask, 1 - entropy_share)
    return ((old_entropy >= threshold) & mask).astype(jnp.float32)


def m2po(log_rho, mask, *, second_moment):
    """Drops the tokens with the largest log_rho^2 until the mean of the rest is at most second_moment.

    M2PO (arXiv 2510.01161, algorithm 1).
    """
    square = jnp.where(mask, jnp.square(log_rho), jnp.inf).reshape(-1)
    ascending = jnp.sort(square)
    finite = jnp.where(jnp.isfinite(ascending), ascending, 0.0)
    means = jnp.cumsum(finite) / jnp.arange(1, len(finite) + 1)
    kept = jnp.sum(jnp.isfinite(ascending) & (means <= second_moment))
    limit = jnp.where(kept > 0, ascending[jnp.maximum(kept - 1, 0)], -jnp.inf)
    return (square <= limit).reshape(mask.shape).astype(jnp.float32)


def clip_cov(covariance, mask, *, covariance_low, covariance_high, covariance_share):
    """All but the covariance_share of tokens with the highest covariance between the two bounds.

    Clip-Cov (arXiv 2505.22617, eq. 11) drops as many at random among those between the bounds.
    """
    inside = mask & (covariance >= covariance_low) & (covariance <= covariance_high)
    return 1.0 - covariances.highest(covariance, inside, covariance_share * jnp.sum(mask))
