"""Logprobs of completion tokens, chunked over tokens so that [B, T, V] logits never exist."""

import jax
import jax.numpy as jnp

from grpo_jax.models import transformer
from grpo_jax.models.collectives import ALONE


def completion_logprobs(params, rollout, c, *, temperature, chunk, remat, entropy_gradient=False, collectives=ALONE):
    """(logprobs f32[B, C], entropy f32[B, C]) under softmax(logits / temperature), untruncated; 0 where masked.

    One forward pass over prompt and completion; the head runs over `chunk` tokens at a time, at tokens of completions
    only, and is recomputed in the backward pass where these are not all. remat is that of transformer.forward. The
    entropy is differentiable if entropy_gradient.
    """
    queries = rollout.prompt_mask.shape[1]
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    hidden = transformer.forward(
        params, rollout.tokens, transformer.positions_of(mask), mask, c, remat=remat, collectives=collectives
    )
    return token_logprobs(
        params,
        hidden[:, queries - 1 : -1],
        rollout.tokens[:, queries:],
        rollout.completion_mask,
        c,
        temperature=temperature,
        chunk=chunk,
        entropy_gradient=entropy_gradient,
        collectives=collectives,
    )


def token_logprobs(
    params, hidden, targets, wanted, c, *, temperature, chunk, entropy_gradient=False, collectives=ALONE
):
    """(logprobs, entropy), each f32[B, C], of targets i32[B, C] given hidden [B, C, D]; 0 except where wanted.

    temperature 0 means greedy sampling, whose logprobs are those at temperature 1.
    """

    def of_tokens(weights, hidden, targets, wanted, shards):
        shape, count = targets.shape, targets.size
        size = min(chunk, count)
        # the tokens that are wanted first, so that whole chunks of padding are skipped
        asked = jnp.reshape(wanted, -1)
        rank = jnp.where(asked, jnp.cumsum(asked) - 1, jnp.sum(asked) + jnp.cumsum(~asked) - 1)
        order = jnp.full(count + -count % size, count).at[rank].set(jnp.arange(count)).reshape(-1, size)
        chunks = -(-shards.max_tokens(jnp.sum(asked)) // size)

        def head(chunk):
            index, places = chunk
            taken = [
                jnp.take(x.reshape(count, *x.shape[2:]), places, 0, mode='fill', fill_value=0)
                for x in (hidden, targets, wanted)
            ]
            found = jax.lax.cond(index < chunks, of_chunk, lambda *_: (jnp.zeros(size), jnp.zeros(size)), *taken[:2])
            return [jnp.where(taken[2], x, 0.0) for x in found]

        def of_chunk(hidden, targets):
            logits = transformer.unembed_transposed(weights, shards.gather_tokens(hidden), c) / (temperature or 1.0)
            found = _picked_and_entropy(logits, shards.gather_tokens(targets), shards, entropy_gradient)
            return tuple(map(shards.own_tokens, found))

        found = jax.lax.map(jax.checkpoint(head) if len(order) > 1 else head, (jnp.arange(len(order)), order))
        return tuple(x.reshape(-1)[rank].reshape(shape) for x in found)

    return collectives.head(of_tokens, transformer.head_weights(params, c), hidden, targets, wanted)


def _picked_and_entropy(logits, targets, shards, entropy_gradient):
    """(logprob of each target, entropy), each f32[n], of logits f32[V, n], or of this device's part of V."""
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
