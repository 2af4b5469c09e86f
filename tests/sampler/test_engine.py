"""The engine against a sampler without cache, batches or mesh: schedules must not change a rollout."""

import dataclasses
import functools
import logging

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import errors, sampler
from grpo_jax.models import lora, transformer
from grpo_jax.models.attention import Rule, attend
from grpo_jax.sampler import programs, schedule, state, stops
from grpo_jax.sampler import sampling as distribution
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import Prompts, map_table

P, G, Q, C = 4, 4, 5, 24
PAD = 0
STOPS = tuple(range(1, 7))
COLUMN = 2 * 2 * 2 * 8 * 4  # bytes of keys and values, 2 layers, 2 heads of 8 float32
SAMPLINGS = dict(
    endless=sampler.Sampling(1.0, C, (), PAD),
    plain=sampler.Sampling(1.0, C, STOPS, PAD),
    cut=sampler.Sampling(0.7, C, STOPS, PAD, top_p=0.8, top_k=20, min_p=0.01),
    greedy=sampler.Sampling(0.0, C, STOPS, PAD),
    penalized=sampler.Sampling(1.0, C, STOPS, PAD, repetition_penalty=1.5, min_tokens=6),
)
# name: (sampling, mesh, segment, budget in columns)
ENGINES = dict(
    endless=('endless', (1, 1, 1), 3, 0),
    preempting=('plain', (1, 1, 1), 3, 200),
    cut=('cut', (2, 1, 1), 8, 0),
    tensor=('penalized', (1, 2, 2), 8, 0),
    greedy=('greedy', (1, 1, 1), 8, 0),
    penalized=('penalized', (2, 1, 1), 8, 100),
)


def build(c, sampling, mesh, segment, budget, tables=None, prompts=P, block=4, **options):
    mesh = meshes.make(dict(zip(('data', 'fsdp', 'tensor'), mesh, strict=True)))
    sampling = sampling._replace(cache_bytes=budget * COLUMN, **options)
    shapes = batches.Shapes(prompts, G, Q, C)
    return make_sampler(c, mesh, shapes, sampling, tables or {}, block=block, segment=segment)


@functools.cache
def engine(c, name):
    sampling, mesh, segment, budget = ENGINES[name]
    return build(c, SAMPLINGS[sampling], mesh, segment, budget)


@pytest.fixture(scope='module')
def sample(tiny):
    """sample(engine name or engine, prompts, ...) -> Rollout on the host; by method='sample' with its Stats."""
    c, params = tiny

    @functools.cache
    def on(mesh):
        return jax.device_put(params, specs.params(transformer.param_table(c), mesh))

    def call(built, prompts=None, *, method='__call__', seed=0, step=0, rollout=None, **options):
        built = engine(c, built) if isinstance(built, str) else built
        mesh = built.programs.spec.mesh
        rows = specs.over_rows(mesh)
        prompts = jax.device_put(make_prompts() if prompts is None else prompts, rows)
        before = () if rollout is None else (jax.device_put(rollout, rows),)
        steps = () if method == 'replay' else (step,)
        sampled = jax.device_get(
            getattr(built, method)(on(mesh), *before, prompts, jax.random.key(seed), *steps, **options)
        )
        return sampled[0] if method == 'go_on' else sampled

    return call


def make_prompts(lengths=(5, 1, 3, 4), ids=(7, 0, 3, 900), noise=0):
    mask = np.arange(Q) >= Q - np.asarray(lengths)[:, None]
    tokens = np.random.default_rng(noise).integers(0, 64, mask.shape)
    return Prompts(np.where(mask, tokens, PAD).astype(np.int32), mask, np.asarray(ids, np.int32))


def completions(rollout):
    """Each row's tokens as a list."""
    return [row[Q:][mask].tolist() for row, mask in zip(rollout.tokens, rollout.completion_mask, strict=True)]


@functools.partial(jax.jit, static_argnums=(6, 7))
def reference(params, prompts, mask, ids, seed_step, limits, c, sampling):
    """(tokens, logprobs, count, stopped) of each row alone, by a whole forward pass for every token."""
    keys = sampler.row_keys(*seed_step, ids, G)

    def row(inputs):
        prompt, mask, key, limit = inputs
        vocabulary, columns = jnp.arange(c.vocab_size), jnp.arange(Q + C)

        def step(carry):
            text, logprobs, n, _ = carry
            valid = jnp.pad(mask, (0, C)) | (columns >= Q) & (columns < Q + n)
            hidden = transformer.forward(params, text[None], transformer.positions_of(valid[None]), valid[None], c)
            logits = proposal = transformer.unembed(params, hidden[0, Q + n - 1], c)
            if sampling.repetition_penalty != 1:
                seen = jnp.any((text == vocabulary[:, None]) & valid, 1)
                penalty = jnp.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
                proposal = jnp.where(seen, logits * penalty, logits)
            if sampling.stop_tokens:
                is_stop = jnp.any(vocabulary[:, None] == jnp.asarray(sampling.stop_tokens), 1)
                proposal = jnp.where(is_stop & (n < sampling.min_tokens - 1), -jnp.inf, proposal)
            token = distribution.draw(
                proposal[None],
                jax.random.fold_in(key, n)[None],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
            )
            logprob = distribution.logprob(logits[None], token, sampling.temperature)[0]
            stop = jnp.any(token[0] == jnp.asarray(sampling.stop_tokens, jnp.int32))
            return text.at[Q + n].set(token[0]), logprobs.at[n].set(logprob), n + 1, stop

        start = (jnp.pad(prompt, (0, C)), jnp.zeros(C), jnp.int32(0), jnp.bool(False))
        text, *rest = jax.lax.while_loop(lambda carry: ~carry[3] & (carry[2] < limit), step, start)
        return text[Q:], *rest

    return jax.lax.map(row, (jnp.repeat(prompts, G, 0), jnp.repeat(mask, G, 0), keys, limits))


def assert_equals_reference(tiny, rollout, prompts, sampling, *, seed=0, step=0, limit=None):
    c, params = tiny
    limits = np.broadcast_to(np.int32(C if limit is None else limit), P * G)
    seed_step = jax.random.key(seed), jnp.int32(step)
    tokens, logprobs, count, stopped = jax.device_get(
        reference(params, prompts.tokens, prompts.mask, prompts.ids, seed_step, limits, c, sampling)
    )
    mask = np.arange(C) < count[:, None]
    np.testing.assert_array_equal(rollout.completion_mask, mask)
    np.testing.assert_array_equal(rollout.tokens[:, Q:], np.where(mask, tokens, PAD))
    np.testing.assert_array_equal(rollout.tokens[:, :Q], np.repeat(prompts.tokens, G, 0))
    np.testing.assert_array_equal(rollout.prompt_mask, np.repeat(prompts.mask, G, 0))
    np.testing.assert_allclose(rollout.logprobs, logprobs, atol=2e-5)
    np.testing.assert_array_equal(rollout.truncated, ~stopped)
    np.testing.assert_array_equal(rollout.version, np.where(mask, step, 0))
    assert not rollout.forced.any()


LIMITS = strategies.one_of(
    strategies.none(),
    strategies.just(1),
    strategies.integers(1, C),
    strategies.lists(strategies.integers(1, C), min_size=P * G, max_size=P * G),
)


WORKLOADS = dict(
    name=strategies.sampled_from(sorted(ENGINES)),
    limit=LIMITS,
    lengths=strategies.lists(strategies.integers(1, Q), min_size=P, max_size=P),
    ids=strategies.lists(strategies.integers(0, 2**31 - 1), min_size=P, max_size=P),
    step=strategies.integers(0, 10**6),
    seed=strategies.integers(0, 2**32 - 1),
)


def test_any_workload_gives_the_rollout_of_rows_sampled_alone(long, tiny, sample):
    @hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
    @hypothesis.given(**WORKLOADS)
    def check(name, limit, lengths, ids, step, seed):
        prompts = make_prompts(lengths, ids, noise=seed)
        limit = limit if limit is None else np.asarray(limit, np.int32)
        rollout, stats = sample(name, prompts, method='sample', seed=seed, step=step, limit=limit)
        assert_equals_reference(tiny, rollout, prompts, SAMPLINGS[ENGINES[name][0]], seed=seed, step=step, limit=limit)
        budget = ENGINES[name][3] * COLUMN
        assert stats.peak_bytes <= (budget or np.inf)
        assert stats.tokens == rollout.completion_mask.sum()

    check()


@pytest.mark.parametrize(('name', 'seed'), [('preempting', 1), ('penalized', 2)])
def test_a_budget_preempts_rows_and_changes_no_token(request, tiny, sample, name, seed):
    if name == 'penalized':
        request.getfixturevalue('long')
    sampling, _, _, budget = ENGINES[name]
    rollout, stats = sample(name, make_prompts(), method='sample', seed=seed)
    assert_equals_reference(tiny, rollout, make_prompts(), SAMPLINGS[sampling], seed=seed)
    assert stats.preempted > 0 and stats.decode_batches > 1 and 0 < stats.peak_bytes <= budget * COLUMN


def test_without_a_budget_one_batch_has_all_rows(sample):
    rollout, stats = sample('endless', method='sample')
    assert (stats.decode_batches, stats.preempted, stats.steps, stats.tokens) == (1, 0, C, P * G * C)
    assert rollout.completion_mask.all() and rollout.truncated.all() and stats.utilisation == 1
    # the prompt cache of 8 columns a prompt, and all rows at full length
    assert stats.peak_bytes == (P * 8 + P * G * C) * COLUMN


def test_batches_shrink_as_rows_end(sample):
    _, stats = sample('endless', method='sample', limit=np.where(np.arange(P * G) == 5, C, 3))
    assert stats.tokens == 3 * 15 + C and stats.steps == C
    assert stats.slot_steps == 3 * 16 + (C - 3)  # on CPUs a batch shrinks to one row


def test_ways_of_shrinking_to_one_size_do_not_share_programs(tiny, sample):
    built, only = build(tiny[0], SAMPLINGS['endless'], (1, 1, 1), 3, 0), np.arange(P * G)
    # 16 rows to 2 at once, whose prompts lie once a group, then 16 to 4 to 2, where each row has its own copy
    for survivors in [(1, 14)], [(1, 6, 9, 14), (6, 14)]:
        limit = 3 + sum(4 * np.isin(only, rows) for rows in survivors)
        assert_equals_reference(tiny, sample(built, limit=limit), make_prompts(), SAMPLINGS['endless'], limit=limit)


def test_a_budget_below_one_group_is_refused_by_name(tiny):
    with pytest.raises(errors.BadInput, match=r'rollout\.cache_gib') as refused:
        build(tiny[0], SAMPLINGS['plain'], (1, 1, 1), 3, 20)
    assert 'not even one group' in str(refused.value)


def test_the_least_budget_that_the_refusal_names_is_enough(tiny):
    # a group of 4 rows in 8 columns and its prompt's 8, and 2 rows of 8 that halving copies
    least = 4 * 8 + 8 + 2 * 8
    with pytest.raises(errors.BadInput):
        build(tiny[0], SAMPLINGS['plain'], (1, 1, 1), 3, least - 1).schedule.fresh_batch()
    assert build(tiny[0], SAMPLINGS['plain'], (1, 1, 1), 3, least).schedule.fresh_batch().prompts == 1


def test_greedy_tokens_are_the_argmax_of_a_whole_forward_pass(tiny, sample):
    c, params = tiny
    rollout = sample('greedy')
    mask = np.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    hidden = transformer.forward(params, rollout.tokens, transformer.positions_of(mask), mask, c)
    best = np.asarray(jnp.argmax(transformer.unembed(params, hidden, c), -1))[:, Q - 1 : -1]
    np.testing.assert_array_equal(rollout.tokens[:, Q:][rollout.completion_mask], best[rollout.completion_mask])


@pytest.mark.parametrize('name', ['endless', 'penalized'])
def test_greedy_rows_of_a_group_are_those_of_temperature_0_and_change_no_other(request, tiny, sample, name):
    if name == 'penalized':
        request.getfixturevalue('long')
    sampling, mesh, segment, budget = ENGINES[name]
    rollout = sample(build(tiny[0], SAMPLINGS[sampling], mesh, segment, budget, greedy=1))
    cold = sample(build(tiny[0], SAMPLINGS[sampling], (1, 1, 1), C, 0, temperature=0.0))
    drawn = sample(name)
    is_greedy = np.arange(P * G) % G == G - 1
    for field in ('tokens', 'completion_mask', 'truncated'):
        values, of_greedy, of_drawn = (getattr(x, field) for x in (rollout, cold, drawn))
        np.testing.assert_array_equal(values[is_greedy], of_greedy[is_greedy])
        np.testing.assert_array_equal(values[~is_greedy], of_drawn[~is_greedy])
    np.testing.assert_allclose(rollout.logprobs[~is_greedy], drawn.logprobs[~is_greedy], atol=1e-5)


@pytest.mark.parametrize('name', ['preempting', 'tensor'])
def test_replay_gives_bit_equal_logprobs(sample, name):
    rollout = sample(name, seed=3, step=2)
    again = sample(name, method='replay', rollout=rollout, seed=99)
    for field in ('tokens', 'completion_mask', 'logprobs', 'truncated', 'version'):
        np.testing.assert_array_equal(getattr(again, field), getattr(rollout, field))


@pytest.mark.parametrize('name', ['preempting', 'tensor'])
def test_resumed_rows_have_the_tokens_of_rows_without_a_pause(sample, name):
    whole = sample(name, seed=3, step=2)
    part = sample(name, seed=3, step=2, limit=7)
    assert part.completion_mask.sum(1).max() == 7 and part.truncated.any() and not part.truncated.all()
    part = sample(name, method='go_on', rollout=part, seed=3, step=5, until=9)
    assert part.completion_mask.sum(1).max() == 16
    full = sample(name, method='go_on', rollout=part, seed=3, step=6)
    assert completions(full) == completions(whole)
    np.testing.assert_allclose(full.logprobs, whole.logprobs, atol=2e-5)
    np.testing.assert_array_equal(full.truncated, whole.truncated)
    of_column = np.repeat([2, 5, 6], [7, 9, 8])
    np.testing.assert_array_equal(full.version, np.where(whole.completion_mask, of_column, 0))


def test_resuming_a_whole_rollout_changes_nothing(sample):
    whole = sample('preempting', seed=3, step=2)
    again = sample('preempting', method='go_on', rollout=whole, seed=3, step=9)
    jax.tree.map(np.testing.assert_array_equal, again, whole)


def test_given_tokens_are_written_and_the_rest_is_sampled_after_them(sample):
    free = sample('endless')
    given = np.full((P * G, C), -1, np.int32)
    given[3, :2], given[8, 5] = (40, 41), 50
    rollout = sample('endless', given=given)
    assert rollout.tokens[3, Q : Q + 2].tolist() == [40, 41] and rollout.tokens[8, Q + 5] == 50
    assert rollout.tokens[8, : Q + 5].tolist() == free.tokens[8, : Q + 5].tolist()
    untouched = np.delete(np.arange(P * G), [3, 8])
    np.testing.assert_array_equal(rollout.tokens[untouched], free.tokens[untouched])
    assert rollout.tokens[8].tolist() != free.tokens[8].tolist()


@pytest.mark.parametrize('name', ['preempting', 'penalized'])
def test_every_row_is_handed_on_once_when_it_ends(sample, name):
    calls = []
    rollout = sample(
        name,
        seed=4,
        limit=np.arange(1, 17) + 8 * (np.arange(16) % 2),
        finished=lambda row, tokens, truncated: calls.append((row, tokens.tolist(), truncated)),
    )
    assert sorted(row for row, _, _ in calls) == list(range(P * G))
    expected = list(zip(range(P * G), completions(rollout), rollout.truncated.tolist(), strict=True))
    assert sorted(calls) == expected and {truncated for _, _, truncated in calls} == {True, False}
    # and not all at the end: the host looks every few steps
    assert [row for row, _, _ in calls] != list(range(P * G))


def test_progress_counts_tokens_up_to_all_of_them(sample):
    seen = []
    rollout = sample('preempting', seed=4, progress=lambda tokens, live, slots: seen.append((tokens, live, slots)))
    tokens, live, slots = zip(*seen, strict=True)
    assert list(tokens) == sorted(tokens) and tokens[-1] == rollout.completion_mask.sum() and live[-1] == 0
    assert all(0 <= a <= b <= P * G for a, b in zip(live, slots, strict=True))


def test_all_programs_are_there_before_the_first_call_and_none_comes_later(tiny, sample, monkeypatch, caplog):
    announced, compile_all = [], compiled.compile_all
    monkeypatch.setattr(
        compiled, 'compile_all', lambda programs, name: announced.append(name) or compile_all(programs, name)
    )
    built = build(tiny[0], SAMPLINGS['plain'], (1, 1, 1), 12, 120, prompts=2).compile()
    executables = built.programs.executables
    assert len(executables) > 1 and announced == [f'{len(executables)} programs that sample 2 x {G} rows']
    rng, digest, visited = np.random.default_rng(0), built.hash, set()

    def rollout():
        prompts = make_prompts(rng.integers(1, Q + 1, 2), rng.integers(0, 100, 2), noise=rng.integers(100))
        _, stats = sample(
            built,
            prompts,
            method='sample',
            step=int(rng.integers(100)),
            limit=rng.integers(1, C + 1, 2 * G).astype(np.int32),
            finished=lambda *_: None,
        )
        visited.add((stats.decode_batches, stats.preempted > 0))

    rollout()
    with caplog.at_level(logging.DEBUG), jax.log_compiles():
        for _ in range(15):
            rollout()
        assert not [record for record in caplog.records if 'Compiling' in record.message]
        jax.jit(lambda x: x + 41)(np.ones(3))
        assert [record for record in caplog.records if 'Compiling' in record.message]  # the search works
    assert len(visited) > 1
    assert built.programs.executables == executables and built.hash == digest and len(announced) == 1


def test_a_second_sampler_of_the_same_options_traces_nothing_anew(tiny):
    def traced(**options):
        built = build(tiny[0], SAMPLINGS['plain']._replace(**options), (1, 1, 1), 12, 120)
        return built.programs.trace(schedule.STATE).jaxpr

    assert traced(top_k=3) is traced(top_k=3)
    assert traced(top_k=3) is not traced(top_k=4)


@pytest.mark.parametrize('group', [8, 64])
def test_prompt_memory_does_not_grow_with_the_group(tiny, group):
    c, params = tiny
    columns, prompts = 16, jax.tree.map(jnp.asarray, make_prompts())

    def cache(params):
        keys = sampler.row_keys(jax.random.key(0), 0, prompts.ids, group)
        rollout_state = state.new_state(prompts, keys, jnp.full((P * group, columns), -1), columns, ())
        cache_format = state.CacheFormat(4, jnp.float32)
        return state.open_batch(params, rollout_state, 0, c, SAMPLINGS['plain'], cache_format, (P, columns)).cache

    lowered = jax.jit(cache).lower(params)
    memory = lowered.compile().memory_analysis()
    leaves = len(jax.tree.leaves(lowered.out_info))
    own, starts = P * group * columns * COLUMN, 4 * (P * group + P + 1)
    shared = memory.output_size_in_bytes - own - starts
    assert 0 <= shared - P * 8 * COLUMN <= 8 * leaves  # and the pointers of a tuple


# stop strings and thinking: token 17 is spelled <17>

BYTES = [f'<{token}>'.encode() for token in range(64)]


def first_end(tokens, string):
    """Index of the token that completes the string in the tokens' text, None without one."""
    texts = (b''.join(BYTES[token] for token in tokens[: n + 1]).decode() for n in range(len(tokens)))
    return next((n for n, text in enumerate(texts) if string in text), None)


def test_rows_end_at_the_token_that_completes_a_stop_string(tiny, sample):
    string = '><4'  # over the border of two tokens, the second of which goes on
    plain = sample('endless', seed=5)
    sampling = SAMPLINGS['endless']._replace(stop_strings=(string,))
    built = build(tiny[0], sampling, (1, 1, 1), 12, 0, {'stop': stops.transition_table([string], BYTES)})
    ended = sample(built, seed=5)
    lengths = []
    for before, after, truncated in zip(completions(plain), completions(ended), ended.truncated, strict=True):
        end = first_end(before, string)
        assert after == (before if end is None else before[: end + 1]) and truncated == (end is None)
        lengths.append(len(after))
    assert len(set(lengths)) > 3 and min(lengths) > 1  # the first token alone holds no border

    part = sample(built, seed=5, limit=4)
    assert completions(sample(built, method='go_on', rollout=part, seed=5)) == completions(ended)


@pytest.fixture(scope='module')
def thinking(tiny):
    """An engine that ends thinking, spelled '2>', with tokens 40 and 22 after 5 tokens."""
    forced = {'thinking_tokens': 5, 'thinking_end': (40, 22), 'thinking_text': '2>'}
    sampling = SAMPLINGS['endless']._replace(stop_tokens=STOPS, **forced)
    return build(tiny[0], sampling, (1, 1, 1), 12, 0, {'thinking': stops.transition_table(['2>'], BYTES)})


@pytest.mark.parametrize('pause', [None, 3, 6])
def test_thinking_beyond_its_budget_is_ended_by_force(sample, thinking, pause):
    plain, rollout = sample('preempting', seed=6), sample(thinking, seed=6, limit=pause)
    if pause:
        rollout = sample(thinking, method='go_on', rollout=rollout, seed=6)
    kinds = set()
    for before, after, forced, count in zip(
        completions(plain), completions(rollout), rollout.forced, rollout.completion_mask.sum(1), strict=True
    ):
        end = first_end(before[:5], '2>')
        ended = len(before) <= 5
        kinds.add('ended' if ended else 'forced' if end is None else 'free')
        if ended or end is not None:
            assert after == before and not forced.any()
        else:
            assert after[:7] == [*before[:5], 40, 22]
            np.testing.assert_array_equal(np.flatnonzero(forced), [5, 6])
        assert len(after) == count
    assert kinds == {'ended', 'forced', 'free'}


@pytest.fixture(scope='module')
def opened(tiny):
    """As `thinking`, where the spelling '<1' opens thinking; a prompt may have done so."""
    forced = {'thinking_tokens': 5, 'thinking_end': (40, 22), 'thinking_text': '2>', 'thinking_start': '<1'}
    tables = {'thinking': ['2>'], 'opening': ['<1']}
    automata = {name: stops.transition_table(strings, BYTES) for name, strings in tables.items()}
    return build(tiny[0], SAMPLINGS['endless']._replace(**forced), (1, 1, 1), 12, 0, automata)


@pytest.mark.parametrize('pause', [None, 4])
@pytest.mark.parametrize('prompts_think', [None, (True, False, False, True)])
def test_only_thinking_that_prompt_or_completion_has_opened_is_ended_by_force(sample, opened, prompts_think, pause):
    prompts = make_prompts().replace(thinking=None if prompts_think is None else np.array(prompts_think))
    rollout, plain = sample(opened, prompts, seed=6, limit=pause), sample('endless', seed=6)
    if pause:
        rollout = sample(opened, prompts, method='go_on', rollout=rollout, seed=6)
    seen = set()
    rows = zip(completions(plain), completions(rollout), rollout.forced, strict=True)
    for row, (before, after, forced) in enumerate(rows):
        thinks = bool(prompts_think and prompts_think[row // G])
        for token in before[:5]:
            thinks = (thinks or BYTES[token].startswith(b'<1')) and not BYTES[token].endswith(b'2>')
        seen.add(thinks)
        assert forced.any() == thinks
        assert (after[:7] == [*before[:5], 40, 22]) if thinks else (after == before)
    assert seen == {False, True}


def test_forced_tokens_carry_their_own_logprobs(tiny, sample, thinking):
    c, params = tiny
    rollout = sample(thinking, seed=6)
    mask = np.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    hidden = transformer.forward(params, rollout.tokens, transformer.positions_of(mask), mask, c)
    scores = jax.nn.log_softmax(transformer.unembed(params, hidden, c))[:, Q - 1 : -1]
    expected = np.take_along_axis(np.asarray(scores), rollout.tokens[:, Q:, None], -1)[..., 0]
    assert rollout.forced.sum() >= 2
    np.testing.assert_allclose(rollout.logprobs[rollout.forced], expected[rollout.forced], atol=2e-5)


@pytest.mark.parametrize(
    ('cache_dtype', 'weights_dtype', 'mesh'), [('int8', 'float32', (2, 1, 1)), ('float32', 'int8', (1, 2, 2))]
)
def test_int8_gives_logprobs_close_to_float_ones(tiny, sample, cache_dtype, weights_dtype, mesh):
    rollout = sample('endless', seed=7)
    built = build(tiny[0], SAMPLINGS['endless'], mesh, 32, 0, cache_dtype=cache_dtype, weights_dtype=weights_dtype)
    again = sample(built, method='replay', rollout=rollout, seed=7)
    np.testing.assert_array_equal(again.tokens, rollout.tokens)
    error = np.abs(again.logprobs - rollout.logprobs)
    assert 1e-4 < error.max() < 0.1 and rollout.logprobs.std() > 0.5


def assert_samples(sample, built, expected):
    """Of seed 8 the sampler gives that rollout, and bit-equal logprobs when it replays its own; the first's Stats."""
    rollout, stats = sample(built, method='sample', seed=8)
    assert completions(rollout) == completions(expected)
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=2e-5)
    again = sample(built, method='replay', rollout=rollout, seed=8)
    np.testing.assert_array_equal(again.logprobs, rollout.logprobs)
    return stats


@pytest.mark.parametrize(
    ('sampling', 'mesh', 'budget', 'dtypes'),
    [
        ('plain', (1, 1, 1), 200, {}),
        ('penalized', (1, 2, 2), 0, {}),
        ('endless', (2, 1, 1), 0, {'cache_dtype': 'int8', 'weights_dtype': 'int8'}),
    ],
)
def test_layers_with_arrays_of_their_own_sample_the_same(tiny, sample, monkeypatch, sampling, mesh, budget, dtypes):
    expected = sample(build(tiny[0], SAMPLINGS[sampling], mesh, 3, budget, **dtypes), seed=8)
    monkeypatch.setitem(programs.BY_LAYER, 'cpu', True)
    built = build(tiny[0], SAMPLINGS[sampling], mesh, 3, budget, **dtypes)
    stats = assert_samples(sample, built, expected)
    assert stats.preempted or not budget
    loops = str(built.programs.trace(built.schedule.key('decode', built.schedule.fresh_batch())).jaxpr).count('while[')
    assert loops == 1  # over the steps


@pytest.mark.parametrize('weights_dtype', ['float32', 'int8'])
def test_layers_with_arrays_of_their_own_are_inspected_as_others_are(tiny, monkeypatch, weights_dtype):
    options = lora.LoraOptions(rank=2, targets='w[qo]')
    trained, _ = lora.split(lora.policy_table(tiny[0], options))
    noise = map_table(lambda path, param: jax.random.normal(jax.random.key(len(path)), param.shape), trained)
    policy = lora.join(noise, lora.freeze(tiny[1], options, 'float32'))
    inspections = []
    for by_layer in (False, True):
        monkeypatch.setitem(programs.BY_LAYER, 'cpu', by_layer)
        built = build(tiny[0], SAMPLINGS['plain'], (1, 1, 1), 3, 0, lora=options, weights_dtype=weights_dtype)
        inspection = built.programs.inspect(built.programs.weights(policy), policy)
        inspections.append([float(x) for x in inspection])
    assert inspections[0] == pytest.approx(inspections[1], rel=1e-6) and inspections[0][1] > 0.9


@pytest.mark.parametrize(('sampling', 'mesh', 'budget'), [('endless', (2, 1, 2), 0), ('plain', (1, 1, 1), 500)])
def test_kernels_sample_the_same(request, tiny, sample, sampling, mesh, budget):
    if budget:
        request.getfixturevalue('long')
    built = build(tiny[0], SAMPLINGS[sampling], mesh, 3, budget, kernels='on', block=16)
    expected = sample(build(tiny[0], SAMPLINGS[sampling], mesh, 3, budget, kernels='off', block=16), seed=8)
    stats = assert_samples(sample, built, expected)
    assert stats.preempted or not budget


@pytest.mark.parametrize('rule', [Rule(), Rule(window=jnp.int32(6)), Rule(window=jnp.int32(20), cap=3.0)], ids=str)
def test_kernels_attend_over_the_gap_between_a_prompt_and_its_tokens(rule):
    queries, columns = 12, 40
    prompt, first, last = np.array([[12], [3], [0], [7]]), np.array([[12], [20], [15], [40]]), 37
    column = np.arange(columns)
    mask = jnp.asarray(
        np.where(column < queries, column >= queries - prompt, (column >= first) & (column < last)), bool
    )
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (4, columns, heads, 16)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    apart = state._mask_for_splash(mask, transformer.positions_of(mask), queries)
    out = attend(q, k, v, apart, rule._replace(by='splash'))
    np.testing.assert_allclose(out[mask], attend(q, k, v, mask, rule)[mask], atol=1e-5)


@pytest.mark.parametrize(
    ('options', 'reason'),
    [({'cache_dtype': 'int8'}, 'int8 cache'), ({'block': 8}, 'blocks of 8 columns'), ({'mesh': (1, 1, 4)}, '2 heads')],
)
def test_kernels_say_what_they_cannot(tiny, options, reason):
    options = {'mesh': (1, 1, 1), 'block': 16} | options
    with pytest.raises(errors.BadInput, match=rf'rollout\.kernels.*{reason}'):
        build(tiny[0], SAMPLINGS['plain'], options.pop('mesh'), 3, 0, kernels='on', **options)


@pytest.mark.parametrize('weights_dtype', ['bfloat16', 'int8'])
def test_weights_are_gathered_without_a_second_copy_of_them(tiny, weights_dtype):
    deep = dataclasses.replace(tiny[0], layers=16)
    programs = build(deep, SAMPLINGS['plain'], (1, 4, 1), 8, 0, dtype='bfloat16', weights_dtype=weights_dtype).programs
    memory = programs.trace(schedule.WEIGHTS).lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * memory.output_size_in_bytes  # 1.8 and 5 times, of all layers at once
