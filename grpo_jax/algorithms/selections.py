"""Which tokens count in the policy loss, f32[B, C]; selected on a whole minibatch, before it is cut.

What a selection may read: mask bool[B, C]; advantages f32[B, 1 or C]; old_logprobs, old_entropy and log_rho f32[B, C],
by the policy at the start of the step; and covariance f32[B, C] (reductions.token_covariance).
"""

import jax.numpy as jnp
from jaxtyping import Bool, Float

from grpo_jax.algorithms import reductions
from grpo_jax.ranges import Positive, PositiveShare
from grpo_jax.types import Array


def all_tokens(mask: Bool[Array, 'B C']) -> Float[Array, 'B C']:
    """1 for every token: the policy loss leaves out none."""
    return jnp.ones(mask.shape, jnp.float32)


def high_entropy(
    old_entropy: Float[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    *,
    entropy_share: PositiveShare = 0.2,  # share of tokens that count: the tokens of highest entropy
) -> Float[Array, 'B C']:
    """1 for the entropy_share of tokens with the highest entropy in the minibatch, else 0 (arXiv 2506.01939, eq. 5).

    The loss is still divided by all tokens, as in TRL, unless denominator is 'selected'.
    """
    (threshold,) = reductions.quantiles(old_entropy, mask, [1 - entropy_share])
    return ((old_entropy >= threshold) & mask).astype(jnp.float32)


def m2po(
    log_rho: Float[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    *,
    second_moment: Positive = 0.04,  # largest mean of log_rho^2 over the tokens that count
) -> Float[Array, 'B C']:
    """1 for kept tokens: tokens with the largest log_rho^2 are dropped until the others' mean is <= second_moment.

    M2PO (arXiv 2510.01161, algorithm 1). Of tokens with equal log_rho^2, the later are dropped first.
    """
    square = jnp.where(mask, jnp.square(log_rho), jnp.inf)
    ascending = jnp.sort(square.reshape(-1))
    finite = jnp.where(jnp.isfinite(ascending), ascending, 0.0)
    means = jnp.cumsum(finite) / jnp.arange(1, len(finite) + 1)
    count = jnp.sum(jnp.isfinite(ascending) & (means <= second_moment)).astype(jnp.float32)
    return reductions.mark_highest(-square, mask & jnp.isfinite(square), count)


def clip_cov(
    covariance: Float[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    *,
    covariance_low: float = 1.0,  # tokens of a smaller covariance are never dropped
    covariance_high: float = 5.0,  # tokens of a larger covariance are never dropped
    covariance_share: PositiveShare = 2e-4,
) -> Float[Array, 'B C']:
    """0 for the covariance_share of all tokens that have the highest covariance between the two bounds, else 1.

    At least one token is dropped if any lies between them. Clip-Cov (arXiv 2505.22617, eq. 11) drops as many at random.
    """
    inside = mask & (covariance >= covariance_low) & (covariance <= covariance_high)
    return 1.0 - reductions.mark_highest(covariance, inside, jnp.maximum(covariance_share * jnp.sum(mask), 1))
