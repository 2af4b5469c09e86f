"""Sums and means over a row's tokens, and the exp of log ratios, for pieces on the device."""
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
