"""Logprobs of completion tokens, chunked over tokens so that [B, T, V] logits never exist."""
import jax
import jax.numpy as jnp

from grpo_jax.models import transformer


def completion_logprobs(params, rollout, c, *, temperature, chunk, remat, entropy_gradient=False,
                        layout=transformer.ALONE):
    """(logprobs f32[B, C], entropy f32[B, C]) under softmax(logits / temperature), untruncated; 0 where masked.

    One forward pass over prompt and completion; the head runs over `chunk` tokens at a time, at tokens of completions
    only, and is recomputed in the backward pass. remat does the same for layers. The entropy is differentiable if
    entropy_gradient.
    """
    queries = rollout.prompt_mask.shape[1]
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    hidden = transformer.forward(params, rollout.tokens, transformer.positions_of(mask), mask, c, remat=remat,
                                 layout=layout)
    return token_logprobs(params, hidden[:, queries - 1:-1], rollout.tokens[:, queries:], rollout.completion_mask, c,
                          temperature=temperature, chunk=chunk, entropy_gradient=entropy_gradient, layout=layout)


def token_logprobs(params, hidden, targets, wanted, c, *, temperature, chunk, entropy_gradient=False,
                   layout=transformer.ALONE):
    """(logprobs, entropy), each f32[B, C], of targets i32[B, C] given hidden [B, C, D]; 0 except where wanted.

    temperature 0 means greedy sampling, whose logprobs are those at temperature 1.
    """
    def of_tokens(weights, hidden, targets, wanted, vocabulary):
        shape, count = targets.shape, targets.size
        size = min(chunk, count)
        # the tokens that are wanted first, so that whole chunks of padding are skipped
        asked = wanted.reshape(-1)
        rank = jnp.where(asked, jnp.cumsum(asked) - 1, jnp.sum(asked) + jnp.cumsum(~asked) - 1)
        order = jnp.full(count + -count % size, count).at[rank].set(jnp.arange(count)).reshape(-1, size)

        @jax.checkpoint
        def head(places):
            taken = [x.reshape(count, *x.shape[2:]).at[places].get(mode='fill', fill_value=0)
                     for x in (hidden, targets, wanted)]
            found = jax.lax.cond(jnp.any(taken[2]), of_chunk, lambda *_: (jnp.zeros(size), jnp.zeros(size)), *taken[:2])
            return [jnp.where(taken[2], x, 0.0) for x in found]

        def of_chunk(hidden, targets):
            logits = transformer.unembed(weights, hidden, c) / (temperature or 1.0)
            return _picked_and_entropy(logits, targets, vocabulary, entropy_gradient)

        return tuple(x.reshape(-1)[rank].reshape(shape) for x in jax.lax.map(head, order))

    return layout.head(of_tokens, transformer.head_weights(params, c), hidden, targets, wanted)


def _picked_and_entropy(logits, targets, vocabulary, entropy_gradient):
    """(logprob of each target, entropy), each f32[n], of logits f32[n, V], or of this device's part of V."""
    if vocabulary is None:
        def over_parts(x):
            return x
        highest, first = jnp.max(logits, -1), 0
    else:
        def over_parts(x):
            return jax.lax.psum(x, vocabulary)
        highest = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, -1)), vocabulary)
        first = jax.lax.axis_index(vocabulary) * logits.shape[-1]
    highest = jax.lax.stop_gradient(highest)
    total = highest + jnp.log(over_parts(jnp.sum(jnp.exp(logits - highest[:, None]), -1)))
    logprobs = logits - total[:, None]
    places = (targets - first)[:, None]
    inside = (places >= 0) & (places < logits.shape[-1])
    picked = jnp.take_along_axis(logprobs, jnp.where(inside, places, 0), -1)
    visible = logprobs if entropy_gradient else jax.lax.stop_gradient(logprobs)
    return (over_parts(jnp.sum(jnp.where(inside, picked, 0.0), -1)),
            -over_parts(jnp.sum(jnp.exp(visible) * visible, -1)))
