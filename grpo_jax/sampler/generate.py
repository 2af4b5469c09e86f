"""Group rollouts: each prompt is prefilled once, its G completions are decoded together.

The last prompt token is the first decode input, so there is no special first-token path. The cache
is [prompt bank, shared by a group | own columns]; all rows write the same column. Decoding is one
`lax.while_loop` that ends when every row has met a stop token. Slot refill and the growing wave take
the place of `_decode` later; what goes in and comes out stays.
"""
from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.models import transformer
from grpo_jax.sampler import sampling
from grpo_jax.types import Rollout


@struct.dataclass
class Slots:
    """Rows being decoded."""

    last: jax.Array      # i32[B] token to feed next
    done: jax.Array      # bool[B]
    tokens: jax.Array    # i32[B, C]
    logprobs: jax.Array  # f32[B, C]
    mask: jax.Array      # bool[B, C]
    count: jax.Array     # i32[] decode steps made


def row_keys(seed, step, ids, group_size):
    """Keys [P * G], fold_in(seed, step, prompt id, sample index): functions of ids, not of the batch.

    `seed` is a key, `step` i32[], `ids` i32[P].
    """
    key = jax.random.fold_in(seed, step)
    of_prompt = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
    of_sample = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return of_sample(of_prompt, jnp.arange(group_size)).reshape(-1)


def generate(params, prompts, keys, version, c, *, group_size, max_tokens, temperature, top_p, top_k,
             min_p, stop_tokens, pad_token):
    """A Rollout of group_size completions of up to max_tokens tokens for each of the Prompts.

    keys [P * G] come from row_keys; the token at completion position n uses fold_in(key, n), whatever
    the batch or mesh. version i32[] tags the rows. stop_tokens is a tuple of ids; a completion keeps
    its stop token and is padded with pad_token after it.
    """
    bank = _prefill(params, prompts, c)
    rows = prompts.tokens.shape[0] * group_size
    own = transformer.init_cache(c, rows, max_tokens, params['embed'].dtype)
    cache = own.replace(prompt_k=bank.k[0], prompt_v=bank.v[0], prompt_mask=prompts.mask[:, :-1])
    lengths = jnp.repeat(jnp.sum(prompts.mask, -1), group_size)
    tokens = jnp.repeat(prompts.tokens, group_size, 0)

    def sample(hidden, count):
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, count)
        return sampling.sample_token(transformer.unembed(params, hidden, c), step_keys,
                                     temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)

    slots = Slots(last=tokens[:, -1], done=jnp.zeros(rows, bool),
                  tokens=jnp.full((rows, max_tokens), pad_token, jnp.int32),
                  logprobs=jnp.zeros((rows, max_tokens)), mask=jnp.zeros((rows, max_tokens), bool),
                  count=jnp.int32(0))
    slots = _decode(params, slots, cache, lengths, c, sample, max_tokens, stop_tokens, pad_token)
    return Rollout(tokens=jnp.concatenate([tokens, slots.tokens], 1),
                   prompt_mask=jnp.repeat(prompts.mask, group_size, 0), completion_mask=slots.mask,
                   logprobs=slots.logprobs, truncated=~slots.done,
                   version=jnp.full(rows, version, jnp.int32))


def _prefill(params, prompts, c):
    """KVCache over all prompt tokens but the last, which is the first decode input."""
    tokens, mask = prompts.tokens[:, :-1], prompts.mask[:, :-1]
    cache = transformer.init_cache(c, *tokens.shape, params['embed'].dtype)
    return transformer.forward(params, tokens, transformer.positions_of(mask), mask, c, cache)[1]


def _decode(params, slots, cache, lengths, c, sample, max_tokens, stop_tokens, pad_token):
    """Slots after the loop: one token for every row at each step, until all rows are done."""
    stops = jnp.asarray(stop_tokens, jnp.int32)

    def step(carry):
        slots, cache = carry
        positions = lengths - 1 + slots.count
        hidden, cache = transformer.forward(params, slots.last[:, None], positions[:, None], None, c, cache)
        token, logprob = sample(hidden[:, 0], slots.count)
        token = jnp.where(slots.done, pad_token, token)

        def put(column, values):
            return jax.lax.dynamic_update_slice(column, values[:, None], (0, slots.count))

        return slots.replace(
            last=token, done=slots.done | jnp.isin(token, stops),
            tokens=put(slots.tokens, token),
            logprobs=put(slots.logprobs, jnp.where(slots.done, 0.0, logprob)),
            mask=put(slots.mask, ~slots.done), count=slots.count + 1), cache

    def running(carry):
        return (carry[0].count < max_tokens) & ~jnp.all(carry[0].done)

    return jax.lax.while_loop(running, step, (slots, cache))[0]
