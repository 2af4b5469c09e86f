"""Logprobs of completion tokens, chunked over tokens so that [B, T, V] logits never exist."""
import jax
import jax.numpy as jnp

from grpo_jax.models import transformer


def completion_logprobs(params, rollout, c, *, temperature, chunk, remat, entropy_gradient=False):
    """(logprobs f32[B, C], entropy f32[B, C]) under softmax(logits / temperature), untruncated.

    One forward pass over prompt and completion; the head runs over `chunk` tokens at a time, at
    completion positions only, and is recomputed in the backward pass. remat does the same for layers.
    The entropy is differentiable if entropy_gradient. Values at masked positions are not meaningful.
    """
    queries = rollout.prompt_mask.shape[1]
    targets = rollout.tokens[:, queries:]
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)[:, :-1]
    hidden = transformer.forward(params, rollout.tokens[:, :-1], transformer.positions_of(mask), mask,
                                 c, remat=remat)
    return token_logprobs(params, hidden[:, queries - 1:], targets, c, temperature=temperature,
                          chunk=chunk, entropy_gradient=entropy_gradient)


def token_logprobs(params, hidden, targets, c, *, temperature, chunk, entropy_gradient=False):
    """(logprobs, entropy), each f32[B, C], of targets i32[B, C] given hidden [B, C, D].

    temperature 0 means greedy sampling, whose logprobs are those at temperature 1.
    """
    b, length = targets.shape
    chunk = min(chunk, b * length)
    padding = -(b * length) % chunk
    flat = jnp.pad(hidden.reshape(b * length, -1), ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[-1])
    flat_targets = jnp.pad(targets.reshape(-1), (0, padding)).reshape(-1, chunk)

    @jax.checkpoint
    def head(inputs):
        hidden, targets = inputs
        logits = transformer.unembed(params, hidden, c) / (temperature or 1.0)
        logprobs = jax.nn.log_softmax(logits, -1)
        picked = jnp.take_along_axis(logprobs, targets[:, None], -1)[:, 0]
        visible = logprobs if entropy_gradient else jax.lax.stop_gradient(logprobs)
        return picked, -jnp.sum(jnp.exp(visible) * visible, -1)

    logprobs, entropy = jax.lax.map(head, (flat, flat_targets))

    def unflatten(x):
        return x.reshape(-1)[:b * length].reshape(b, length)

    return unflatten(logprobs), unflatten(entropy)
