"""The host side of a rollout: which rows decode together, in which shapes, and when.

One wave grows and shrinks: all its rows start together in few columns; a chunk of columns is added
when the last is full, and rows are halved when no more than half are alive, so that memory and work
follow the survivors. When the cache would outgrow its budget, rows are parked (their tokens stay in the
book) and a later wave prefills them. Rows that wait for memory form further waves. The host looks once
a segment. Every decision is a function of numbers that all shards share, so that all processes agree.
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import BadInput


class Plan(NamedTuple):
    """Sizes of one shard's rollout; the schedule is a function of it and of the samples' lengths."""

    prompts: int  # of the step
    group: int
    chunks: tuple[int, ...]  # columns of the chunks, in order; together at least max_tokens
    rows: tuple[int, ...]  # that a wave may have after shrinking, falling
    segment: int  # steps a host visit
    bank_columns: int  # of a prompt
    column_bytes: int  # keys and values of one column of one row, all layers
    budget: int  # bytes of cache; 0: unlimited

    def bytes(self, banks, rows, chunks):
        """Bytes of a cache of that many prompts and rows in the first `chunks` chunks."""
        return self.column_bytes * (banks * self.bank_columns + rows * sum(self.chunks[:chunks]))

    def peak(self, banks, rows, chunks):
        """Those bytes and what shrinking adds for a moment: the next smaller copy of one piece."""
        fewer = max((n for n in self.rows if n < rows), default=0)
        return self.bytes(banks, rows, chunks) + self.column_bytes * fewer * max(
            *self.chunks[:chunks], self.bank_columns
        )

    def fits(self, banks, rows, chunks):
        """Whether that cache and every shrinking of it stay within the budget."""
        return not self.budget or self.peak(banks, rows, chunks) <= self.budget

    def wave_prompts(self):
        """Prompts of a fresh wave: the most, dividing all, whose groups fit in one chunk."""
        fitting = [n for n in range(1, self.prompts + 1) if self.prompts % n == 0 and self.fits(n, n * self.group, 1)]
        if not fitting or not self.fits(1, 1, len(self.chunks)):
            least = max(self.peak(1, self.group, 1), self.peak(1, 1, len(self.chunks)))
            raise BadInput(
                'rollout.cache_gib',
                self.budget / 2**30,
                f'holds not even one group; at least {least / 2**30:.3g} are needed',
            )
        return fitting[-1]

    def reopened_rows(self, waiting, chunks):
        """Rows of a wave of parked rows that begins with that many chunks: as many as wait, or as fit."""
        fitting = [n for n in (self.prompts * self.group, *self.rows) if self.fits(n, n, chunks)]
        return min((n for n in fitting if n >= waiting), default=fitting[0])

    def smaller(self, rows, live, chunks):
        """The fewest rows that hold the live ones; rows when no smaller wave fits.

        A smaller wave keeps a copy of the prompt for each row, which with long prompts can be more than it saves.
        """
        sizes = [n for n in self.rows if live <= n < rows and self.fits(n, n, chunks)]
        return sizes[-1] if sizes else rows

    def room(self, rows, chunks):
        """The most rows, fewer than `rows`, that fit with that many chunks."""
        return next(n for n in self.rows if n < rows and self.fits(n, n, chunks))


def plan(*, prompts, group, max_tokens, block, segment, halvings, bank_columns, column_bytes, budget):
    """Plan of a shard: rows are halved, and where not all rows fit at full length, columns grow by doubling.

    The first chunk then has 2 blocks: with one, XLA copies it. Rows are halved `halvings` times, or more often
    where a full-length cache would not fit the budget.
    """
    columns, total = -(-max_tokens // block) * block, prompts * group
    whole = Plan(prompts, group, (columns,), (), segment, bank_columns, column_bytes, budget)
    chunks, rows, size = [columns], [], total
    if not whole.fits(prompts, total, 1):
        chunks = [min(2 * block, columns)]
        while sum(chunks) < columns:
            chunks.append(min(sum(chunks), columns - sum(chunks)))
    # a rollout of a segment or two ends before shrinking could pay for the programs
    while size > 1 and ((size * 2**halvings > total and max_tokens > 2 * segment) or not whole.fits(size, size, 1)):
        size = -(-size // 2)
        rows.append(size)
    return whole._replace(chunks=tuple(chunks), rows=tuple(rows))


class Stats(NamedTuple):
    """What a rollout cost."""

    steps: int  # decode steps, one after another
    slot_steps: int  # sum over steps of the slots decoded (of one shard, times shards)
    tokens: int
    peak_bytes: int  # of cache, the most at any time, per shard
    waves: int
    parked: int  # times that a row left a wave unfinished
    bytes_read: int  # weights and live cache over all steps, per device: the least that decoding must read
    seconds: float

    @property
    def utilisation(self):
        """Share of decoded slots that yielded a token."""
        return self.tokens / max(self.slot_steps, 1)


class Engine:
    """Samples rollouts in waves. `programs` has the compiled pieces (see distributed.placement)."""

    def __init__(self, plan_, programs, shards):
        self.plan, self.programs, self._shards = plan_, programs, shards
        self.stats = None
        programs.plan = plan_

    @property
    def device_kind(self):
        """The devices' name."""
        return self.programs.device_kind

    @property
    def hash(self):
        """Of all programs: what two runs sampled differently shows there."""
        return self.programs.hash

    def __call__(self, params, prompts, key, step, *, given=None, limit=None, finished=None, progress=None):
        """A Rollout of all prompts: rows of the mesh, group_size a prompt.

        key and step choose the noise (see sampler.row_keys). given i32[B, C] writes those tokens instead
        of sampling (-1: sample). limit, an int or i32[B], pauses rows after that many tokens; `resume` goes on.
        finished(row, tokens, truncated) is called while others still decode, once for every row;
        progress(tokens, live slots, slots) at every host visit.
        """
        book = self.programs.new_book(prompts, key, step, given, limit)
        return self._run(self.programs.weights(params), book, step, 0, finished, progress)

    def resume(self, params, rollout, prompts, key, step, *, limit=None, finished=None, progress=None):
        """The Rollout continued where its truncated rows stand, with these weights, up to `limit` more tokens.

        Noise is that of the step in which a row began (version[:, 0]), so a row that pauses has the tokens
        it would have had without, if the weights are the same. New tokens carry version `step`.
        """
        book = self.programs.book_of(rollout, prompts, key, limit)
        return self._run(self.programs.weights(params), book, step, self.plan.prompts, finished, progress)

    def replay(self, params, rollout, prompts, key):
        """The Rollout with logprobs computed anew by the same decode steps, its tokens given.

        The oracle of the sampler: with the same weights the logprobs are bit-equal, since the same programs
        run on the same shapes.
        """
        tokens = rollout.tokens[:, rollout.prompt_mask.shape[1] :]
        given = jnp.where(rollout.completion_mask, tokens, -1)
        return self(params, prompts, key, rollout.version[0, 0], given=given)

    def visit_all(self):
        """Calls every program that a rollout can reach, once for each size; for compiling beforehand."""
        plan_, programs = self.plan, self.programs
        params, prompts, key = programs.inputs()
        weights, book, seen = programs.weights(params), programs.new_book(prompts, key, 0, None, None), set()
        programs.outlook(book)

        def visit(wave, banks, rows, chunks):
            if (banks, rows, chunks) in seen:
                return
            seen.add((banks, rows, chunks))
            programs.segment(weights, wave, book, 0)
            if chunks < len(plan_.chunks):
                if plan_.fits(banks, rows, chunks + 1):
                    visit(programs.grow(wave, chunks), banks, rows, chunks + 1)
                else:
                    size = plan_.room(rows, chunks + 1)
                    visit(programs.grow(programs.shrink(wave, size), chunks), size, size, chunks + 1)
            for size in plan_.rows:
                if size < rows and plan_.fits(size, size, chunks):
                    visit(programs.shrink(wave, size), size, size, chunks)

        batch = plan_.wave_prompts()
        visit(programs.open_groups(weights, book, 0, batch), batch, batch * plan_.group, 1)
        if not plan_.fits(plan_.prompts, plan_.prompts * plan_.group, len(plan_.chunks)):
            for chunks in range(1, len(plan_.chunks) + 1):
                for rows in (plan_.prompts * plan_.group, *plan_.rows):
                    if plan_.fits(rows, rows, chunks):
                        visit(programs.reopen(weights, book, 0, rows, chunks), rows, rows, chunks)
        programs.finish(book)

    def visit_largest(self):
        """Calls the programs that need most memory: (weights, Book, [Wave that each decode program works on]).

        They decode a fresh wave in all columns that it may reach, the same with as many rows as each further chunk
        allows, or once halved, and, where rows can be parked, the largest wave of those in all columns.
        """
        plan_, programs, waves = self.plan, self.programs, {}

        def decode(wave):
            waves[str(jax.tree.map(jnp.shape, wave))] = wave  # two ways may lead to the same
            programs.segment(weights, wave, book, 0)

        params, prompts, key = programs.inputs()
        weights, book = programs.weights(params), programs.new_book(prompts, key, 0, None, None)
        banks, chunks = plan_.wave_prompts(), 1
        rows = banks * plan_.group
        wave = programs.open_groups(weights, book, 0, banks)
        while chunks < len(plan_.chunks):
            if not plan_.fits(banks, rows, chunks + 1):
                decode(wave)
                banks = rows = plan_.room(rows, chunks + 1)
                wave = programs.shrink(wave, rows)
            wave, chunks = programs.grow(wave, chunks), chunks + 1
        decode(wave)
        size = next((n for n in plan_.rows if n < rows and plan_.fits(n, n, chunks)), None)
        if size:
            decode(programs.shrink(wave, size))
        every = plan_.prompts * plan_.group
        if not plan_.fits(plan_.prompts, every, chunks):
            most = next(n for n in (every, *plan_.rows) if plan_.fits(n, n, chunks))
            decode(programs.reopen(weights, book, 0, most, chunks))
        programs.finish(book)
        return weights, book, list(waves.values())

    def _run(self, weights, book, step, opened, finished, progress):
        plan_, programs, began = self.plan, self.programs, time.monotonic()
        handed = False
        counts = dict(steps=0, slot_steps=0, peak_bytes=0, waves=0, parked=0, bytes_read=0)
        batch, weight_bytes = plan_.wave_prompts(), programs.weight_bytes()
        waiting, longest, tokens = _on_host(programs.outlook(book))
        while waiting:
            if opened < plan_.prompts:
                banks, rows, chunks, length = batch, batch * plan_.group, 1, 0
                wave = programs.open_groups(weights, book, opened // batch, batch)
                opened += batch
            else:
                length = longest
                chunks = next(n for n in range(1, len(plan_.chunks) + 1) if sum(plan_.chunks[:n]) > length)
                rows = banks = plan_.reopened_rows(waiting, chunks)
                wave = programs.reopen(weights, book, length, rows, chunks)
            counts['waves'] += 1
            live = begun = rows
            while live:
                if length == sum(plan_.chunks[:chunks]):
                    wave, banks, rows = self._make_room(wave, banks, rows, chunks, live, counts)
                    wave, chunks = programs.grow(wave, chunks), chunks + 1
                self._held(counts, plan_.bytes(banks, rows, chunks))
                wave, book, report = programs.segment(weights, wave, book, step)
                live, made, waiting, longest, tokens = _on_host(report)
                counts['steps'] += made
                counts['slot_steps'] += made * rows * self._shards
                columns = banks * plan_.bank_columns + rows * (length + made // 2)
                counts['bytes_read'] += made * (weight_bytes + plan_.column_bytes * columns)
                length += made
                if finished:
                    handed = _hand_on(programs.ended_rows(book), handed, finished)
                if progress:
                    progress(tokens, live, rows)
                # the last few rows of all waves go on together; so do those that are short of columns because
                # they began beside a longer row
                if live and ((live * 8 <= begun and waiting > live) or length == sum(plan_.chunks)):
                    counts['parked'] += live
                    break
                if live:
                    size = plan_.smaller(rows, live, chunks)
                    wave, banks, rows = self._shrink(wave, banks, rows, chunks, size, counts)
        self.stats = Stats(tokens=tokens, seconds=time.monotonic() - began, **counts)
        return programs.finish(book)

    def _shrink(self, wave, banks, rows, chunks, size, counts):
        """(wave, banks, rows) with `size` rows."""
        if size == rows:
            return wave, banks, rows
        plan_ = self.plan
        copied = plan_.column_bytes * size * max(*plan_.chunks[:chunks], plan_.bank_columns)
        self._held(counts, plan_.bytes(banks, rows, chunks) + copied)
        return self.programs.shrink(wave, size), size, size

    def _make_room(self, wave, banks, rows, chunks, live, counts):
        """(wave, banks, rows) so that one more chunk fits; rows beyond that are parked."""
        plan_ = self.plan
        if plan_.fits(banks, rows, chunks + 1):
            return wave, banks, rows
        size = plan_.room(rows, chunks + 1)
        counts['parked'] += max(live - size, 0)
        return self._shrink(wave, banks, rows, chunks, size, counts)

    def _held(self, counts, size):
        counts['peak_bytes'] = max(counts['peak_bytes'], size)


def _on_host(numbers):
    return [int(x) for x in jax.device_get(tuple(numbers))]


def _hand_on(ended, handed, finished):
    """bool[B] of rows handed on so far, after calling finished(row, tokens, truncated) for those that are new."""
    rows, tokens, count, done, truncated = ended
    for i in np.flatnonzero(done & ~handed):
        finished(int(rows[i]), tokens[i, : count[i]], bool(truncated[i]))
    return handed | done
