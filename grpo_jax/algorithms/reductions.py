"""Sums, means, quantiles and ranks over the tokens of a row or a minibatch, and the exp of clamped log ratios."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.algorithms import pieces
from grpo_jax.types import Array

MAX_LOG_RATIO = 20.0  # differences of logprobs are clamped to +-20, since exp overflows float32 at 88.7


def clamp(difference: Float[Array, '...'], most: float = MAX_LOG_RATIO) -> Float[Array, '...']:
    """The difference of logprobs, clamped to between -most and most; a clamped element has no gradient."""
    return jnp.clip(difference, -most, most)


def clamped_exp(log_ratio: Float[Array, '...'], most: float = MAX_LOG_RATIO) -> Float[Array, '...']:
    """exp of the log ratio, which is clamped to between -most and most; a clamped element has no gradient."""
    return jnp.exp(clamp(log_ratio, most))


def absolute(x: Float[Array, '...']) -> Float[Array, '...']:
    """|x| with derivative 0 at 0; jnp.abs has derivative 1 there, which would push a value that should stay."""
    return x * jnp.sign(x)


def row_sum(x: Float[Array, 'B C'], mask: Bool[Array, 'B C']) -> Float[Array, 'B 1']:
    """The sum of x over each row's tokens."""
    return jnp.sum(jnp.where(mask, x, 0.0), -1, keepdims=True)


def row_mean(x: Float[Array, 'B C'], mask: Bool[Array, 'B C']) -> Float[Array, 'B 1']:
    """The mean of x over each row's tokens, 0 for a row without tokens."""
    return row_sum(x, mask) / jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)


def batch_mean(x: Float[Array, 'B _'] | Bool[Array, 'B _'], mask: Bool[Array, 'B C']) -> Float[Array, '']:
    """The mean of x over all tokens under the mask, 0 if there are none."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def pair_margins(
    logprobs: Float[Array, 'B C'],
    ref_logprobs: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    mask: Bool[Array, 'B C'],
    group_ids: Int[Array, ' B'],
    *,
    dpo_beta: float,
    dpo_length_norm: bool,
) -> Float[Array, ' B']:
    """Each row's pair margin, f32[B]: dpo_beta (chosen - rejected), as in surrogates.dpo; above 0: ranked rightly."""
    gain = jnp.sum(jnp.where(mask, logprobs - ref_logprobs, 0.0), -1)
    if dpo_length_norm:
        gain = gain / jnp.maximum(jnp.sum(mask, -1), 1)
    sign = jnp.sign(advantages[:, 0])
    return dpo_beta * (same_group(group_ids) @ (sign * gain))


def token_covariance(
    advantages: pieces.Advantages, logprobs: Float[Array, 'B C'], mask: Bool[Array, 'B C']
) -> Float[Array, 'B C']:
    """(A - mean A)(logprob - mean logprob), with means over all tokens; 0 where masked (arXiv 2505.22617, eq. 9)."""

    def centred(x):
        return jnp.where(mask, x - batch_mean(x, mask), 0.0)

    return centred(advantages) * centred(logprobs)


def mark_highest(values: Float[Array, 'B C'], mask: Bool[Array, 'B C'], count: Float[Array, '']) -> Float[Array, 'B C']:
    """1 for the `count` (rounded down) highest values under the mask, else 0; of equal ones, the earlier are higher."""
    order = jnp.argsort(-jnp.where(mask, values, -jnp.inf).reshape(-1), stable=True)
    rank = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    return ((rank.reshape(mask.shape) < jnp.floor(count)) & mask).astype(jnp.float32)


def same_group(group_ids: Int[Array, ' B']) -> Float[Array, 'B B']:
    """1 where two rows belong to one group, else 0. Its product with f32[B] is each row's sum over its group.

    segment_sum would need the number of ids, which a microbatch of a rollout does not know. B is small.
    """
    return (group_ids[:, None] == group_ids[None]).astype(jnp.float32)


def quantiles(x: Float[Array, 'B C'], mask: Bool[Array, 'B C'], shares: Sequence[float]) -> Float[Array, ' shares']:
    """The quantiles of x under the mask at these shares in [0, 1], interpolated as numpy does; 0 without any x.

    Negative x count as 0. The bits of nonnegative floats, read as integers, are ordered like the floats, so 31
    halvings of the integers' range find the floats with given ranks. A sort of all tokens would take XLA half a minute
    to compile for TPUs.
    """
    bits = jax.lax.bitcast_convert_type(jnp.maximum(x, 0.0), jnp.int32)
    count = jnp.sum(mask)
    places = jnp.asarray(shares, jnp.float32) * jnp.maximum(count - 1, 0)
    ranks = jnp.concatenate([jnp.floor(places), jnp.ceil(places)])

    def halve(i, below):
        middle = below | (1 << (30 - i))
        return jnp.where(jnp.sum(mask & (bits < middle[:, None, None]), (1, 2)) <= ranks, middle, below)

    ranked = jax.lax.fori_loop(0, 31, halve, jnp.zeros(ranks.shape, jnp.int32))
    low, high = jnp.split(jax.lax.bitcast_convert_type(ranked, jnp.float32), 2)
    return jnp.where(count > 0, low + (high - low) * (places - jnp.floor(places)), 0.0)
