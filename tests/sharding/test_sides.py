"""A sampler on devices of its own: the tokens, losses and gradients of a run on one mesh, and what crosses between."""

import functools
import itertools
import threading
import types

import jax
import numpy as np
import pytest

from grpo_jax import sampler, train
from grpo_jax.errors import BadInput
from grpo_jax.learner.programs import Update
from grpo_jax.models import lora
from grpo_jax.models.abstract import abstract_policy
from grpo_jax.run.open import open_run
from grpo_jax.sampler.engine import Engine, make_sampler
from grpo_jax.sharding import batches, sides
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.sides import Sides
from grpo_jax.types import Prompts, map_table
from tests import tiny_run

SHAPES = batches.Shapes(4, 2, 5, 12)
STOPS = tuple(range(1, 7))
ADAPTERS = lora.LoraOptions(rank=2, targets='w[qo]')


def make_prompts():
    tokens = np.random.default_rng(0).integers(7, 64, (4, 5)).astype(np.int32)
    return Prompts(tokens, np.ones((4, 5), bool), np.arange(4, dtype=np.int32))


def make_policy(tiny, mesh, options=lora.OFF):
    """The tiny policy on a mesh, with adapters that are not 0 where the options have them."""
    c, params = tiny
    if options.rank:
        trained, _ = lora.split(lora.policy_table(c, options))
        noise = map_table(lambda path, param: jax.random.normal(jax.random.key(len(path)), param.shape), trained)
        params = lora.join(noise, lora.freeze(params, options, 'float32'))
    shardings = jax.tree.map(lambda x: x.sharding, abstract_policy(c, options, 'float32', mesh))
    # copies, since a test gives the policy's memory away
    return jax.tree.map(lambda x, sharding: jax.device_put(np.array(x), sharding), params, shardings)


def make_engine(c, mesh, **options):
    sampling = sampler.Sampling(1.0, SHAPES.tokens, STOPS, 0)._replace(**options)
    return make_sampler(c, mesh, SHAPES, sampling, {}, block=4, segment=5)


def sample(engine, policy, seed=3):
    return engine.sample(policy, batches.put_rows(make_prompts(), engine.mesh), jax.random.key(seed), 0)


@pytest.mark.parametrize(
    ('axes', 'count', 'options'),
    [
        ((1, 4, 1, 1), 4, {'dtype': 'bfloat16'}),
        ((1, 2, 1, 2), 4, {'weights_dtype': 'int8'}),
        ((1, 4, 1, 1), 4, {'lora': ADAPTERS}),
        ((1, 2, 1, 1), 4, {'lora': ADAPTERS._replace(base_dtype='int8')}),
        ((3, 2, 1, 1), 2, {}),
    ],
    ids=['halves', 'tensor and int8', 'adapters', 'adapters on int8', 'a small side'],
)
def test_a_rollout_is_that_of_one_mesh_bit_for_bit(tiny, axes, count, options):
    learner = meshes.arrange(jax.devices()[: np.prod(axes)], axes)
    own = sides.make_sampler_mesh(learner, jax.devices()[-count:])
    adapters = options.get('lora', lora.OFF)
    apart, policy = make_engine(tiny[0], Sides(learner, own), **options), make_policy(tiny, learner, adapters)
    expected, alone = sample(make_engine(tiny[0], own, **options), make_policy(tiny, own, adapters))
    rollout, stats = sample(apart, policy)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(rollout), jax.device_get(expected))
    assert rollout.tokens.sharding.device_set == {*own.devices.flat} and stats.tokens == alone.tokens > 8
    if adapters.rank:
        assert [*map(float, stats.inspection)] == [*map(float, alone.inspection)] and stats.inspection.share > 0.5


def test_of_adapters_a_second_crossing_sends_the_factors_alone(tiny, monkeypatch):
    learner, own = (meshes.arrange(some, (1, 4, 1, 1)) for some in (jax.devices()[:4], jax.devices()[4:]))
    both, sent = Sides(learner, own), []
    move = both.move
    monkeypatch.setattr(both, 'move', lambda tree, target: sent.append(tree) or move(tree, target))
    engine, policy = make_engine(tiny[0], both, lora=ADAPTERS), make_policy(tiny, learner, ADAPTERS)
    engine.send(policy)
    first = [jax.tree.leaves(tree) for tree in sent]
    engine.send(policy)
    adapters = sum(x.size for x in jax.tree.leaves(lora.split(policy)[0]))
    assert [sum(x.size for x in jax.tree.leaves(tree)) for tree in sent[2:]] == [adapters]
    assert sum(x.size for x in first[1]) > 4 * adapters  # the frozen weights, once


def test_an_update_may_take_the_policy_while_its_completions_are_sampled(tiny):
    learner = meshes.arrange(jax.devices()[:4], (1, 4, 1, 1))
    own = sides.make_sampler_mesh(learner, jax.devices()[4:])
    both = Sides(learner, own)
    engine, policy = make_engine(tiny[0], both), make_policy(tiny, learner)
    expected = jax.device_get(sample(engine, policy)[0])
    update = jax.jit(functools.partial(jax.tree.map, lambda x: x - 1), donate_argnums=0)
    began, go_on = threading.Event(), threading.Event()

    def draw(sent):
        began.set()
        assert go_on.wait(60)
        return sample(engine, sent)[0]

    drawn = both.start(draw, engine.send(policy))
    assert began.wait(60)
    policy = update(policy)  # takes the memory of the weights that were sent
    jax.block_until_ready(policy)
    go_on.set()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(drawn.result()), expected)
    with pytest.raises(ZeroDivisionError):  # an error of the thread is that of the one that waits for it
        both.start(lambda: 1 / 0).result()


def test_the_clock_counts_the_seconds_of_sampling_also_of_what_goes_on(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(sides.time, 'monotonic', lambda: now[0])
    both = Sides(*(meshes.arrange([device], (1, 1, 1, 1)) for device in jax.devices()[:2]))
    now[0] = 12.0
    with both.sampling():
        now[0] = 15.0
        assert both.read_clock() == (5.0, 3.0)
        now[0] = 16.0
    now[0] = 20.0
    assert both.read_clock() == (5.0, 1.0)


@pytest.fixture
def config(monkeypatch):
    """tiny_run.config on the mesh fsdp = 4 of 8 devices, whose programs are not kept on the disk.

    Loaded from there, and on one core, programs of two sides that run at once have waited for ever for each other.
    """
    monkeypatch.setattr(meshes, 'devices_here', jax.devices)
    least = 'jax_persistent_cache_min_compile_time_secs'
    seconds = getattr(jax.config, least)
    jax.config.update(least, 1e9)
    yield functools.partial(tiny_run.config, mesh__data=1, mesh__fsdp=4)
    jax.config.update(least, seconds)


def run(workdir, config, name):
    """((parameters, moments), {file: its rows}) of a run."""
    state = train.run(config, str(workdir / name))
    files = 'metrics.jsonl', 'evaluations.jsonl', 'rollouts/000000.jsonl', 'timings.jsonl'
    return jax.device_get((state.params, state.opt_state)), {
        file: tiny_run.rows(workdir / name, file) for file in files
    }


def test_a_run_on_two_sides_is_that_of_one_mesh(config, tmp_path):
    options = dict(preset='dapo', steps=3, log__rollouts=1, evaluation__every=2)
    options |= dict(collection__dead_groups='resample', collection__max_draws=2, model__dtype='bfloat16')
    options |= dict(algorithm__kl='k3', algorithm__kl_coef=0.01)
    expected, one = run(tmp_path, config(**options), 'one')
    params, two = run(tmp_path, config(**options, mesh__sampler=4), 'two')
    timings, _ = two.pop('timings.jsonl'), one.pop('timings.jsonl')
    assert one == two
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    for row in timings:  # whose seconds come from a clock
        for side in ('learner', 'sampler'):
            assert row[f'{side}/busy_seconds'] > 0 and row[f'{side}/gap_seconds'] >= 0


def test_the_learners_mesh_is_chosen_over_what_the_sampler_leaves(config, tmp_path, capsys):
    opened = open_run(config(mesh__data=0, mesh__fsdp=1, mesh__sampler=4), str(tmp_path))
    assert [*opened.mesh.devices.flat] == jax.devices()[:4] and {*opened.sides.sampler.devices.flat} == {
        *jax.devices()[4:]
    }
    assert 'of 4 devices, chosen; 4 for the sampler' in capsys.readouterr().err


def test_a_step_on_two_halves_is_that_of_all_devices_to_the_last_bits(config, tmp_path):
    options = dict(preset='grpo', seed=6, steps=1, log__rollouts=1, data__prompts_per_step=8)
    (_, expected), one = run(tmp_path, config(**options | {'mesh__fsdp': 8}), 'one')
    (_, moments), two = run(tmp_path, config(**options, mesh__sampler=4), 'two')
    tokens, others = ([row['completion'] for row in rows['rollouts/000000.jsonl']] for rows in (two, one))
    assert tokens == others and len(set(tokens)) > 16
    (row,), (other,) = two['metrics.jsonl'], one['metrics.jsonl']
    assert other['grad_norm'] > 0 and row['reward'] == other['reward']
    for name in ('loss', 'grad_norm', 'entropy'):
        assert row[name] == pytest.approx(other[name], rel=1e-6, abs=1e-6), name
    # moments of the first gradient; a parameter follows the sign of its gradient, and that of one near 0 is chance
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), moments, expected)


def test_twenty_steps_on_two_sides_are_those_of_one_mesh(long, config, tmp_path):
    options = dict(preset='grpo', steps=20, log__rollouts=1, evaluation__every=5, model__lora__rank=2)
    expected, one = run(tmp_path, config(**options), 'one')
    params, two = run(tmp_path, config(**options, mesh__sampler=4), 'two')
    del one['timings.jsonl'], two['timings.jsonl']
    assert one == two and len(one['metrics.jsonl']) == 20
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_draws_sampled_beside_the_learner_are_those_of_one_mesh_and_both_work_at_once(config, tmp_path, monkeypatch):
    options = dict(preset='grpo', steps=4, log__rollouts=1, model__dtype='bfloat16')
    options |= dict(collection__staleness=1, algorithm__correction='truncated')
    expected, one = run(tmp_path, config(**options), 'one')
    began, draws, updates = [threading.Event() for _ in range(5)], itertools.count(), itertools.count()
    finish, update = Engine._finish_rows, Update.__call__

    def finish_rows(engine, *arguments):
        number = next(draws) if threading.current_thread().name.startswith('sampler') else 0
        if number > 1:  # a draw goes on until the update begins that would otherwise wait for it
            assert began[number - 1].wait(60)
        return finish(engine, *arguments)

    def begin_update(learner, *arguments):
        began[next(updates)].set()
        return update(learner, *arguments)

    monkeypatch.setattr(Engine, '_finish_rows', finish_rows)
    monkeypatch.setattr(Update, '__call__', begin_update)
    params, two = run(tmp_path, config(**options, mesh__sampler=4), 'two')
    assert next(draws) == 5 and next(updates) == 4
    for rows in (one, two):
        del rows['timings.jsonl']
        rows['metrics.jsonl'] = [
            {name: x for name, x in row.items() if not name.startswith('fresh_gap')} for row in rows['metrics.jsonl']
        ]
    assert one == two
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(mesh__sampler=5), ('9 devices with the 4', 'only 8')),
        (dict(mesh__sampler=3), ('prompts_per_step = 4', '3 devices', 'choose 2')),
        (dict(mesh__fsdp=2, mesh__tensor=2, mesh__sampler=3), ('mesh.tensor = 2', 'choose 4')),
        (dict(mesh__data=0, mesh__fsdp=1, mesh__sampler=8), ('9 devices with the 1', 'only 8')),
        (dict(preset='sft', mesh__sampler=4), ('reads completions',)),
    ],
    ids=['devices', 'prompts', 'tensor', 'nothing left', 'nothing to sample'],
)
def test_a_side_that_cannot_work_is_refused_in_a_line(config, tmp_path, changes, words):
    with pytest.raises(BadInput) as refused:
        open_run(config(**changes), str(tmp_path))
    assert 'mesh.sampler' in str(refused.value) and all(word in str(refused.value) for word in words)


def devices_of(*counts):
    """Stand-ins for the devices of processes that have so many each."""
    owners = [process for process, count in enumerate(counts) for _ in range(count)]
    return [types.SimpleNamespace(process_index=owner, platform='tpu') for owner in owners]


@pytest.mark.parametrize(
    'counts, count, fits', [((4, 4), 2, 4), ((4, 4), 6, 4), ((2, 2, 2, 2), 3, 4), ((4, 2), 3, 2)], ids=str
)
def test_a_process_with_devices_of_both_sides_is_refused_with_a_number_that_works(counts, count, fits):
    learner = meshes.arrange(jax.devices()[:1], (1, 1, 1, 1))
    with pytest.raises(BadInput, match=rf'mesh\.sampler = {count}: is not all devices .*; choose {fits}$'):
        sides.make_sides({'sampler': count}, learner, devices_of(*counts))
    owners, own = sides.split_processes(devices_of(*counts), fits)
    assert owners and own and not owners & own


@pytest.mark.parametrize(
    'counts, size, words',
    [
        ((4, 4), 2, 'the learner has 2 devices and the sampler 4'),
        ((4, 2, 2), 4, 'the sampler has 2 processes and the learner 1'),
    ],
    ids=['sizes', 'processes'],
)
def test_devices_to_devices_are_refused_where_they_do_not_pair(counts, size, words):
    learner = meshes.arrange(jax.devices()[:size], (1, size, 1, 1))
    with pytest.raises(BadInput, match=rf"mesh\.transport = 'devices': .*{words}; use files"):
        sides.make_sides({'sampler': 4, 'transport': 'devices'}, learner, devices_of(*counts))
