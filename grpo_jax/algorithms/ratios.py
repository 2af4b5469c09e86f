"""Policy ratios f32[B, C] from log ratios f32[B, C] that are 0 on masked tokens.

Log ratios are clamped to +-20 before exp (float32 overflows at 88.7); a clamped element has no gradient.
"""
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0


def token(log_ratio, mask):
    """exp(log ratio) of each token: PPO, GRPO."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_product(log_ratio, mask):
    """exp of the row's summed log ratio, on each of its tokens: RLOO (arXiv 2402.14740).

    With sequence_mean weights the row counts once, however long it is.
    """
    total = jnp.sum(log_ratio, -1, keepdims=True)
    ratio = jnp.exp(jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return jnp.broadcast_to(ratio, mask.shape)
