"""Factors f32[B, C] of the policy loss that correct for the sampler's mismatch; they have no gradient.

A correction may read log_rho f32[B, C], the old policy's logprobs minus the sampler's, 0 on masked tokens; mask
bool[B, C]; advantages f32[B, 1 or C]; and drift f32[B, C], the sampler's logprobs minus the learner's present logprobs.
rho is exp(log_rho). A "product" multiplies rho over a row's tokens, and "geometric" is the geometric mean over them;
other code calls both "sequence".
"""

import jax.numpy as jnp
from jaxtyping import Bool, Float

from grpo_jax.algorithms import pieces, reductions
from grpo_jax.ranges import NotNegative, Positive, Share
from grpo_jax.types import Array


def none(mask: Bool[Array, 'B C']) -> Float[Array, 'B C']:
    """1 for every token: no correction."""
    return jnp.ones(mask.shape, jnp.float32)


@pieces.properties(bounds='token')
def truncated(
    log_rho: Float[Array, 'B C'],
    *,
    rho_max: Positive = 2.0,  # largest weight; a larger rho is lowered to it
) -> Float[Array, 'B C']:
    """min(rho, rho_max) by token: TIS (https://fengyao.notion.site/off-policy-rl)."""
    return jnp.minimum(reductions.clamped_exp(log_rho), rho_max)


@pieces.properties(bounds='token')
def icepop(
    log_rho: Float[Array, 'B C'],
    *,
    icepop_low: Share = 0.5,  # a token whose rho is below it does not count
    icepop_high: Positive = 5.0,  # a token whose rho is above it does not count
) -> Float[Array, 'B C']:
    """rho by token, 0 outside [icepop_low, icepop_high]: IcePop (arXiv 2510.18855)."""
    rho = reductions.clamped_exp(log_rho)
    return _keep_within(rho, rho, icepop_low, icepop_high)


@pieces.properties(bounds='row')
def truncated_product(
    log_rho: Float[Array, 'B C'], mask: Bool[Array, 'B C'], *, rho_max: Positive = 2.0
) -> Float[Array, 'B C']:
    """min(product of rho over a row, rho_max), on each token of the row."""
    product = reductions.clamped_exp(reductions.row_sum(log_rho, mask))
    return jnp.broadcast_to(jnp.minimum(product, rho_max), mask.shape)


@pieces.properties(bounds='row')
def masked_product(
    log_rho: Float[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    *,
    product_max: Positive = 3.0,  # a row whose product of rho is above it does not count
) -> Float[Array, 'B C']:
    """The row's product of rho on each token, 0 for rows above product_max: MIS, as TRL's sequence_mask."""
    product = reductions.clamped_exp(reductions.row_sum(log_rho, mask))
    return jnp.broadcast_to(_keep_within(product, product, 0.0, product_max), mask.shape)


@pieces.properties(bounds='token')
def masked_geometric(
    log_rho: Float[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    *,
    geometric_low: Share = 0.999,  # a row whose geometric mean of rho is below it does not count
    geometric_high: Positive = 1.002,  # a row whose geometric mean of rho is above it does not count
) -> Float[Array, 'B C']:
    """rho by token, 0 for rows whose geometric mean is outside [geometric_low, geometric_high]."""
    mean = reductions.row_mean(log_rho, mask)
    rho = reductions.clamped_exp(log_rho)
    return _keep_within(rho, reductions.clamped_exp(mean), geometric_low, geometric_high)


@pieces.properties(bounds='one')
def veto(
    log_rho: Float[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    *,
    veto_below: Share = 1e-4,  # a row with a token whose rho is below it does not count
) -> Float[Array, 'B C']:
    """1, or 0 for rows with a token whose rho is below veto_below."""
    worst = jnp.min(jnp.where(mask, log_rho, 0.0), -1, keepdims=True)
    return jnp.broadcast_to(jnp.where(reductions.clamped_exp(worst) < veto_below, 0.0, 1.0), mask.shape)


@pieces.properties(bounds='one')
def opsm(
    drift: Float[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    advantages: pieces.Advantages,
    *,
    opsm_delta: NotNegative = 0.5,  # nats of mean drift, above which a row with A < 0 does not count
) -> Float[Array, 'B C']:
    """1, or 0 for rows with A < 0 whose mean drift is above opsm_delta: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).

    The paper gives no delta; 0.5 is TRL's suggestion.
    """
    mean = reductions.row_mean(drift, mask)
    return jnp.broadcast_to(jnp.where((advantages < 0) & (mean > opsm_delta), 0.0, 1.0), mask.shape)


def _keep_within(weight, value, low, high):
    """The weight, 0 where the value is outside [low, high]."""
    return jnp.where((value >= low) & (value <= high), weight, 0.0)
