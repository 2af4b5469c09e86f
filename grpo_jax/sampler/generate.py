"""A rollout as one pure function: the whole batch in one wave, in one loop, without a schedule."""

import jax
import jax.numpy as jnp

from grpo_jax.sampler import wave as waves


def row_keys(seed, step, ids, group_size):
    """Keys [P * G], fold_in(seed, step, prompt id, sample index): functions of ids, not of the batch.

    `seed` is a key, `step` i32[] or i32[P * G], `ids` i32[P].
    """
    ids = jnp.repeat(ids, group_size)
    samples = jnp.arange(ids.shape[0]) % group_size

    def key(step, prompt, sample):
        of_step = jax.random.fold_in(seed, step)
        return jax.random.fold_in(jax.random.fold_in(of_step, prompt), sample)

    return jax.vmap(key)(jnp.broadcast_to(step, ids.shape), ids, samples)


def generate(params, prompts, keys, version, c, sampling, tables, *, block, limit=None):
    """A Rollout of group_size = len(keys) / P completions for each of the Prompts.

    keys come from row_keys; the token at completion position n uses fold_in(key, n), whatever the batch
    or mesh. version i32[] tags the tokens. sampling is a Sampling; a completion keeps its stop token and
    is padded after it. tables holds the automata of stop strings ('stop') and of the end of thinking
    ('thinking'), {} without any (see sampler.stops). block: columns of the cache that are read at once.
    limit i32[P * G] ends rows earlier than sampling.max_tokens.

    What the engine schedules in many programs is one program here, for notebooks and as the reference.
    """
    given = jnp.full((keys.shape[0], sampling.max_tokens), -1, jnp.int32)
    book = waves.new_book(prompts, keys, given, sampling.max_tokens if limit is None else limit, tables)
    wave = waves.open_groups(
        params,
        book,
        0,
        c,
        sampling,
        prompts=prompts.ids.shape[0],
        columns=sampling.max_tokens,
        block=block,
        dtype=params['final_norm'].dtype,
    )
    _, book, _ = waves.segment(params, wave, book, tables, version, c, sampling, steps=sampling.max_tokens)
    return waves.finish(book, sampling.pad_token)
