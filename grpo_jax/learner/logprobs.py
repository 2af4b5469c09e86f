"""Logprobs of completion tokens, chunked over tokens so that [B, T, V] logits never exist."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.models import transformer
from grpo_jax.models.collectives import ALONE, Collectives, VocabShards
from grpo_jax.types import Array, Rollout


class Head(NamedTuple):
    """How logprobs are computed from hidden states; static values."""

    temperature: float  # logprobs are those of softmax(logits / temperature); 0 counts as 1
    chunk: int  # tokens whose logits exist at once
    entropy_gradient: bool = False  # whether the entropy is differentiable
    collectives: Collectives = ALONE


class TokenLogprobs(NamedTuple):
    """Logprobs and entropies of the tokens of completions, 0 where masked."""

    logprobs: Float[Array, 'B C']
    entropy: Float[Array, 'B C']


def completion_logprobs(
    params,
    rollout: Rollout,
    c: transformer.ModelConfig,
    *,
    temperature: float,
    chunk: int,
    remat: str,
    entropy_gradient: bool = False,
    collectives: Collectives = ALONE,
) -> TokenLogprobs:
    """(logprobs f32[B, C], entropy f32[B, C]) under softmax(logits / temperature), untruncated; 0 where masked.

    One forward pass over prompt and completion; the head runs over `chunk` tokens at a time, at tokens of completions
    only, and is recomputed in the backward pass where these are not all. remat is that of transformer.forward. The
    entropy is differentiable if entropy_gradient.
    """
    return rollout_logprobs(params, rollout, c, Head(temperature, chunk, entropy_gradient, collectives), remat)


def rollout_logprobs(
    params, rollout: Rollout, model_config: transformer.ModelConfig, head: Head, remat: str
) -> TokenLogprobs:
    """completion_logprobs with the head's options in one value."""
    queries = rollout.prompt_mask.shape[1]
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    positions = transformer.positions_of(mask)
    hidden = transformer.forward(
        params, rollout.tokens, positions, mask, model_config, remat=remat, collectives=head.collectives
    )
    before, targets = hidden[:, queries - 1 : -1], rollout.tokens[:, queries:]
    return token_logprobs(params, before, targets, rollout.completion_mask, model_config, head)


def token_logprobs(
    params,
    hidden: Float[Array, 'B C D'],
    targets: Int[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    model_config: transformer.ModelConfig,
    head: Head,
) -> TokenLogprobs:
    """(logprobs, entropy), each f32[B, C], of targets given the hidden states before them; 0 where masked."""

    def on_device(weights, hidden, targets, mask, shards):
        return TokenLogprobs(*_chunked(weights, hidden, targets, mask, shards, model_config, head))

    weights = transformer.head_weights(params, model_config)
    return head.collectives.head(on_device, weights, hidden, targets, mask)


def _chunked(weights, hidden, targets, mask, shards: VocabShards, model_config, head: Head):
    """[logprobs, entropy] of a device's tokens, `head.chunk` of them at a time."""
    shape, count = targets.shape, targets.size
    size = min(head.chunk, count)
    flat_mask = jnp.reshape(mask, -1)
    order, rank = compact(flat_mask, size)
    chunks = -(-shards.max_tokens(jnp.sum(flat_mask)) // size)

    def chunk_values(hidden, targets):
        logits = transformer.unembed_transposed(weights, shards.gather_tokens(hidden), model_config)
        logits = logits / (head.temperature or 1.0)
        values = _picked_and_entropy(logits, shards.gather_tokens(targets), shards, head.entropy_gradient)
        return tuple(map(shards.own_tokens, values))

    def nothing(*_):
        return jnp.zeros(size), jnp.zeros(size)

    def one_chunk(chunk):
        index, places = chunk
        chunk_hidden, chunk_targets, chunk_mask = (
            jnp.take(x.reshape(count, *x.shape[2:]), places, 0, mode='fill', fill_value=0)
            for x in (hidden, targets, mask)
        )
        values = jax.lax.cond(index < chunks, chunk_values, nothing, chunk_hidden, chunk_targets)
        return [jnp.where(chunk_mask, x, 0.0) for x in values]

    one_chunk = jax.checkpoint(one_chunk) if len(order) > 1 else one_chunk
    values = jax.lax.map(one_chunk, (jnp.arange(len(order)), order))
    return [x.reshape(-1)[rank].reshape(shape) for x in values]


def compact(mask: Bool[Array, ' N'], size: int) -> tuple[Int[Array, 'chunks size'], Int[Array, ' N']]:
    """(order, rank): places of N tokens in chunks of `size`, those under the mask first, and each token's rank in it.

    Whole chunks of masked tokens come last and can be skipped. The last chunk is filled up with N, which is no place.
    """
    count = mask.size
    rank = jnp.where(mask, jnp.cumsum(mask) - 1, jnp.sum(mask) + jnp.cumsum(~mask) - 1)
    return jnp.full(count + -count % size, count).at[rank].set(jnp.arange(count)).reshape(-1, size), rank


def _picked_and_entropy(logits, targets, shards: VocabShards, entropy_gradient: bool):
    """(logprob of each target, entropy), each f32[n], of logits f32[V, n], or of this device's shard of V."""
    first, count = shards.vocab_range(len(logits))
    inside = True if isinstance(count, int) else (jnp.arange(len(logits)) < count)[:, None]
    highest = shards.max_vocab(jax.lax.stop_gradient(jnp.max(logits, 0, where=inside, initial=-jnp.inf)))
    below = jnp.where(inside, logits - highest, 0.0)
    weights = jnp.where(inside, jnp.exp(below), 0.0)
    total = shards.sum_vocab(jnp.sum(weights, 0))
    places = targets - first
    here = (places >= 0) & (places < count)
    picked = jnp.take_along_axis(below, jnp.where(here, places, 0)[None], 0)[0]
    logprobs = shards.sum_vocab(jnp.where(here, picked, 0.0)) - jnp.log(total)
    if not entropy_gradient:
        weights, below, total = jax.lax.stop_gradient((weights, below, total))
    return logprobs, jnp.log(total) - shards.sum_vocab(jnp.sum(weights * below, 0)) / total
