"""Sums and means over a row's tokens, quantiles, and the exp of log ratios, for pieces on the device."""

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0


def exp(log_ratio, most=MAX_LOG_RATIO):
    """exp of the log ratio clamped to +-most; a clamped element has no gradient."""
    return jnp.exp(jnp.clip(log_ratio, -most, most))


def total(x, mask):
    """f32[B, 1]: the sum over a row's tokens."""
    return jnp.sum(jnp.where(mask, x, 0.0), -1, keepdims=True)


def mean(x, mask):
    """f32[B, 1]: the mean over a row's tokens, 0 for a row without any."""
    return total(x, mask) / jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)


def quantile(x, mask, share):
    """f32[]: the share-quantile of x where mask is true, between neighbours as numpy does it; 0 without any.

    Negative x count as 0. The bits of floats that are not negative have their order, so that each is found by 31
    halvings: a sort of all tokens takes XLA half a minute to compile for TPUs.
    """
    bits = jax.lax.bitcast_convert_type(jnp.maximum(x, 0.0), jnp.int32)
    count = jnp.sum(mask)
    place = share * jnp.maximum(count - 1, 0)

    def ranked(rank):
        def halve(i, found):
            tried = found | (1 << (30 - i))
            return jnp.where(jnp.sum(mask & (bits < tried)) <= rank, tried, found)

        return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 31, halve, jnp.int32(0)), jnp.float32)

    low, high = ranked(jnp.floor(place)), ranked(jnp.ceil(place))
    return jnp.where(count > 0, low + (high - low) * (place - jnp.floor(place)), 0.0)
