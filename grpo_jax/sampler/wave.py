"""The device side of a rollout: rows are written in a Book, and decoded in a Wave of slots.

A wave is opened with some rows of the book, decodes them in segments of many steps, grows in columns
and shrinks in rows as they finish. A row that leaves a wave unfinished is parked: its tokens stand in
the book, and a later wave prefills them. All functions work on one shard's rows and are pure; where
they run, and when, is the engine's business.

The last prompt token is the first decode input, so there is no special first-token path: own column j
of a row holds the j-th of [last prompt token, its tokens].
"""

from typing import NamedTuple, no_type_check

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.models import cache as kv_cache
from grpo_jax.models import transformer
from grpo_jax.sampler import draw_kernel
from grpo_jax.sampler import sampling as distribution
from grpo_jax.types import Prompts, Rollout

PREFILL_TOKENS = 8192  # that go through the model at once; bounds the activations of a prefill


@no_type_check
@struct.dataclass
class Book:
    """All N = P * G rows of a rollout."""

    prompts: Prompts
    keys: jax.Array  # key[N]; the token at position n uses fold_in(key, n)
    tokens: jax.Array  # i32[N, C]
    logprobs: jax.Array  # f32[N, C]
    version: jax.Array  # i32[N, C] step of the weights that sampled the token
    forced: jax.Array  # bool[N, C] tokens that were not sampled
    given: jax.Array  # i32[N, C] tokens to write whatever is sampled (replay); -1: sample
    count: jax.Array  # i32[N] tokens so far
    limit: jax.Array  # i32[N] count at which a row pauses
    done: jax.Array  # bool[N] has met a stop
    thinking: jax.Array  # bool[N] the end of thinking has not come yet
    states: dict  # of automata by name, i32[N]

    @property
    def group(self):
        """G."""
        return self.count.shape[0] // self.prompts.ids.shape[0]


@no_type_check
@struct.dataclass
class Wave:
    """B slots being decoded together."""

    cache: kv_cache.KVCache
    rows: jax.Array  # i32[B] the slot's row of the book
    last: jax.Array  # i32[B] token to feed next
    live: jax.Array  # bool[B]
    thinking: jax.Array  # bool[B]
    states: dict  # i32[B]
    seen: jax.Array | None  # bool[B, V] tokens of prompt and completion, for the repetition penalty


class Report(NamedTuple):
    """What the host reads after a segment, each i32[]."""

    live: jax.Array  # slots still decoding
    steps: jax.Array  # decode steps made
    waiting: jax.Array  # unfinished rows, in the wave or not
    longest: jax.Array  # tokens of the longest of them
    tokens: jax.Array  # tokens of all rows so far


def new_book(prompts, keys, given, limit, automata):
    """A Book of rows without tokens; given i32[N, C], limit i32[] or i32[N], automata names."""
    rows, columns = given.shape
    limit = jnp.broadcast_to(jnp.minimum(limit, columns), (rows,)).astype(jnp.int32)
    return Book(
        prompts=prompts,
        keys=keys,
        tokens=jnp.zeros((rows, columns), jnp.int32),
        logprobs=jnp.zeros((rows, columns)),
        version=jnp.zeros((rows, columns), jnp.int32),
        forced=jnp.zeros((rows, columns), bool),
        given=given,
        count=jnp.zeros(rows, jnp.int32),
        limit=limit,
        done=jnp.zeros(rows, bool),
        thinking=jnp.ones(rows, bool),
        states={name: jnp.zeros(rows, jnp.int32) for name in automata},
    )


def book_of(rollout, prompts, keys, limit, tables, sampling):
    """The Book that goes on where a Rollout paused; each unfinished row gets up to `limit` more tokens."""
    queries = rollout.prompt_mask.shape[1]
    mask = rollout.completion_mask
    book = new_book(prompts, keys, jnp.full(mask.shape, -1, jnp.int32), mask.shape[1], tables)
    count = jnp.sum(mask, -1, dtype=jnp.int32)
    book = book.replace(
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
        states = _advance(tables, states, token, valid)
        return (states, _still_thinking(tables, states, thinking, n, sampling)), None

    columns = (book.tokens.T, mask.T, jnp.arange(mask.shape[1]))
    (states, thinking), _ = jax.lax.scan(read, (book.states, book.thinking), columns)
    return book.replace(states=states, thinking=thinking)


def open_groups(params, book, index, c, sampling, *, prompts, columns, block, dtype, flat=False):
    """Wave of the `index`-th `prompts` prompts with all rows of their groups, none of which has begun."""

    def part(x):
        return jax.lax.dynamic_slice_in_dim(x, index * prompts, prompts)

    tokens, mask = part(book.prompts.tokens), part(book.prompts.mask)
    rows = (index * prompts * book.group + jnp.arange(prompts * book.group)).astype(jnp.int32)
    bank = _empty_bank(c, prompts, tokens.shape[1], block, dtype, flat)
    (bank,) = _prefill(params, tokens[:, :-1], mask[:, :-1], c, (bank,), (tokens.shape[1] - 1,))
    own = kv_cache.empty(c, rows.shape[0], columns, block=block, dtype=dtype, flat=flat)
    cache = kv_cache.KVCache(
        prompt=bank,
        prompt_start=bank.columns - jnp.sum(mask[:, :-1], -1, dtype=jnp.int32),
        chunks=(own,),
        start=jnp.zeros_like(rows),
        length=jnp.int32(0),
    )
    return _wave(cache, book, rows, jnp.ones_like(rows, bool), c, sampling)


def reopen(params, book, length, c, sampling, *, rows, columns, block, dtype, flat=False):
    """Wave of the `rows` longest unfinished rows, each with a copy of its prompt.

    Their tokens are prefilled right-aligned before own column `length`, which no row may exceed;
    columns is the tuple of the chunks' sizes.
    """
    length_of = jnp.where(_unfinished(book), book.count, -1)
    chosen = jnp.argsort(-length_of, stable=True)[:rows].astype(jnp.int32)
    live = length_of[chosen] >= 0
    prompts, mask = book.prompts.tokens[chosen // book.group], book.prompts.mask[chosen // book.group]
    start = length - jnp.where(live, book.count[chosen], 0)

    total = sum(-(-size // block) * block for size in columns)
    place = jnp.arange(total) - start[:, None]  # of a column in [last prompt token, tokens]
    fed = jnp.concatenate([prompts[:, -1:], book.tokens[chosen]], 1)
    own = jnp.take_along_axis(fed, jnp.clip(place, 0, fed.shape[1] - 1), 1)
    own_mask = (place >= 0) & (jnp.arange(total) < length)
    tokens, mask = jnp.concatenate([prompts[:, :-1], own], 1), jnp.concatenate([mask[:, :-1], own_mask], 1)

    empty = [_empty_bank(c, rows, prompts.shape[1], block, dtype, flat)]
    empty += [kv_cache.empty(c, rows, size, block=block, dtype=dtype, flat=flat) for size in columns]
    widths = (prompts.shape[1] - 1, *(chunk.columns for chunk in empty[1:]))
    bank, *chunks = _prefill(params, tokens, mask, c, tuple(empty), widths)
    prompt_start = bank.columns - jnp.sum(mask[:, : prompts.shape[1] - 1], -1, dtype=jnp.int32)
    cache = kv_cache.KVCache(
        prompt=bank, prompt_start=prompt_start, chunks=tuple(chunks), start=start, length=jnp.asarray(length, jnp.int32)
    )
    return _wave(cache, book, chosen, live, c, sampling)


def segment(params, wave, book, tables, version, c, sampling, *, steps):
    """(Wave, Book, Report) after up to `steps` decode steps, fewer when no slot is live or the last chunk is full."""
    queries = jnp.sum(book.prompts.mask, -1, dtype=jnp.int32)
    keys, limit, given = book.keys[wave.rows], book.limit[wave.rows], book.given[wave.rows]
    first = wave.cache.length - wave.cache.start
    queries = queries[wave.rows // book.group]

    def step(carry):
        wave, records, done, i = carry
        n = wave.cache.length - wave.cache.start
        hidden, cache = transformer.decode(params, wave.last, queries - 1 + n, wave.cache, c)
        token, logprob, forced = _choose(params, hidden, wave, n, keys, given, c, sampling)
        record = (token, logprob, forced, wave.live)
        records = jax.tree.map(lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, i, 0), records, record)
        wave, stopped = _after(wave.replace(cache=cache), token, n, tables, sampling)
        live = wave.live & ~stopped & (n + 1 < limit)
        return wave.replace(live=live), records, done | stopped, i + 1

    slots = wave.rows.shape[0]
    records = tuple(jnp.zeros((steps, slots), dtype) for dtype in (jnp.int32, jnp.float32, bool, bool))
    columns = sum(chunk.columns for chunk in wave.cache.chunks)

    def running(carry):
        return (carry[3] < steps) & (carry[0].cache.length < columns) & jnp.any(carry[0].live)

    wave, records, done, made = jax.lax.while_loop(running, step, (wave, records, jnp.zeros(slots, bool), jnp.int32(0)))
    book = _write(book, wave, first, records, done, version)
    return wave, book, Report(jnp.sum(wave.live, dtype=jnp.int32), made, *outlook(book))


def outlook(book):
    """(unfinished rows, tokens of the longest of them, tokens of all rows), each i32[]."""
    waiting = _unfinished(book)
    return (
        jnp.sum(waiting, dtype=jnp.int32),
        jnp.max(jnp.where(waiting, book.count, 0)),
        jnp.sum(book.count, dtype=jnp.int32),
    )


def choose_slots(wave, size):
    """(Wave of `size` slots, slot order i32[size]): live slots first, in their order; wave comes without chunks.

    They follow one by one (`take`), so that never two whole caches exist.
    """
    order = jnp.argsort(~wave.live, stable=True)[:size].astype(jnp.int32)
    small = (wave.rows, wave.last, wave.live, wave.thinking, wave.states, wave.seen, wave.cache.start)
    rows, last, live, thinking, states, seen, start = jax.tree.map(lambda x: x[order], small)
    fold = wave.rows.shape[0] // wave.cache.prompt_start.shape[0]
    cache = wave.cache.replace(start=start, prompt_start=wave.cache.prompt_start[order // fold])
    wave = wave.replace(cache=cache, rows=rows, last=last, live=live, thinking=thinking, states=states, seen=seen)
    return wave, order


def take(chunk, order, fold):
    """The Chunk of the slots in `order`; fold slots share a row of it."""
    return jax.tree.map(lambda x: x[:, :, order // fold], chunk)


def finish(book, pad_token):
    """The Rollout of a Book."""
    columns = book.tokens.shape[1]
    mask = jnp.arange(columns) < book.count[:, None]
    prompts = jax.tree.map(lambda x: jnp.repeat(x, book.group, 0), book.prompts)
    tokens = jnp.concatenate([prompts.tokens, jnp.where(mask, book.tokens, pad_token)], 1)
    return Rollout(
        tokens=tokens,
        prompt_mask=prompts.mask,
        completion_mask=mask,
        forced=book.forced,
        logprobs=book.logprobs,
        truncated=~book.done,
        version=book.version,
    )


def bank_columns(queries, block):
    """Columns of a prompt of `queries` tokens in the bank: all but its last token, in whole blocks."""
    width = _bank_block(queries, block)
    return max(-(-(queries - 1) // width), 1) * width


def _bank_block(queries, block):
    """Wider than own blocks, since a prompt is full from the start, but no wider than a short one needs."""
    return min(4 * block, max(-(-(queries - 1) // 8), 1) * 8)


def _empty_bank(c, rows, queries, block, dtype, flat):
    return kv_cache.empty(
        c, rows, bank_columns(queries, block), block=_bank_block(queries, block), dtype=dtype, flat=flat
    )


def _unfinished(book):
    return ~book.done & (book.count < book.limit)


def _wave(cache, book, rows, live, c, sampling):
    """Wave with what the book knows of the rows."""
    prompts, count, tokens, owners = book.prompts, book.count[rows], book.tokens[rows], rows // book.group
    newest = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    last = jnp.where(count == 0, prompts.tokens[owners, -1], newest)
    seen = None
    if sampling.repetition_penalty != 1:
        before = jnp.concatenate([prompts.tokens[owners], tokens], 1)
        valid = jnp.concatenate([prompts.mask[owners], jnp.arange(tokens.shape[1]) < count[:, None]], 1)
        seen = jnp.zeros((rows.shape[0], c.vocab_size), bool)
        seen = seen.at[jnp.arange(rows.shape[0])[:, None], before].max(valid)
    return Wave(
        cache=cache,
        rows=rows,
        last=last,
        live=live & _unfinished(book)[rows],
        thinking=book.thinking[rows],
        states={name: state[rows] for name, state in book.states.items()},
        seen=seen,
    )


def _prefill(params, tokens, mask, c, chunks, widths):
    """chunks filled with the keys and values of tokens [R, T], cut into consecutive pieces of the given widths."""
    rows, t = tokens.shape
    if t == 0:
        return chunks
    at_once = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * t <= PREFILL_TOKENS))
    positions = transformer.positions_of(mask)

    def fill(i, chunks):
        part = [jax.lax.dynamic_slice_in_dim(x, i * at_once, at_once) for x in (tokens, positions, mask)]
        k, v = transformer.prefill(params, *part, c)
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

    return jax.lax.fori_loop(0, rows // at_once, fill, chunks)


def _choose(params, hidden, wave, n, keys, given, c, sampling):
    """(token i32[B], logprob f32[B], forced bool[B]) of each slot at completion position n i32[B]."""
    told, forced = _told(wave, n, given, sampling)
    keys = jax.vmap(jax.random.fold_in)(keys, n)
    head = transformer.head_weights(params, c)
    if wave.cache.prompt.flat and draw_kernel.fits(head, sampling, keys):
        return *draw_kernel.draw(hidden, head, keys, told, sampling.temperature), forced
    logits = transformer.unembed(params, hidden, c)
    proposal = logits
    if wave.seen is not None:
        proposal = distribution.penalize(proposal, wave.seen, sampling.repetition_penalty)
    if sampling.min_tokens and sampling.stop_tokens:
        stops = jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(sampling.stop_tokens))
        proposal = jnp.where(stops & (n + 1 < sampling.min_tokens)[:, None], distribution.NEVER, proposal)
    token = distribution.draw(
        proposal,
        keys,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )
    token = jnp.where(told >= 0, told, token)
    return token, distribution.logprob(logits, token, sampling.temperature), forced


def _told(wave, n, given, sampling):
    """(tokens i32[B] that are given or forced at completion position n i32[B], or -1, which of them are forced)."""
    told = jnp.take_along_axis(given, n[:, None], 1, mode='clip')[:, 0]
    if not sampling.thinking_tokens:
        return told, jnp.zeros_like(wave.live)
    place = n - sampling.thinking_tokens
    forced = wave.thinking & (place >= 0) & (place < len(sampling.thinking_end))
    ending = jnp.where(forced, jnp.asarray(sampling.thinking_end)[jnp.maximum(place, 0)], -1)
    return jnp.where(told >= 0, told, ending), forced


def _after(wave, token, n, tables, sampling):
    """(Wave that has seen the token, stopped bool[B])."""
    states = _advance(tables, wave.states, token, wave.live)
    stopped = jnp.isin(token, jnp.asarray(sampling.stop_tokens, jnp.int32))
    if 'stop' in tables:
        stopped |= _met(tables, states, 'stop')
    seen = wave.seen
    if seen is not None:
        seen = seen | (jnp.arange(seen.shape[1]) == token[:, None])
    thinking = _still_thinking(tables, states, wave.thinking, n, sampling)
    wave = wave.replace(last=token, states=states, thinking=thinking, seen=seen)
    return wave, stopped & wave.live & (n + 1 >= sampling.min_tokens)


def _advance(tables, states, token, valid):
    return {name: jnp.where(valid, tables[name][state, token], state) for name, state in states.items()}


def _met(tables, states, name):
    return states[name] == tables[name].shape[0] - 1


def _still_thinking(tables, states, thinking, n, sampling):
    """Thinking ends where its end was sampled before the budget was used up."""
    if not sampling.thinking_tokens:
        return thinking
    return thinking & ~(_met(tables, states, 'thinking') & (n < sampling.thinking_tokens))


def _write(book, wave, first, records, done, version):
    """The book with a segment's records, each [steps, B], of slots that began at position first i32[B]."""
    tokens, logprobs, forced, valid = (x.T for x in records)
    columns = first[:, None] + jnp.arange(tokens.shape[1])
    at = (wave.rows[:, None], jnp.where(valid, columns, book.tokens.shape[1]))  # beyond the end: dropped

    def put(array, values):
        return array.at[at].set(values, mode='drop')

    return book.replace(
        tokens=put(book.tokens, tokens),
        logprobs=put(book.logprobs, logprobs),
        forced=put(book.forced, forced),
        version=put(book.version, version),
        count=book.count.at[wave.rows].add(jnp.sum(valid, -1, dtype=jnp.int32)),
        done=book.done.at[wave.rows].set(book.done[wave.rows] | done),
        thinking=book.thinking.at[wave.rows].set(wave.thinking),
        states={name: state.at[wave.rows].set(wave.states[name]) for name, state in book.states.items()},
    )
