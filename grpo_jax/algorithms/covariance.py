"""Covariance of advantages and logprobs, by token of a minibatch."""

import jax.numpy as jnp


def by_token(advantages, old_logprobs, mask):
    """f32[B, C]: (A - mean A)(logprob - mean logprob) over the minibatch's tokens (arXiv 2505.22617, eq. 9)."""

    def centred(x):
        x = jnp.where(mask, x, 0.0)
        return jnp.where(mask, x - jnp.sum(x) / jnp.maximum(jnp.sum(mask), 1), 0.0)

    return centred(advantages) * centred(old_logprobs)


def highest(values, mask, count):
    """f32[B, C]: 1 for the `count` (rounded down) highest values where mask is true; ties go to the earlier."""
    order = jnp.argsort(-jnp.where(mask, values, -jnp.inf).reshape(-1), stable=True)
    rank = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
    return ((rank.reshape(mask.shape) < jnp.floor(count)) & mask).astype(jnp.float32)
