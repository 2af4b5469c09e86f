"""A rollout in one function, without a schedule: the front page of the sampler.

`generate` decodes the whole batch at once, in one program. The engine gives the same tokens by many programs, whose
memory and work follow the rows that are still live. The engine's words, and the files that define them:

    RolloutState   all rows of a rollout and their tokens so far (state.py)
    DecodeBatch    the rows that are decoded together, with their keys and values (state.py)
    prompt cache   keys and values of the prompts, stored once for all rows of a group
    chunk          keys and values of some columns of the rows' own tokens; a batch gets one more when its last is full
    segment        the decode steps between two visits of the host (decode.py)
    shrink         copy the live rows of a batch into a smaller one, when its other rows have ended
    preempted      a row that left its batch unfinished, for want of memory; its tokens stay in the RolloutState
    resume         prefill preempted rows into a new batch, or go on with a paused Rollout (state.py)
    Schedule       the sizes of a rollout, and what the engine chooses by them (schedule.py)
    ProgramKey     kind and sizes of a compiled program; `schedule.reachable_programs` lists all that a rollout may need
    PROGRAMS       for each kind of program its function, inputs and shardings (programs.py)
    automaton      a table that moves over tokens until a string has come: a stop string, or <think> (stops.py)
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int, Key

from grpo_jax.sampler import decode, state
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.types import Array, Prompts, Rollout


def row_keys(seed: Key[Array, ''], step: Any, ids: Any, group_size: int, first: Any = 0) -> Key[Array, ' B']:
    """Returns a key for each row: fold_in(seed, step, prompt id, sample index), a function of ids and not of the batch.

    step is i32[] or i32[P * G], and ids are i32[P]. first, i32[] or i32[P], is the index of each prompt's first sample
    in this batch.
    """
    first = jnp.repeat(jnp.broadcast_to(first, ids.shape), group_size)
    ids = jnp.repeat(ids, group_size)
    samples = first + jnp.arange(ids.shape[0]) % group_size

    def key(step, prompt, sample):
        step_key = jax.random.fold_in(seed, step)
        return jax.random.fold_in(jax.random.fold_in(step_key, prompt), sample)

    return jax.vmap(key)(jnp.broadcast_to(step, ids.shape), ids, samples)


def generate(
    params: Any,
    prompts: Prompts,
    keys: Key[Array, ' B'],
    version: Any,
    c: Any,
    sampling: Sampling,
    tables: dict,
    *,
    block: int,
    limit: Int[Array, ' B'] | None = None,
) -> Rollout:
    """Samples a Rollout of group_size = len(keys) / P completions for each of the Prompts.

    A completion keeps its stop token and is padded after it.

    keys: from row_keys; the token at completion position n uses fold_in(key, n), whatever the batch or mesh.
    version: i32[], the step of the weights, which is written beside each token.
    c: the model's config.
    tables: the automata of stop strings and of thinking, as sampler.stops makes them.
    block: how many columns of the cache are read at once.
    limit: tokens after which each row ends, or pauses for a caller who goes on; None: sampling.max_tokens.
    """
    # 1. The state of all rows: no tokens yet.
    given_tokens = jnp.full((keys.shape[0], sampling.max_tokens), -1, jnp.int32)
    row_limit = sampling.max_tokens if limit is None else limit
    rollout_state = state.new_state(prompts, keys, given_tokens, row_limit, tables)

    # 2. Prefill: keys and values of each prompt, once for its group, and an empty cache for the rows' own tokens.
    cache_format = state.CacheFormat(block, params['final_norm'].dtype)
    sizes = (prompts.ids.shape[0], sampling.max_tokens)
    batch = state.open_batch(params, rollout_state, 0, c, sampling, cache_format, sizes)

    # 3. Decode: one token a row and step, until every row has met a stop or its limit.
    _, rollout_state, _ = decode.decode_segment(
        params, batch, rollout_state, tables, version, c, sampling, sampling.max_tokens
    )

    # 4. The rollout: prompts and completions side by side, with padding.
    return state.finish(rollout_state, sampling.pad_token)
