"""The token distribution: penalties, truncation, noise, and what ends or forces a completion."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEVER = -jnp.inf


class Sampling(NamedTuple):
    """How tokens are chosen; plain values, so that it can be a static argument."""

    temperature: float  # logprobs are those of softmax(logits / temperature); 0: exact argmax
    max_tokens: int  # C
    stop_tokens: tuple[int, ...]  # a completion ends with the first of them
    pad_token: int  # fills a completion after its end
    top_p: float = 1.0  # 1, 0, 0 and 1 keep the whole distribution
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # arXiv 1909.05858, over prompt and completion as in transformers
    min_tokens: int = 0  # no stop before that many tokens
    thinking_tokens: int = 0  # after that many the end of thinking is forced; 0: never
    thinking_end: tuple[int, ...] = ()  # the tokens that are forced

    @property
    def truncates(self):
        """Whether tokens are drawn from anything but softmax(logits / temperature)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1 or self.min_tokens > 0


def draw(logits, keys, *, temperature, top_p, top_k, min_p):
    """Tokens i32[B] drawn from softmax(logits / temperature) truncated, logits f32[B, V], one key per row.

    temperature 0 is exact argmax. Noise is Gumbel, so a row's token depends on its own key alone and
    not on its neighbours.
    """
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    scaled = logits / temperature
    if top_p < 1 or top_k or min_p:
        scaled = truncate(jax.nn.log_softmax(scaled, -1), top_p=top_p, top_k=top_k, min_p=min_p)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    best = jax.lax.platform_dependent(scaled + noise, cpu=_argmax_on_cpu, default=lambda x: jnp.argmax(x, -1))
    return best.astype(jnp.int32)


def _argmax_on_cpu(x):
    """argmax over the last axis; argmax's own reduction, and the noise that is fused with it, XLA does one by one."""
    best = jnp.max(x, -1, keepdims=True)
    return jnp.min(jnp.where(x == best, jnp.arange(x.shape[-1]), x.shape[-1] - 1), -1)


def logprob(logits, tokens, temperature):
    """log softmax(logits / temperature) f32[B] of tokens i32[B]: untruncated, the quantity that the learner computes.

    temperature 0 gives the logprob at temperature 1.
    """
    scaled = logits / (temperature or 1.0)
    # a masked sum and not an index: indexing logits that are sharded over the vocabulary gathers them
    chosen = jnp.arange(logits.shape[-1]) == tokens[:, None]
    return jnp.sum(jnp.where(chosen, scaled, 0.0), -1) - jax.nn.logsumexp(scaled, -1)


def penalize(logits, seen, penalty):
    """logits f32[B, V] with those of seen tokens bool[B, V] divided (if positive) or multiplied by the penalty."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


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
