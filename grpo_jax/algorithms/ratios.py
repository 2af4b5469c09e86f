"""Policy ratios f32[B, C] from log_ratio f32[B, C], the logprobs now minus the base's logprobs, 0 on masked tokens.

Log ratios are clamped to +-20 before exp, and row means to +-10; a clamped element has no gradient. A ratio may also
read mask bool[B, C] and advantages f32[B, 1 or C].
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from grpo_jax.algorithms import pieces, reductions
from grpo_jax.ranges import Positive
from grpo_jax.types import Array

MAX_MEAN_LOG_RATIO = 10.0


def token(log_ratio: Float[Array, '...']) -> Float[Array, '...']:
    """exp of each token's log ratio, clamped to +-20: PPO, GRPO."""
    return reductions.clamped_exp(log_ratio)


def sequence_product(log_ratio: Float[Array, 'B C'], mask: Bool[Array, 'B C']) -> Float[Array, 'B C']:
    """exp of the row's summed log ratio, on each token: RLOO (arXiv 2402.14740).

    With sequence_mean weights the row counts once, however long it is.
    """
    return jnp.broadcast_to(reductions.clamped_exp(jnp.sum(log_ratio, -1, keepdims=True)), mask.shape)


@pieces.properties(row_mean=True, near_one=True, suits_weights='sequence_mean')
def sequence_geometric(log_ratio: Float[Array, 'B C'], mask: Bool[Array, 'B C']) -> Float[Array, 'B C']:
    """exp of the row's mean log ratio, on each token: GSPO (arXiv 2507.18071, eq. 7)."""
    mean = reductions.row_mean(log_ratio, mask)
    return jnp.broadcast_to(reductions.clamped_exp(mean, MAX_MEAN_LOG_RATIO), mask.shape)


@pieces.properties(row_mean=True, near_one=True)
def sequence_geometric_token(log_ratio: Float[Array, 'B C'], mask: Bool[Array, 'B C']) -> Float[Array, 'B C']:
    """sequence_geometric with the gradient of each token's own logprob: GSPO-token (arXiv 2507.18071, eq. 14)."""
    mean = jax.lax.stop_gradient(reductions.row_mean(log_ratio, mask))
    zero = jnp.where(jnp.abs(mean) < MAX_MEAN_LOG_RATIO, log_ratio - jax.lax.stop_gradient(log_ratio), 0.0)
    return reductions.clamped_exp(zero + mean, MAX_MEAN_LOG_RATIO)  # zero has only a gradient


@pieces.properties(row_mean=True)
def clipped_geometric(
    log_ratio: Float[Array, 'B C'], mask: Bool[Array, 'B C'], advantages: pieces.Advantages, *, log_clip: Positive = 0.4
) -> Float[Array, 'B C']:
    """exp of the row's mean of clipped log ratios, on each token: GMPO (arXiv 2507.20673).

    A token's log ratio is clipped on the side that A pushes to: to at most log_clip for A > 0, else at least -log_clip.
    """
    clipped = jnp.where(advantages > 0, jnp.minimum(log_ratio, log_clip), jnp.maximum(log_ratio, -log_clip))
    mean = reductions.row_mean(clipped, mask)
    return jnp.broadcast_to(reductions.clamped_exp(mean, MAX_MEAN_LOG_RATIO), mask.shape)
