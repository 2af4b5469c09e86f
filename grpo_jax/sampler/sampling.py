"""The token distribution: temperature, truncation, noise."""
import jax
import jax.numpy as jnp

NEVER = -jnp.inf


def sample_token(logits, keys, *, temperature, top_p, top_k, min_p):
    """(token i32[B], logprob f32[B]) sampled from logits f32[B, V], one key per row.

    The logprob is that of softmax(logits / temperature) before truncation, the same quantity that the
    learner computes. temperature 0 is exact argmax, with the logprob at temperature 1. top_p 1,
    top_k 0 and min_p 0 keep the whole distribution. Noise is Gumbel, so a row's token depends on its
    own key alone and not on its neighbours.
    """
    scaled = logits / (temperature or 1.0)
    logprobs = jax.nn.log_softmax(scaled, -1)
    if temperature == 0:
        token = jnp.argmax(logits, -1)
    else:
        kept = truncate(logprobs, top_p=top_p, top_k=top_k, min_p=min_p)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
        token = jnp.argmax(kept + noise, -1)
    return token.astype(jnp.int32), jnp.take_along_axis(logprobs, token[:, None], -1)[:, 0]


def truncate(logprobs, *, top_p, top_k, min_p):
    """logprobs f32[B, V] with -inf outside the kept set; never empties a row.

    top_k keeps the k best; min_p those of at least min_p times the best's probability; top_p then the
    smallest set of best tokens whose mass, renormalized after the other two, reaches top_p.
    """
    if top_k:
        kth = jax.lax.top_k(logprobs, min(top_k, logprobs.shape[-1]))[0][:, -1:]
        logprobs = jnp.where(logprobs >= kth, logprobs, NEVER)
    if min_p:
        best = jnp.max(logprobs, -1, keepdims=True)
        logprobs = jnp.where(logprobs >= best + jnp.log(min_p), logprobs, NEVER)
    if top_p < 1:
        ordered = -jnp.sort(-logprobs, -1)
        mass = jax.nn.softmax(ordered, -1)
        inside = jnp.cumsum(mass, -1) - mass < top_p
        last = jnp.min(jnp.where(inside, ordered, jnp.inf), -1, keepdims=True)
        logprobs = jnp.where(logprobs >= last, logprobs, NEVER)
    return logprobs
