"""Checkpoints that are not what was saved: each is noticed, and the run goes on from the one before."""

import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from grpo_jax.errors import BadInput
from grpo_jax.run import checkpoint, digest
from grpo_jax.run.rows import recorded_events
from grpo_jax.types import TrainState


def state_of(step):
    key = jax.random.key(step)
    params = {'w': jax.random.normal(key, (8, 40)), 'b': jnp.zeros(5), 'flags': jnp.array([True, False])}
    return TrainState(
        jnp.int32(step), params, (params,), None, {'tries': jnp.arange(7), 'entropy': jnp.float32(np.nan)}
    )


def equal(a, b):
    return jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype == 'f'), a, b)
    )


def abstract():
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A workdir with checkpoints of steps 3 and 6."""
    workdir = tmp_path_factory.mktemp('saved')
    with checkpoint.manager(str(workdir), keep=2) as checkpoints:
        for step in (3, 6):
            checkpoint.save(checkpoints, state_of(step))
    return workdir


@pytest.fixture
def workdir(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / 'run')


def restored(workdir):
    with checkpoint.manager(str(workdir), keep=2) as checkpoints:
        return checkpoint.restore(checkpoints, abstract())


def files(folder):
    return sorted(os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)


def flip(path, bit):
    with open(path, 'r+b') as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def check_flips(saved, folder, count, seed):
    """How many flips were noticed; asserts of each that the state is that of step 6 or, with an event, of step 3."""
    draw, noticed = random.Random(seed), 0
    for number in range(count):
        workdir = shutil.copytree(saved, folder / str(number))
        path = draw.choice([path for path in files(workdir / 'checkpoints' / '6') if os.path.getsize(path)])
        bit = draw.randrange(8 * os.path.getsize(path))
        flip(path, bit)
        state, where = restored(workdir), f'bit {bit} of {path}'
        step = int(state.step)
        assert step in (3, 6) and equal(state, state_of(step)), where
        assert [row['event'] for row in recorded_events(workdir)] == ['damaged'] * (step == 3), where
        noticed += step == 3
        shutil.rmtree(workdir)
    return noticed


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # of arrays that came too late
def test_a_flipped_bit_is_noticed_or_harmless(saved, tmp_path):
    assert check_flips(saved, tmp_path, 40, seed=0) >= 5


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_many_flipped_bits_are_noticed_or_harmless(saved, tmp_path, long):
    assert check_flips(saved, tmp_path, 1000, seed=1) > 200


def truncate(folder):
    path = max(files(folder), key=os.path.getsize)
    os.truncate(path, os.path.getsize(path) // 2)


def empty_files(folder):
    for path in files(folder):
        os.truncate(path, 0)


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def without(name):
    def remove(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    remove.__name__ = f'without {name}'
    return remove


def with_text(name, text):
    def write(folder):
        (folder / name).write_bytes(text)

    write.__name__ = f'{name} {text[:10]}'
    return write


def exchanged(folder):
    """Another step's arrays under this step's name."""
    shutil.rmtree(folder / 'default')
    shutil.copytree(folder.parent / '3' / 'default', folder / 'default')


def file_in_place(folder):
    shutil.rmtree(folder)
    folder.write_text('')


KINDS = [
    *(truncate, empty_files, empty, exchanged, file_in_place),
    *map(without, ('_CHECKPOINT_METADATA', 'default', 'default/_METADATA', 'default/manifest.ocdbt')),
    *map(without, ('default/d', 'default/ocdbt.process_0')),
    with_text('_CHECKPOINT_METADATA', b''),
    with_text('_CHECKPOINT_METADATA', b'[]'),
    with_text('_CHECKPOINT_METADATA', b'{"commit_timestamp_nsecs": "now"}'),
    with_text('_CHECKPOINT_METADATA', b'\xff\xfe'),
    with_text('_CHECKPOINT_METADATA', b'[' * 100000),
    with_text('default/_METADATA', b'{}'),
    with_text('default/manifest.ocdbt', b'\0' * 115),
]


@pytest.mark.parametrize('damage', KINDS, ids=lambda kind: kind.__name__)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(workdir, damage, caplog):
    damage(workdir / 'checkpoints' / '6')
    assert equal(restored(workdir), state_of(3))
    assert sum('not what was saved' in record.message for record in caplog.records) == 1
    (event,) = recorded_events(workdir)
    assert event['step'] == 6 and event['moved_to'].endswith('6') and os.path.exists(event['moved_to'])
    # the step is taken again
    with checkpoint.manager(str(workdir), keep=2) as checkpoints:
        checkpoint.save(checkpoints, state_of(6))
    assert equal(restored(workdir), state_of(6)) and len(recorded_events(workdir)) == 1


def test_checkpoints_ask_tensorstore_for_no_figures(tmp_path, monkeypatch):
    # each answer is memory that never comes back
    figures = []
    monkeypatch.setattr(
        tensorstore, 'experimental_collect_matching_metrics', lambda *given, **_: figures.append(given) or []
    )
    with checkpoint.manager(str(tmp_path), keep=1) as checkpoints:
        checkpoint.save(checkpoints, state_of(3))
    assert equal(restored(tmp_path), state_of(3)) and not figures


THREADS = """
import ctypes, sys, threading
from grpo_jax.run import checkpoint
if sys.argv[1] == 'frugal':
    checkpoint.spare_memory()
libc, barrier = ctypes.CDLL(None), threading.Barrier(12)
def allocate():
    libc.malloc(1000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, 'stdout'))
libc.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='another C library')
def test_threads_share_the_arenas_of_memory():
    def count(*argument):
        environment = {
            name: value for name, value in os.environ.items() if 'GLIBC' not in name and 'MALLOC' not in name
        }
        command = [sys.executable, '-c', THREADS, *argument]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.count(
            '<heap'
        )

    assert count('frugal') <= 2 < count('lavish')


@pytest.mark.parametrize('name', ['99', '7'])
def test_an_empty_folder_with_the_name_of_a_step_is_no_checkpoint(workdir, tmp_path, name):
    (workdir / 'checkpoints' / name).mkdir()
    assert equal(restored(workdir), state_of(6))
    (tmp_path / 'new' / 'checkpoints' / name).mkdir(parents=True)
    assert restored(tmp_path / 'new') is None


@pytest.mark.parametrize('name', ['007', '\u0663', 'notes', '6.orbax-checkpoint-tmp', '-1', '1e3'])
def test_other_folders_beside_the_checkpoints_do_no_harm(workdir, name):
    (workdir / 'checkpoints' / name).mkdir()
    assert equal(restored(workdir), state_of(6))


@pytest.mark.parametrize('damage', [truncate, without('_CHECKPOINT_METADATA')], ids=lambda kind: kind.__name__)
def test_without_a_sound_checkpoint_the_run_is_refused_and_nothing_moves(workdir, damage):
    damage(workdir / 'checkpoints' / '6')
    damage(workdir / 'checkpoints' / '3')
    before = files(workdir)
    for _ in range(2):
        with pytest.raises(BadInput, match='not the checkpoint that was saved'):
            restored(workdir)
    assert files(workdir) == before


def test_another_models_checkpoint_is_refused_and_not_taken_for_damage(workdir):
    other = abstract()
    other.params['w'] = jax.ShapeDtypeStruct((9, 40), jnp.float32, sharding=other.params['w'].sharding)
    with checkpoint.manager(str(workdir), keep=2) as checkpoints, pytest.raises(BadInput, match='another model'):
        checkpoint.restore(checkpoints, other)
    assert recorded_events(workdir) == []


def test_readers_take_the_newest_sound_checkpoint_and_change_nothing(workdir, caplog):
    empty_files(workdir / 'checkpoints' / '6')
    (workdir / 'checkpoints' / '9.orbax-checkpoint-tmp').mkdir()  # the run is writing it
    before = files(workdir), sorted(os.listdir(workdir / 'checkpoints'))
    params, step = checkpoint.read_params(str(workdir), abstract().params)
    assert step == 3 and equal(params, state_of(3).params)
    assert 'not the checkpoint that was saved' in caplog.text
    assert (files(workdir), sorted(os.listdir(workdir / 'checkpoints'))) == before


def test_a_checkpoint_without_digests_is_not_what_was_saved(workdir):
    path = workdir / 'checkpoints' / '6' / '_CHECKPOINT_METADATA'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'custom_metadata': {}}))
    with pytest.raises(checkpoint.Damaged, match='digests'):
        checkpoint.read_tree(str(workdir / 'checkpoints' / '6'), abstract())
    assert equal(restored(workdir), state_of(3))
    assert [row['event'] for row in recorded_events(workdir)] == ['damaged']


@pytest.mark.parametrize('place', ['params', 'opt_state', 'coefficients'])
def test_no_checkpoint_holds_a_state_that_is_not_finite(tmp_path, place):
    state, bad = state_of(3), {'x': jnp.array([1.0, jnp.inf])}
    state = state.replace(**{place: bad}) if hasattr(state, place) else state.replace(aux={place: bad})
    with checkpoint.manager(str(tmp_path), keep=2) as checkpoints:
        with pytest.raises(FloatingPointError, match=f'{place}/x is not finite'):
            checkpoint.save(checkpoints, state)
    assert checkpoint.steps(str(tmp_path)) == []


def test_digests_are_those_of_values_and_positions_on_every_mesh():
    # by hand: one element of bits 0 at position (): mix(0) = 0, so both sums are 0
    assert digest.digests({'x': jnp.float32(0)})['x'] == ('float32[]', '0' * 16, True)
    x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    (expected,) = digest.digests([jnp.asarray(x)]).values()
    mesh = jax.make_mesh((4, 2), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for names, kind in itertools.product([('a', 'b'), (('a', 'b'),), (None, 'a'), ()], ['device', 'pinned_host']):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names), memory_kind=kind)
        assert digest.digests([jax.device_put(x, sharding)]) == {'0': expected}
    moved = x.copy()
    moved[0, 1], moved[1, 0] = x[1, 0], x[0, 1]
    assert digest.digests([jnp.asarray(moved)]) != {'0': expected}
    assert digest.digests([jnp.asarray(x).reshape(24, 16)])['0'].sums != expected.sums


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int32', 'uint8', 'int8', 'bool'])
def test_every_element_counts(dtype):
    x = jnp.zeros((3, 4), dtype)
    sums = {digest.digests([x.at[i, j].set(jnp.ones((), dtype))])['0'].sums for i in range(3) for j in range(4)}
    assert len(sums | {digest.digests([x])['0'].sums}) == 13
