"""Aggregation as weights f32[B, C]: loss = sum(weights * per-token loss).

Weights are computed once on a whole minibatch, so the losses of microbatches, devices and packed rows add up to the
same sum. Weights may read mask bool[B, C], group_ids i32[B], advantages f32[B, 1 or C], and correct f32[B] (1 right, 0
wrong or unknown). Rows without tokens do not count.
"""

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.algorithms import pieces, reductions
from grpo_jax.ranges import Count, Range
from grpo_jax.types import Array


def sequence_mean(mask: Bool[Array, 'B C']) -> Float[Array, 'B C']:
    """Weights of the mean over a row's tokens, then over rows: GRPO (arXiv 2402.03300, eq. 3)."""
    lengths = jnp.sum(mask, -1, keepdims=True)
    return mask / jnp.maximum(lengths, 1) / jnp.maximum(jnp.sum(lengths > 0), 1)


def token_mean(mask: Bool[Array, 'B C']) -> Float[Array, 'B C']:
    """Weights of the mean over all tokens of the minibatch: DAPO as published in code (arXiv 2503.14476)."""
    return mask / jnp.maximum(jnp.sum(mask), 1)


def sequence_sum(mask: Bool[Array, 'B C']) -> Float[Array, 'B C']:
    """Weights of the sum over a row's tokens, then the mean over rows: the policy gradient's own form (REINFORCE)."""
    return mask / jnp.maximum(jnp.sum(jnp.any(mask, -1)), 1)


def constant(
    mask: Bool[Array, 'B C'],
    *,
    loss_denominator: Annotated[float, Range(least=1e-6, most=1e12)] = 1024.0,  # what the sum over tokens is divided by
) -> Float[Array, 'B C']:
    """Weights of the sum over all tokens, divided by loss_denominator whatever the number of tokens."""
    return mask / loss_denominator


def fixed_length(
    mask: Bool[Array, 'B C'],
    *,
    fixed_length: Count = 1024,  # tokens that a row's sum is divided by
) -> Float[Array, 'B C']:
    """Weights of a row's sum / fixed_length, then the mean over rows: Dr. GRPO (arXiv 2503.20783, section 3.2).

    Rows are not divided by their own length, which removes the length bias.
    """
    rows = jnp.sum(jnp.any(mask, -1))
    return mask / (fixed_length * jnp.maximum(rows, 1))


def prompt_mean(mask: Bool[Array, 'B C'], group_ids: Int[Array, ' B']) -> Float[Array, 'B C']:
    """Weights of the mean over a group's tokens, then over groups: DAPO as printed (arXiv 2503.14476, eq. 8)."""
    lengths = jnp.sum(mask, -1).astype(jnp.float32)
    same = reductions.same_group(group_ids)
    group_tokens = same @ lengths
    alive = group_tokens > 0
    prompts = jnp.sum(jnp.where(alive, 1 / jnp.sum(same, -1), 0.0))
    return mask / (jnp.maximum(group_tokens, 1) * jnp.maximum(prompts, 1))[:, None]


def pair_mean(
    mask: Bool[Array, 'B C'], group_ids: Int[Array, ' B'], advantages: pieces.Advantages
) -> Float[Array, 'B C']:
    """Weights of the mean over a row's tokens, then the pair's rows, then pairs: DPO (arXiv 2305.18290, eq. 7).

    A pair is the rows of a group with advantages above and below 0. Groups without both do not count.
    """
    sign, lengths = jnp.sign(advantages[:, 0]), jnp.sum(mask, -1)
    same = reductions.same_group(group_ids)
    paired = (same @ jnp.maximum(sign, 0.0) > 0) & (same @ jnp.minimum(sign, 0.0) < 0)
    members = (sign != 0) & (lengths > 0) & paired
    rows = jnp.maximum(same @ members.astype(jnp.float32), 1)
    share = jnp.where(members, 1 / rows, 0.0)
    return mask * (share / jnp.maximum(lengths, 1) / jnp.maximum(jnp.sum(share), 1))[:, None]
