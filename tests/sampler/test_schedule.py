"""The schedule: what the engine may request is known beforehand, and fits its budget. No arrays, no compiler."""

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

from grpo_jax.errors import BadInput
from grpo_jax.sampler import schedule
from grpo_jax.sampler.engine import Engine
from grpo_jax.types import Prompts, Rollout

PROMPTS = Prompts(None, None, None)  # which nothing reads


class FakePrograms:
    """Decodes rows of given lengths on the host as the real programs do, and records what is requested.

    A state is i64[shards, rows] of tokens so far; a batch is a dict. lengths i64[shards, rows] are those of the rows
    when they end.
    """

    hash, weight_bytes, sides = '', 1, None

    def __init__(self, sizes, lengths):
        self.sizes, self.lengths, self.requested = sizes, np.asarray(lengths), []
        self.cache_bytes = 0  # the most at any time

    def send(self, params):
        return params

    def weights(self, params):
        self.requested.append(schedule.WEIGHTS)

    def inspect(self, weights, params):
        return None

    def new_state(self, prompts, seed, step, given, limit):
        self.requested.append(schedule.STATE)
        return np.zeros_like(self.lengths)

    def resume_state(self, rollout, prompts, seed, limit):
        raise AssertionError('nothing is paused')

    def count_remaining(self, state):
        self.requested.append(schedule.REMAINING)
        return self._remaining(state)

    def _remaining(self, state):
        unfinished = state < self.lengths
        return unfinished.sum(1).max(), np.where(unfinished, state, 0).max(), state.sum()

    def open_batch(self, kind, weights, state, number, size):
        self.requested.append(self.sizes.key(kind, size))
        if kind == 'open':
            rows = np.arange(size.rows) + number * size.rows
            return self._batch(state, np.tile(rows, (len(state), 1)), 0, size)
        length_of = np.where(state < self.lengths, state, -1)
        assert length_of.max() <= number
        return self._batch(state, np.argsort(-length_of, 1, kind='stable')[:, : size.rows], number, size)

    def _batch(self, state, rows, length, size):
        unfinished = np.take_along_axis(state < self.lengths, rows, 1)
        return {'rows': rows, 'live': unfinished, 'length': np.full(len(state), length), 'size': size}

    def decode_segment(self, weights, batch, state, step, size):
        self.requested.append(self.sizes.key('decode', size))
        assert batch['size'] == size and batch['rows'].shape[1] == size.rows
        self.cache_bytes = max(self.cache_bytes, self.sizes.bytes(*size))
        state, steps = state.copy(), np.zeros(len(state), int)
        for shard, (rows, live) in enumerate(zip(batch['rows'], batch['live'], strict=True)):
            columns = sum(self.sizes.chunks[: size.chunks]) - batch['length'][shard]
            while steps[shard] < min(self.sizes.segment, columns) and live.any():
                state[shard, rows[live]] += 1
                live &= state[shard, rows] < self.lengths[shard, rows]
                steps[shard] += 1
        batch['length'] = batch['length'] + steps
        return batch, state, (batch['live'].sum(1).max(), steps.max(), *self._remaining(state))

    def add_chunk(self, batch, size):
        self.requested.append(self.sizes.add_key(size))
        assert size == batch['size']._replace(chunks=batch['size'].chunks + 1)
        return batch | {'size': size}

    def shrink(self, batch, size, smaller):
        self.requested += self.sizes.shrink_keys(size, smaller)
        order = np.argsort(~batch['live'], 1, kind='stable')[:, : smaller.rows]
        rows, live = (np.take_along_axis(batch[name], order, 1) for name in ('rows', 'live'))
        copied = self.sizes.copy_bytes(smaller.rows, size.chunks)
        self.cache_bytes = max(self.cache_bytes, self.sizes.bytes(*size) + copied)
        return batch | {'rows': rows, 'live': live, 'size': smaller}

    def read_rows(self, state):
        raise AssertionError('nobody listens')

    def finish(self, state):
        self.requested.append(schedule.FINISH)
        return Rollout(state, *[None] * 6)


@strategies.composite
def workloads(draw):
    """(Schedule, lengths i64[shards, rows])."""
    prompts, group, tokens = (draw(strategies.integers(1, most)) for most in (6, 6, 70))
    sizes = schedule.make_schedule(
        (prompts, group, tokens),
        block=draw(strategies.sampled_from((4, 8, 16))),
        segment=draw(strategies.integers(1, 20)),
        halvings=draw(strategies.sampled_from((3, 10))),
        prompt_columns=draw(strategies.integers(1, 5)) * 8,
        column_bytes=10,
        budget=draw(strategies.one_of(strategies.just(0), strategies.integers(100, 30_000))),
    )
    shape = draw(strategies.integers(1, 3)), prompts * group
    length = strategies.integers(0, tokens)
    return sizes, [draw(strategies.lists(length, min_size=shape[1], max_size=shape[1])) for _ in range(shape[0])]


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(workload=workloads())
def test_every_program_that_an_engine_asks_for_is_reachable(workload):
    sizes, lengths = workload
    try:
        reachable = schedule.reachable_programs(sizes)
    except BadInput:
        hypothesis.assume(False)
    programs = FakePrograms(sizes, lengths)
    engine = Engine(sizes, programs, shards=len(lengths))
    rollout, stats = engine.sample(None, PROMPTS, None, 0)
    np.testing.assert_array_equal(rollout.tokens, lengths)
    assert set(programs.requested) <= set(reachable) and len(reachable) == len(set(reachable))
    assert set(schedule.largest_programs(sizes)) <= set(reachable)
    assert stats.tokens == np.sum(lengths) and stats.peak_bytes == programs.cache_bytes
    assert stats.peak_bytes <= (sizes.budget or np.inf)


def test_programs_of_a_small_schedule():
    # 1 prompt x 4 rows of 8 columns in one chunk; halved once, since the budget is unlimited
    sizes = schedule.make_schedule(
        (1, 4, 8), block=4, segment=2, halvings=1, prompt_columns=8, column_bytes=1, budget=0
    )
    assert (sizes.chunks, sizes.rows) == ((8,), (2,))
    assert [str(key) for key in schedule.reachable_programs(sizes)] == [
        'weights',
        'state',
        'remaining',
        'open 4 rows of 1 prompts x 8',
        'decode 4 rows of 1 prompts x 8',
        'choose 2 of 4 rows of 1 prompts',
        'gather 2 of 4 rows of 1 prompts',
        'gather 2 of 4 rows x 8',
        'decode 2 rows of 2 prompts x 8',
        'finish',
    ]
    assert set(schedule.largest_programs(sizes)) == set(schedule.reachable_programs(sizes)) - {schedule.REMAINING}


def test_a_budget_makes_columns_grow_and_rows_wait():
    # all 4 rows at full length: 4 x 32 + 8 of the prompt = 136 columns, and 4 fit in 2 blocks: 4 x 8 + 8 + 2 x 8 = 56
    sizes = schedule.make_schedule(
        (1, 4, 32), block=4, segment=2, halvings=1, prompt_columns=8, column_bytes=1, budget=100
    )
    assert (sizes.chunks, sizes.rows) == ((8, 8, 16), (2,))
    first = sizes.fresh_batch()
    assert first == (1, 4, 1) and sizes.admitting_batch(first) == first
    # 4 x 16 + 8 and a copy of 2 x 8: 88 fit; with the last chunk 2 rows, each with its prompt: 2 x (32 + 8) = 80
    assert sizes.admitting_batch(first._replace(chunks=2)) == (2, 2, 2)
    assert sizes.resumed_batch(unfinished=2, longest=16) == (2, 2, 3)
    assert 'resume 2 rows of 2 prompts x 8+8+16' in map(str, schedule.reachable_programs(sizes))
    with pytest.raises(BadInput, match=r'rollout\.cache_gib'):
        schedule.reachable_programs(sizes._replace(budget=30))


def test_rows_that_go_on_never_outgrow_the_budget_with_their_second_chunk():
    # 2 + 2 prompts x 8 rows: all take 4 x 96 + 32 x 16 columns in both chunks; 18 rows, each with its prompt, would
    # take 18 x (96 + 8) = 1872 in one chunk and 18 x (96 + 16) = 2016 in two, each beside a copy of 16 x 96 = 1536
    sizes = schedule.make_schedule(
        (4, 8, 8), block=8, segment=2, halvings=1, prompt_columns=96, column_bytes=1, budget=3500
    )
    carrying = schedule.let_carry(sizes, 2)
    assert carrying.carried == 2 and 18 not in carrying.rows and 16 in carrying.rows
    for size in [carrying.whole_batch._replace(chunks=1), *carrying.smaller_batches(carrying.whole_batch)]:
        assert carrying.admitting_batch(size._replace(chunks=1)).rows == size.rows, 'no row is preempted'
    assert {key.rows for key in schedule.reachable_programs(carrying) if key.kind == 'decode'} == {32, 16}
