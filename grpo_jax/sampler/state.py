"""What a rollout holds on the devices: the RolloutState of all rows, and the DecodeBatch of rows that decode together.

A batch begins with some rows of the state. It decodes them in segments of many steps, grows in columns, and shrinks in
rows as they finish. A row that leaves a batch unfinished is preempted: its tokens stay in the state, and a later batch
prefills them. All functions are pure and work on the rows of one shard. The engine decides when they run, and
programs.py decides where.

A row has own columns in the cache after the columns of its prompt. Own column j holds the j-th token of [last prompt
token, the row's tokens]: the last prompt token is the first input of decoding, so the first token needs no other code.
"""

from collections.abc import Collection
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
    """How keys and values are stored in a cache."""

    block: int  # columns that are read at once
    dtype: Any  # of computation, or int8
    flat: bool = False  # in the order that models.kernels.decode_kernel reads
    by_layer: bool = False  # each layer has arrays of its own, and so have its weights

    def empty(self, model_config: Any, rows: int, columns: int) -> kv_cache.AnyChunk:
        """A chunk of zeros with `columns` columns, or a few more to fill a block."""
        return kv_cache.empty_chunk(model_config, rows, columns, **self._asdict())

    def empty_prompts(self, model_config: Any, prompts: int, queries: int) -> kv_cache.AnyChunk:
        """An empty prompt cache for prompts of `queries` tokens."""
        prompt_format = self._replace(block=_prompt_block(queries, self.block))
        return prompt_format.empty(model_config, prompts, prompt_columns(queries, self.block))


@pytree
class RolloutState(Pytree):
    """All N = P * G rows of a rollout, and their tokens so far."""

    prompts: Prompts
    keys: Key[Array, ' N']  # the token at position n uses fold_in(key, n)
    tokens: Int[Array, 'N C']
    logprobs: Float[Array, 'N C']
    version: Int[Array, 'N C']  # step of the weights that sampled the token
    forced: Bool[Array, 'N C']  # tokens that were not sampled
    given_tokens: Int[Array, 'N C']  # to write whatever is sampled (replay); -1: sample
    count: Int[Array, ' N']  # tokens so far
    limit: Int[Array, ' N']  # count at which a row ends, max_tokens, or pauses before
    done: Bool[Array, ' N']  # has met a stop
    thinking: Bool[Array, ' N']  # thinking is open, or was at position thinking_tokens
    states: dict[str, Int[Array, ' N']]  # of automata by name

    @property
    def group(self) -> int:
        """Completions of a prompt, G."""
        return self.count.shape[0] // self.prompts.ids.shape[0]

    @property
    def unfinished(self) -> Bool[Array, ' N']:
        """Which rows have met neither a stop nor their limit."""
        return ~self.done & (self.count < self.limit)


@pytree
class DecodeBatch(Pytree):
    """B rows that are decoded together: their keys and values, and what each row needs to go on."""

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
    automata: Collection[str],
) -> RolloutState:
    """The RolloutState of rows without tokens; limit: one number or one for each row; automata: names of automata."""
    rows, columns = given_tokens.shape
    if 'thinking' not in automata or prompts.thinking is None:
        thinking = jnp.full(rows, 'opening' not in automata)
    else:
        thinking = jnp.repeat(prompts.thinking, rows // prompts.ids.shape[0])
    limit = jnp.broadcast_to(jnp.minimum(limit, columns), (rows,)).astype(jnp.int32)
    return RolloutState(
        prompts=prompts.replace(thinking=None),
        keys=keys,
        tokens=jnp.zeros((rows, columns), jnp.int32),
        logprobs=jnp.zeros((rows, columns)),
        version=jnp.zeros((rows, columns), jnp.int32),
        forced=jnp.zeros((rows, columns), bool),
        given_tokens=given_tokens,
        count=jnp.zeros(rows, jnp.int32),
        limit=limit,
        done=jnp.zeros(rows, bool),
        thinking=thinking,
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
    """The RolloutState that goes on where a Rollout paused; each unfinished row gets at most `limit` more tokens."""
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
        states = stops.forget_early(tables, states, n, options.min_tokens)
        return stops.follow_thinking(tables, states, thinking, n, options.thinking_tokens), None

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
    """The DecodeBatch of new rows: of all groups of n prompts, from prompt number index * n on.

    sizes are n and the columns of the first chunk; attend_by is attention.Rule.by in the prefill.
    """
    prompts, columns = sizes

    def slice_prompts(x):
        return jax.lax.dynamic_slice_in_dim(x, index * prompts, prompts)

    tokens_PQ, mask_PQ = slice_prompts(state.prompts.tokens), slice_prompts(state.prompts.mask)
    rows = (index * prompts * state.group + jnp.arange(prompts * state.group)).astype(jnp.int32)
    queries = tokens_PQ.shape[1]
    prompt_cache = cache_format.empty_prompts(model_config, prompts, queries)
    (prompt_cache,) = _prefill(
        params, tokens_PQ[:, :-1], mask_PQ[:, :-1], model_config, (prompt_cache,), (queries - 1,), attend_by
    )
    chunk = cache_format.empty(model_config, rows.shape[0], columns)
    cache = kv_cache.KVCache(
        prompt=prompt_cache,
        prompt_start=prompt_cache.columns - jnp.sum(mask_PQ[:, :-1], -1, dtype=jnp.int32),
        chunks=(chunk,),
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

    The rows' tokens are prefilled right-aligned, so that they end before own column `length`; no row may have more than
    `length` tokens. sizes are the number of rows and the columns of each chunk; attend_by is attention.Rule.by in the
    prefill.
    """
    rows, columns = sizes
    count = jnp.where(state.unfinished, state.count, -1)
    chosen = jnp.argsort(-count, stable=True)[:rows].astype(jnp.int32)  # i32[R]
    live = count[chosen] >= 0
    start = length - jnp.where(live, state.count[chosen], 0)
    queries = state.prompts.tokens.shape[1]
    empty = [cache_format.empty_prompts(model_config, rows, queries)]
    empty += [cache_format.empty(model_config, rows, size) for size in columns]
    tokens_RT, mask_RT = _read_own_columns(state, chosen, start, length, [chunk.columns for chunk in empty[1:]])
    widths = (queries - 1, *(chunk.columns for chunk in empty[1:]))
    prompt_cache, *chunks = _prefill(params, tokens_RT, mask_RT, model_config, tuple(empty), widths, attend_by)
    cache = kv_cache.KVCache(
        prompt=prompt_cache,
        prompt_start=prompt_cache.columns - jnp.sum(mask_RT[:, : queries - 1], -1, dtype=jnp.int32),
        chunks=tuple(chunks),
        start=start,
        length=jnp.asarray(length, jnp.int32),
    )
    return _read_rows(cache, state, chosen, live, model_config, options)


class Remaining(NamedTuple):
    """How much of a rollout remains, each i32[]."""

    unfinished: Int[Array, '']  # rows
    longest: Int[Array, '']  # tokens of the longest one
    tokens: Int[Array, '']  # of all rows so far


def count_remaining(state: RolloutState) -> Remaining:
    """Counts the Remaining of a RolloutState."""
    unfinished = state.unfinished
    return Remaining(
        jnp.sum(unfinished, dtype=jnp.int32),
        jnp.max(jnp.where(unfinished, state.count, 0)),
        jnp.sum(state.count, dtype=jnp.int32),
    )


def _read_own_columns(state, chosen, start, length, columns):
    """(tokens i32[R, Q - 1 + S], mask): the input that prefills the chosen rows i32[R] anew.

    A row is its prompt without the last token, then S own columns. Own column start i32[R] has the last prompt token,
    and the row's own tokens follow, so that all rows end before own column `length`; other own columns are masked.
    columns: how many each chunk has; S is their sum.
    """
    prompts_RQ, mask_RQ = (x[chosen // state.group] for x in (state.prompts.tokens, state.prompts.mask))
    # own column s of a row holds the (s - start)-th token of [last prompt token, the row's tokens]
    total = sum(columns)
    index_RS = jnp.arange(total) - start[:, None]
    inputs = jnp.concatenate([prompts_RQ[:, -1:], state.tokens[chosen]], 1)
    tokens_RS = jnp.take_along_axis(inputs, jnp.clip(index_RS, 0, inputs.shape[1] - 1), 1)
    mask_RS = (index_RS >= 0) & (jnp.arange(total) < length)
    tokens_RT = jnp.concatenate([prompts_RQ[:, :-1], tokens_RS], 1)
    return tokens_RT, jnp.concatenate([mask_RQ[:, :-1], mask_RS], 1)


def open_carried(
    params: Any,
    state: RolloutState,
    length: Number,
    model_config: Any,
    options: Sampling,
    cache_format: CacheFormat,
    sizes: tuple[int, int, int],
    attend_by: str,
) -> DecodeBatch:
    """The DecodeBatch of all rows; rows of the first prompts may have tokens of earlier steps.

    These tokens are prefilled, right-aligned, so that they end before own column `length`; rows without tokens begin
    there. sizes are the number of prompts, the number of carried prompts, and the columns of the first chunk.
    """
    prompts, carried, columns = sizes
    batch = open_batch(params, state, 0, model_config, options, cache_format, (prompts, columns), attend_by)
    count = jnp.where(state.unfinished, state.count, 0)[: carried * state.group]
    longest_first = jnp.argsort(-count, stable=True).astype(jnp.int32)
    start, queries = length - count, state.prompts.tokens.shape[1]
    empty = cache_format.empty_prompts(model_config, len(count), queries)
    empty = empty, cache_format.empty(model_config, len(count), columns)
    tokens_RT, mask_RT = _read_own_columns(state, longest_first, start[longest_first], length, [empty[1].columns])
    widths = queries - 1, empty[1].columns
    _, own = _prefill(params, tokens_RT, mask_RT, model_config, empty, widths, attend_by, jnp.sum(count > 0))
    chunk = jax.tree.map(lambda whole, rows: whole.at[:, :, longest_first].set(rows), batch.cache.chunks[0], own)
    length = jnp.asarray(length, jnp.int32)
    starts = jnp.concatenate([start, jnp.full(batch.rows.shape[0] - len(count), length)])
    cache = batch.cache.replace(chunks=(chunk,), start=starts, length=length)
    return _read_rows(cache, state, batch.rows, jnp.ones_like(batch.live), model_config, options)


def wake_rows(batch: DecodeBatch, state: RolloutState, tokens: Number) -> tuple[DecodeBatch, RolloutState]:
    """(DecodeBatch, RolloutState) in which rows that paused at their limit may get `tokens` more tokens."""
    state = state.replace(limit=jnp.minimum(state.limit + tokens, state.tokens.shape[1]))
    return batch.replace(live=state.unfinished[batch.rows]), state


def choose_rows(batch: DecodeBatch, size: int) -> tuple[DecodeBatch, Int[Array, ' M']]:
    """(DecodeBatch of `size` rows, their order i32[size] in `batch`); live rows come first.

    Keys and values are not copied here: `gather_rows` copies the prompt cache and each chunk one by one, so that two
    whole caches never exist at once.
    """
    order = jnp.argsort(~batch.live, stable=True)[:size].astype(jnp.int32)
    arrays = (batch.rows, batch.last, batch.live, batch.thinking, batch.states, batch.seen, batch.cache.start)
    rows, last, live, thinking, states, seen, start = jax.tree.map(lambda x: x[order], arrays)
    rows_per_prompt = batch.rows.shape[0] // batch.cache.prompt_start.shape[0]
    cache = batch.cache.replace(start=start, prompt_start=batch.cache.prompt_start[order // rows_per_prompt])
    batch = batch.replace(cache=cache, rows=rows, last=last, live=live, thinking=thinking, states=states, seen=seen)
    return batch, order


def gather_rows(chunk: kv_cache.AnyChunk, order: Int[Array, ' M'], rows_per_prompt: int) -> kv_cache.AnyChunk:
    """A copy of the chunk for the batch's rows in `order`; rows_per_prompt rows share one row of the chunk."""
    return jax.tree.map(lambda x: x[:, :, order // rows_per_prompt], chunk)


def finish(state: RolloutState, pad_token: int) -> Rollout:
    """The Rollout that a RolloutState has come to; pad_token fills the completions after their ends."""
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
    """Columns of the prompt cache for a prompt of `queries` tokens: whole blocks, for all tokens but the last."""
    width = _prompt_block(queries, block)
    return max(-(-(queries - 1) // width), 1) * width


def _prompt_block(queries, block):
    """Columns in a block of the prompt cache: 4 * block, or fewer where a smaller block holds a whole prompt."""
    return min(4 * block, max(-(-(queries - 1) // 8), 1) * 8)


def _read_rows(cache, state, rows, live, model_config, options):
    """The DecodeBatch of rows i32[B] as they are in the state; live bool[B]: which of them may decode."""
    prompts, count, tokens_BC = state.prompts, state.count[rows], state.tokens[rows]
    prompt_of = rows // state.group
    newest = jnp.take_along_axis(tokens_BC, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    last = jnp.where(count == 0, prompts.tokens[prompt_of, -1], newest)
    seen = None
    if options.repetition_penalty != 1:
        tokens_BT = jnp.concatenate([prompts.tokens[prompt_of], tokens_BC], 1)
        mask_BT = jnp.concatenate([prompts.mask[prompt_of], jnp.arange(tokens_BC.shape[1]) < count[:, None]], 1)
        seen = jnp.zeros((rows.shape[0], model_config.vocab_size), bool)
        seen = seen.at[jnp.arange(rows.shape[0])[:, None], tokens_BT].max(mask_BT)
    return DecodeBatch(
        cache=cache,
        rows=rows,
        last=last,
        live=live & state.unfinished[rows],
        thinking=state.thinking[rows],
        states={name: states[rows] for name, states in state.states.items()},
        seen=seen,
    )


def _prefill(params, tokens_RT, mask_RT, model_config, chunks, widths, attend_by, needed=None):
    """Returns the chunks, filled with keys and values of the tokens; the first chunk gets the prompts.

    widths: of the consecutive pieces into which the tokens are cut, one for each chunk. A piece fills a chunk's last
    columns. needed i32[]: how many of the first rows are filled, or a few more; None: all.
    """
    rows, columns = tokens_RT.shape
    if columns == 0:
        return chunks
    at_once = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * columns <= PREFILL_TOKENS))
    positions_RT = transformer.positions_of(mask_RT)

    def fill(i, chunks):
        def slice_rows(x):
            return jax.lax.dynamic_slice_in_dim(x, i * at_once, at_once)

        def write_rows(chunk, rows):
            return jax.lax.dynamic_update_slice_in_dim(chunk, rows, i * at_once, 2)

        tokens, positions, visible = slice_rows(tokens_RT), slice_rows(positions_RT), slice_rows(mask_RT)
        if attend_by == 'splash':
            visible = _mask_for_splash(visible, positions, widths[0])
        # [L, at_once, K, T, H]
        k, v = transformer.prefill(params, tokens, positions, visible, model_config, attend_by=attend_by)
        filled, column = [], 0
        for chunk, width in zip(chunks, widths, strict=True):
            new = kv_cache.prompt_chunk(k[..., column : column + width, :], v[..., column : column + width, :], chunk)
            filled.append(jax.tree.map(write_rows, chunk, new))
            column += width
        return tuple(filled)

    with jax.named_scope('prefill'):
        times = rows // at_once if needed is None else -(-needed // at_once)
        return jax.lax.fori_loop(0, times, fill, chunks)


def _mask_for_splash(mask, positions, prompt_end):
    """Returns the mask bool[R, T] in a form that splash takes: the mask itself if T is prompt_end, else a PackedMask.

    Splash needs the valid columns of a row side by side. A prompt's columns are: they end at column prompt_end. A row's
    own tokens begin after some padding, so the PackedMask makes them a completion of that prompt. positions: i32[R, T].
    """
    columns = mask.shape[1]
    if columns == prompt_end:
        return mask
    length = jnp.sum(mask[:, :prompt_end], -1, keepdims=True, dtype=jnp.int32)
    part = jnp.where(mask, (jnp.arange(columns) >= prompt_end).astype(jnp.int32), -1)
    return attention.PackedMask(part, positions, prompt_end - length, length, columns, prompt_end, columns - prompt_end)
