"""What a rollout holds on the devices: the RolloutState of all rows, and the DecodeBatch of those that decode together.

A batch is opened with some rows of the state, decodes them in segments of many steps, grows in columns and shrinks in
rows as they finish. A row that leaves a batch unfinished is preempted: its tokens stay in the state, and a later batch
prefills them. All functions work on one shard's rows and are pure. The engine decides when they run, and programs.py
where.

The last prompt token is the first decode input, so there is no special first-token path: own column j of a row holds
the j-th of [last prompt token, its tokens].
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Key
import numpy as np

from grpo_jax.models import attention, transformer
from grpo_jax.models import cache as kv_cache
from grpo_jax.sampler import stops
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.types import Array, Prompts, Pytree, Rollout, pytree

Number = int | np.integer | Int[Array, '']
PREFILL_TOKENS = 8192  # at most, in one pass through the model; bounds the activations of a prefill


class CacheFormat(NamedTuple):
    """How keys and values are stored."""

    block: int  # columns that are read at once
    dtype: Any  # of computation, or int8
    flat: bool = False  # in the order that models.kernels.decode_kernel reads
    by_layer: bool = False  # each layer has arrays of its own, and so have its weights


@pytree
class RolloutState(Pytree):
    """All N = P * G rows of a rollout."""

    prompts: Prompts
    keys: Key[Array, ' N']  # the token at position n uses fold_in(key, n)
    tokens: Int[Array, 'N C']
    logprobs: Float[Array, 'N C']
    version: Int[Array, 'N C']  # step of the weights that sampled the token
    forced: Bool[Array, 'N C']  # tokens that were not sampled
    given_tokens: Int[Array, 'N C']  # to write whatever is sampled (replay); -1: sample
    count: Int[Array, ' N']  # tokens so far
    limit: Int[Array, ' N']  # count at which a row pauses
    done: Bool[Array, ' N']  # has met a stop
    thinking: Bool[Array, ' N']  # the end of thinking has not come yet
    states: dict[str, Int[Array, ' N']]  # of automata by name

    @property
    def group(self) -> int:
        """G."""
        return self.count.shape[0] // self.prompts.ids.shape[0]

    @property
    def unfinished(self) -> Bool[Array, ' N']:
        """Rows that have met neither a stop nor their limit."""
        return ~self.done & (self.count < self.limit)


@pytree
class DecodeBatch(Pytree):
    """B rows that are decoded together."""

    cache: kv_cache.KVCache
    rows: Int[Array, ' B']  # numbers of the rows in the RolloutState
    last: Int[Array, ' B']  # token to feed next
    live: Bool[Array, ' B']
    thinking: Bool[Array, ' B']
    states: dict[str, Int[Array, ' B']]
    seen: Bool[Array, 'B V'] | None  # tokens of prompt and completion, for the repetition penalty


def new_state(
    prompts: Prompts,
    keys: Key[Array, ' N'],
    given_tokens: Int[Array, 'N C'],
    limit: Number | Int[Array, ' N'] | Int[np.ndarray, ' N'],
    automata: Iterable[str],
) -> RolloutState:
    """The RolloutState of rows without tokens; limit is one number or one a row, automata are names."""
    rows, columns = given_tokens.shape
    limit = jnp.broadcast_to(jnp.minimum(limit, columns), (rows,)).astype(jnp.int32)
    return RolloutState(
        prompts=prompts,
        keys=keys,
        tokens=jnp.zeros((rows, columns), jnp.int32),
        logprobs=jnp.zeros((rows, columns)),
        version=jnp.zeros((rows, columns), jnp.int32),
        forced=jnp.zeros((rows, columns), bool),
        given_tokens=given_tokens,
        count=jnp.zeros(rows, jnp.int32),
        limit=limit,
        done=jnp.zeros(rows, bool),
        thinking=jnp.ones(rows, bool),
        states={name: jnp.zeros(rows, jnp.int32) for name in automata},
    )


def resume_state(
    rollout: Rollout,
    prompts: Prompts,
    keys: Key[Array, ' N'],
    limit: Number | Int[Array, ' N'] | Int[np.ndarray, ' N'],
    tables: stops.Tables,
    options: Sampling,
) -> RolloutState:
    """The RolloutState that goes on where a Rollout paused; each unfinished row gets up to `limit` more tokens."""
    queries = rollout.prompt_mask.shape[1]
    mask = rollout.completion_mask
    state = new_state(prompts, keys, jnp.full(mask.shape, -1, jnp.int32), mask.shape[1], tables)
    count = jnp.sum(mask, -1, dtype=jnp.int32)
    state = state.replace(
        tokens=rollout.tokens[:, queries:],
        logprobs=rollout.logprobs,
        version=rollout.version,
        forced=rollout.forced,
        count=count,
        limit=jnp.minimum(count + limit, mask.shape[1]),
        done=~rollout.truncated,
    )

    def read(carry, column):
        states, thinking = carry
        token, valid, n = column
        states = stops.advance(tables, states, token, valid)
        states = stops.without_early(tables, states, n, options.min_tokens)
        return (states, stops.still_thinking(tables, states, thinking, n, options.thinking_tokens)), None

    columns = (state.tokens.T, mask.T, jnp.arange(mask.shape[1]))
    (states, thinking), _ = jax.lax.scan(read, (state.states, state.thinking), columns)
    return state.replace(states=states, thinking=thinking)


def open_batch(
    params: Any,
    state: RolloutState,
    index: Number,
    model_config: Any,
    options: Sampling,
    cache_format: CacheFormat,
    sizes: tuple[int, int],
    attend_by: str = 'xla',
) -> DecodeBatch:
    """The DecodeBatch of the `index`-th prompts, with all rows of their groups, of which none has begun.

    sizes are the number of prompts and the columns of the first chunk; attend_by is attention.Rule.by of the prefill.
    """
    prompts, columns = sizes

    def part(x):
        return jax.lax.dynamic_slice_in_dim(x, index * prompts, prompts)

    tokens, mask = part(state.prompts.tokens), part(state.prompts.mask)
    rows = (index * prompts * state.group + jnp.arange(prompts * state.group)).astype(jnp.int32)
    prompt_cache = empty_prompt_cache(model_config, prompts, tokens.shape[1], cache_format)
    (prompt_cache,) = _prefill(
        params, tokens[:, :-1], mask[:, :-1], model_config, (prompt_cache,), (tokens.shape[1] - 1,), attend_by
    )
    own = kv_cache.empty(model_config, rows.shape[0], columns, **cache_format._asdict())
    cache = kv_cache.KVCache(
        prompt=prompt_cache,
        prompt_start=prompt_cache.columns - jnp.sum(mask[:, :-1], -1, dtype=jnp.int32),
        chunks=(own,),
        start=jnp.zeros_like(rows),
        length=jnp.int32(0),
    )
    return _read_rows(cache, state, rows, jnp.ones_like(rows, bool), model_config, options)


def resume_rows(
    params: Any,
    state: RolloutState,
    length: Number,
    model_config: Any,
    options: Sampling,
    cache_format: CacheFormat,
    sizes: tuple[int, tuple[int, ...]],
    attend_by: str,
) -> DecodeBatch:
    """The DecodeBatch of the longest unfinished rows, each with a copy of its prompt.

    Their tokens are prefilled right-aligned before own column `length`, which no row may exceed. sizes are the number
    of rows and the columns of each chunk; attend_by is attention.Rule.by of the prefill.
    """
    rows, columns = sizes
    length_of = jnp.where(state.unfinished, state.count, -1)
    chosen = jnp.argsort(-length_of, stable=True)[:rows].astype(jnp.int32)
    live = length_of[chosen] >= 0
    prompts, mask = state.prompts.tokens[chosen // state.group], state.prompts.mask[chosen // state.group]
    start = length - jnp.where(live, state.count[chosen], 0)

    total = sum(-(-size // cache_format.block) * cache_format.block for size in columns)
    place = jnp.arange(total) - start[:, None]  # of a column in [last prompt token, tokens]
    fed = jnp.concatenate([prompts[:, -1:], state.tokens[chosen]], 1)
    own = jnp.take_along_axis(fed, jnp.clip(place, 0, fed.shape[1] - 1), 1)
    own_mask = (place >= 0) & (jnp.arange(total) < length)
    tokens, mask = jnp.concatenate([prompts[:, :-1], own], 1), jnp.concatenate([mask[:, :-1], own_mask], 1)

    empty = [empty_prompt_cache(model_config, rows, prompts.shape[1], cache_format)]
    empty += [kv_cache.empty(model_config, rows, size, **cache_format._asdict()) for size in columns]
    widths = (prompts.shape[1] - 1, *(chunk.columns for chunk in empty[1:]))
    prompt_cache, *chunks = _prefill(params, tokens, mask, model_config, tuple(empty), widths, attend_by)
    prompt_start = prompt_cache.columns - jnp.sum(mask[:, : prompts.shape[1] - 1], -1, dtype=jnp.int32)
    cache = kv_cache.KVCache(
        prompt=prompt_cache,
        prompt_start=prompt_start,
        chunks=tuple(chunks),
        start=start,
        length=jnp.asarray(length, jnp.int32),
    )
    return _read_rows(cache, state, chosen, live, model_config, options)


def empty_batch(
    model_config: Any,
    queries: int,
    sizes: tuple[int, int, tuple[int, ...]],
    options: Sampling,
    automata: Iterable[str],
    cache_format: CacheFormat,
) -> DecodeBatch:
    """A DecodeBatch of zeros, for its shapes; sizes are prompts, rows and the columns of each chunk, automata names."""
    prompts, rows, columns = sizes
    numbers, flags = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)
    cache = kv_cache.KVCache(
        prompt=empty_prompt_cache(model_config, prompts, queries, cache_format),
        prompt_start=jnp.zeros(prompts, jnp.int32),
        chunks=tuple(kv_cache.empty(model_config, rows, size, **cache_format._asdict()) for size in columns),
        start=numbers,
        length=jnp.int32(0),
    )
    return DecodeBatch(
        cache=cache,
        rows=numbers,
        last=numbers,
        live=flags,
        thinking=flags,
        states=dict.fromkeys(automata, numbers),
        seen=jnp.zeros((rows, model_config.vocab_size), bool) if options.repetition_penalty != 1 else None,
    )


class Remaining(NamedTuple):
    """What is left of a rollout, each i32[]."""

    unfinished: Int[Array, '']  # rows
    longest: Int[Array, '']  # tokens of the longest of them
    tokens: Int[Array, '']  # of all rows so far


def count_remaining(state: RolloutState) -> Remaining:
    """The Remaining of a RolloutState."""
    unfinished = state.unfinished
    return Remaining(
        jnp.sum(unfinished, dtype=jnp.int32),
        jnp.max(jnp.where(unfinished, state.count, 0)),
        jnp.sum(state.count, dtype=jnp.int32),
    )


def choose_rows(batch: DecodeBatch, size: int) -> tuple[DecodeBatch, Int[Array, ' M']]:
    """(DecodeBatch of `size` of its rows, their order i32[size]): live rows first, in their order.

    The batch comes without prompt cache and chunks. They follow one by one (`gather_rows`), so that never two whole
    caches exist.
    """
    order = jnp.argsort(~batch.live, stable=True)[:size].astype(jnp.int32)
    small = (batch.rows, batch.last, batch.live, batch.thinking, batch.states, batch.seen, batch.cache.start)
    rows, last, live, thinking, states, seen, start = jax.tree.map(lambda x: x[order], small)
    rows_per_prompt = batch.rows.shape[0] // batch.cache.prompt_start.shape[0]
    cache = batch.cache.replace(start=start, prompt_start=batch.cache.prompt_start[order // rows_per_prompt])
    batch = batch.replace(cache=cache, rows=rows, last=last, live=live, thinking=thinking, states=states, seen=seen)
    return batch, order


def gather_rows(chunk: kv_cache.AnyChunk, order: Int[Array, ' M'], rows_per_prompt: int) -> kv_cache.AnyChunk:
    """The chunk of the batch's rows in `order`; rows_per_prompt of them share a row of the chunk."""
    return jax.tree.map(lambda x: x[:, :, order // rows_per_prompt], chunk)


def finish(state: RolloutState, pad_token: int) -> Rollout:
    """The Rollout of a RolloutState."""
    columns = state.tokens.shape[1]
    mask = jnp.arange(columns) < state.count[:, None]
    prompts = jax.tree.map(lambda x: jnp.repeat(x, state.group, 0), state.prompts)
    tokens = jnp.concatenate([prompts.tokens, jnp.where(mask, state.tokens, pad_token)], 1)
    return Rollout(
        tokens=tokens,
        prompt_mask=prompts.mask,
        completion_mask=mask,
        forced=state.forced,
        logprobs=state.logprobs,
        truncated=~state.done,
        version=state.version,
    )


def prompt_columns(queries: int, block: int) -> int:
    """Columns of a prompt of `queries` tokens in the prompt cache: all but its last token, in whole blocks."""
    width = _prompt_block(queries, block)
    return max(-(-(queries - 1) // width), 1) * width


def empty_prompt_cache(model_config: Any, rows: int, queries: int, cache_format: CacheFormat) -> kv_cache.AnyChunk:
    """An empty chunk for prompts of `queries` tokens."""
    columns = prompt_columns(queries, cache_format.block)
    prompt_format = cache_format._replace(block=_prompt_block(queries, cache_format.block))
    return kv_cache.empty(model_config, rows, columns, **prompt_format._asdict())


def _prompt_block(queries, block):
    """Wider than own blocks, since a prompt is full from the start, but no wider than a short one needs."""
    return min(4 * block, max(-(-(queries - 1) // 8), 1) * 8)


def _read_rows(cache, state, rows, live, model_config, options):
    """DecodeBatch with what the state has of the rows."""
    prompts, count, tokens, owners = state.prompts, state.count[rows], state.tokens[rows], rows // state.group
    newest = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    last = jnp.where(count == 0, prompts.tokens[owners, -1], newest)
    seen = None
    if options.repetition_penalty != 1:
        before = jnp.concatenate([prompts.tokens[owners], tokens], 1)
        valid = jnp.concatenate([prompts.mask[owners], jnp.arange(tokens.shape[1]) < count[:, None]], 1)
        seen = jnp.zeros((rows.shape[0], model_config.vocab_size), bool)
        seen = seen.at[jnp.arange(rows.shape[0])[:, None], before].max(valid)
    return DecodeBatch(
        cache=cache,
        rows=rows,
        last=last,
        live=live & state.unfinished[rows],
        thinking=state.thinking[rows],
        states={name: states[rows] for name, states in state.states.items()},
        seen=seen,
    )


def _prefill(params, tokens, mask, model_config, chunks, widths, attend_by):
    """chunks filled with the keys and values of tokens [R, T], cut into consecutive pieces of the given widths.

    The first piece is of prompts.
    """
    rows, t = tokens.shape
    if t == 0:
        return chunks
    at_once = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * t <= PREFILL_TOKENS))
    positions = transformer.positions_of(mask)

    def fill(i, chunks):
        def part(x):
            return jax.lax.dynamic_slice_in_dim(x, i * at_once, at_once)

        own_tokens, own_positions, visible = part(tokens), part(positions), part(mask)
        if attend_by == 'splash':
            visible = _runs_apart(visible, own_positions, widths[0])
        k, v = transformer.prefill(params, own_tokens, own_positions, visible, model_config, attend_by=attend_by)
        filled, column = [], 0
        for chunk, width in zip(chunks, widths, strict=True):
            new = kv_cache.prompt_chunk(k[..., column : column + width, :], v[..., column : column + width, :], chunk)
            filled.append(
                jax.tree.map(
                    lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, i * at_once, 2), chunk, new
                )
            )
            column += width
        return tuple(filled)

    with jax.named_scope('prefill'):
        return jax.lax.fori_loop(0, rows // at_once, fill, chunks)


def _runs_apart(mask, positions, queries):
    """mask, whose valid columns end with the `queries` of the prompt and go on after a gap, as splash takes them."""
    columns = mask.shape[1]
    if columns == queries:
        return mask
    length = jnp.sum(mask[:, :queries], -1, keepdims=True, dtype=jnp.int32)
    part = jnp.where(mask, (jnp.arange(columns) >= queries).astype(jnp.int32), -1)
    return attention.PackedMask(part, positions, queries - length, length, columns, queries, columns - queries)
