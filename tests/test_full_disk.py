"""A full disk: what is for looking is dropped, what is for keeping stops the run, which then goes on bit-equal."""

import contextlib
import errno
import glob
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from grpo_jax import evaluate, train
from grpo_jax.errors import BadInput, CannotWrite
from grpo_jax.hosts import files, lock
from grpo_jax.run import console, loop
from grpo_jax.run import writer as writers
from grpo_jax.run.rows import recorded_events
from grpo_jax.run.writer import Writer
from grpo_jax.tools import iterate
from tests import quick_compile, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# of an array's writes in a checkpoint, those that fail after the first find nobody who waits for them
late = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def files_of_at_most(size):
    """A disk that takes so many bytes of a file; Python ignores the signal, so that writing more is an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk():
    """A function (folder, size) that makes folder a disk of that size, or changes its size; skips without the right."""
    mounted = []

    def mount(folder, size):
        folder.mkdir(parents=True, exist_ok=True)
        options = f'size={size}' if folder not in mounted else f'remount,size={size}'
        done = subprocess.run(['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f'NO SMALL DISKS: tmpfs cannot be mounted here: {done.stderr.strip()}')
        mounted.append(folder)

    yield mount
    for folder in set(mounted):
        subprocess.run(['umount', '-l', folder], check=True)


def config():
    # the demo's model, whose checkpoints are larger than what a disk has here
    return tiny_run.config(model__path=tiny_run.DEMO, steps=4, supervised__updates=0, log__rollouts=1)


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    """The workdir of a run whose disk had room."""
    workdir = tmp_path_factory.mktemp('runs') / 'straight'
    train.run(config(), str(workdir))
    return workdir


def assert_equal(workdir, straight, rollouts=True):
    names = ['metrics.jsonl', 'evaluations.jsonl']
    names += [f'rollouts/{step:06d}.jsonl' for step in range(4)] if rollouts else []
    for name in names:
        assert (workdir / name).read_bytes() == (straight / name).read_bytes(), name
    policies = [evaluate.open_policy(evaluate.open_recorded(str(folder)))[0] for folder in (workdir, straight)]
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, policies))


def records(folder):
    """The events that a reader of TensorBoard's files sees in a folder's only one."""
    (path,) = glob.glob(os.path.join(folder, 'events.out.tfevents.*'))
    with open(path, 'rb') as file:
        content = file.read()
    read = []
    while content:
        (length,) = struct.unpack('<Q', content[:8])
        read.append(event_pb2.Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return read


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    with files.Lines(path) as lines:
        lines.append('a' * 59)
        with files_of_at_most(100), pytest.raises(CannotWrite, match=r'metrics.jsonl: File too large; raise the limit'):
            lines.append('b' * 59)  # the first 40 bytes go to the disk, and back
        assert path.read_text() == 'a' * 59 + '\n'
        lines.append('c')
    assert path.read_text() == 'a' * 59 + '\nc\n'


@pytest.mark.parametrize('whole', [False, True])
def test_a_file_that_was_removed_takes_no_line_in_silence(tmp_path, whole):
    folder = tmp_path / 'run'
    folder.mkdir()
    with files.Lines(folder / 'metrics.jsonl') as lines:
        lines.append('a')
        shutil.rmtree(folder) if whole else os.remove(folder / 'metrics.jsonl')
        with pytest.raises(CannotWrite, match=r'metrics.jsonl: No such file or directory; bring the folder back'):
            lines.append('b')


def test_cutting_a_file_takes_no_space(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    with files_of_at_most(0):
        files.cut_lines(path, lambda line: json.loads(line)['step'] < 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    files.cut_lines(tmp_path / 'none', lambda line: True)
    assert os.listdir(tmp_path) == ['metrics.jsonl']


def test_a_file_that_cannot_be_replaced_stays(tmp_path):
    path = tmp_path / 'config.json'
    path.write_text('old')
    with files_of_at_most(5), pytest.raises(CannotWrite, match=r'config.json: File too large'):
        with files.atomic_write(path) as file:
            file.write('much longer')
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['config.json']


def test_what_libraries_say_of_a_disk_is_understood():
    tensorstore = ValueError("Failed to write 4608000 bytes: No space left on device [os_error_code='28']")
    assert files.disk_error(tensorstore).errno == errno.ENOSPC
    outer = RuntimeError('saving failed')
    outer.__cause__ = PermissionError(errno.EACCES, 'Permission denied')
    assert files.disk_error(ExceptionGroup('several', [KeyError(), outer])).errno == errno.EACCES
    assert files.disk_error(ValueError('a shape')) is None
    with pytest.raises(ValueError, match='a shape'), files.writing('x'):
        raise ValueError('a shape')


def test_curves_that_cannot_be_written_are_counted_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    with Writer(str(tmp_path), 0, 100, 'train') as writer:
        writer.step(0, {'reward': 0.0}, {'sample': 1.0})
        with monkeypatch.context() as patch:
            patch.setattr(writers, 'append_whole', _half)
            for step in range(1, 31):  # more than any queue of tensorboardX's would take
                writer.step(step, {'reward': 1.0}, {'sample': 1.0})
        writer.step(31, {'reward': 2.0}, {'sample': 1.0})
    assert [row['step'] for row in tiny_run.rows(tmp_path)] == [*range(32)]
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        f'cannot write {tmp_path}/tensorboard: No space left on device; the run goes on without, and counts what it '
        'drops',
        f'30 of tensorboard of {tmp_path} could not be written and are missing',
    ]
    dropped = [(row['step'], row['event'], row['kind']) for row in recorded_events(tmp_path)]
    assert dropped == [(step, 'dropped', 'tensorboard') for step in range(1, 31)]
    shown = [(e.step, e.summary.value[0].tag) for e in records(tmp_path / 'tensorboard') if e.summary.value]
    assert [step for step, tag in shown if tag == 'reward'] == [0, 31]  # whole records, before and after


def _half(file, content):
    file.write(content[: len(content) // 2])
    raise FULL


def test_no_thread_and_no_process_writes_the_curves(tmp_path):
    writer = Writer(str(tmp_path), 3, 4, 'train')
    writer.step(3, {'reward': 0.25}, {'sample': 1.0})
    assert not [thread for thread in threading.enumerate() if 'tensorboardX' in type(thread).__module__]
    assert 'multiprocessing.queues' not in {type(thread).__module__ for thread in threading.enumerate()}
    writer.close()
    version, start, reward, *_ = records(tmp_path / 'tensorboard')
    assert version.file_version == 'brain.Event:2'
    assert (start.step, start.session_log.status) == (3, event_pb2.SessionLog.START)  # older rows from 3 on are hidden
    assert (reward.step, reward.summary.value[0].simple_value) == (3, 0.25)


def test_events_that_cannot_be_written_stop_no_run(tmp_path, monkeypatch, caplog):
    with Writer(str(tmp_path), 0, 3, 'train') as writer:
        monkeypatch.setattr(writers, 'append_event', _full)
        for step in range(3):
            with writer.dropped.unless_written(step, 'rollouts'):
                raise FULL
    assert '3 of rollouts' in caplog.records[-1].getMessage()


def _full(*_, **__):
    raise FULL


def test_an_error_that_is_not_the_disks_is_not_dropped(tmp_path):
    with Writer(str(tmp_path), 0, 3, 'train') as writer:
        with pytest.raises(KeyError), writer.dropped.unless_written(0, 'rollouts'):
            raise KeyError


def test_a_curve_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch, capsys):
    with Writer(str(tmp_path), 0, 1, 'train') as writer:
        writer.step(0, {'reward': 0.0, 'length': 1.0}, {'sample': 1.0})
        writer.evaluation(0, {'greedy': 0.0})
    monkeypatch.setattr(console, 'draw_curve', _full)
    console.print_outcome(str(tmp_path))
    assert 'curve: not drawn, No space left on device' in capsys.readouterr().out


def test_an_iteration_does_not_learn_from_dropped_rollouts(tmp_path):
    (tmp_path / 'rollouts').mkdir()
    (tmp_path / 'rollouts' / '000000.jsonl').touch()
    iterate._check_rollouts(str(tmp_path), 1)
    with pytest.raises(BadInput, match=r'rollouts of 1 steps, and 2 were made; free disk space'):
        iterate._check_rollouts(str(tmp_path), 2)


def test_small_disks_for_curves_and_rollouts_change_no_number(long, straight, tmp_path, small_disk, caplog):
    small_disk(tmp_path / 'tensorboard', 8 << 10)
    small_disk(tmp_path / 'rollouts', 8 << 10)
    small_disk(tmp_path / 'profile', 8 << 10)
    train.run(config(), str(tmp_path), profile=(1, 2))
    assert_equal(tmp_path, straight, rollouts=False)
    assert f'of {tmp_path} could not be written and are missing' in caplog.text
    kinds = {row['kind'] for row in recorded_events(tmp_path) if row['event'] == 'dropped'}
    assert kinds == {'tensorboard', 'rollouts', 'profile'}
    written = os.listdir(tmp_path / 'rollouts')
    assert 0 < len(written) < 4
    for name in written:  # whole or not at all
        assert (tmp_path / 'rollouts' / name).read_bytes() == (straight / 'rollouts' / name).read_bytes()
    assert not [names for _, _, names in os.walk(tmp_path / 'profile') if names]


def test_metrics_that_cannot_be_written_stop_the_run_and_then_it_goes_on(straight, tmp_path, monkeypatch):
    append = files.append_whole

    def full(file, content):
        if b'"step": 3,' in content and b'loss' in content:
            _half(file, content)
        append(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, 'append_whole', full)
        for _ in range(2):  # the second time still without space
            with pytest.raises(CannotWrite, match=r'metrics.jsonl: No space left on device; make space, then'):
                train.run(config(), str(tmp_path))
            assert [row['step'] for row in tiny_run.rows(tmp_path)] == [0, 1, 2]
            assert lock.FILE not in os.listdir(tmp_path)
    train.run(config(), str(tmp_path))
    assert_equal(tmp_path, straight)


@late
def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_then_it_goes_on(long, straight, tmp_path, monkeypatch):
    save = loop.checkpoint.save

    def full(checkpoints, state):
        if int(state.step) == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        save(checkpoints, state)

    with monkeypatch.context() as patch, files_of_at_most(1 << 40):
        patch.setattr(loop.checkpoint, 'save', full)
        with pytest.raises(CannotWrite, match=r'checkpoints: File too large'):  # by a thread of Orbax's
            train.run(config(), str(tmp_path))
    assert [name for name in os.listdir(tmp_path / 'checkpoints') if name.isdigit()] == ['2']
    train.run(config(), str(tmp_path))
    assert_equal(tmp_path, straight)
    assert sorted(os.listdir(tmp_path / 'checkpoints')) == ['2', '4']  # what was half written is gone


def test_a_folder_that_is_removed_stops_the_run(tmp_path, monkeypatch):
    write = Writer.step

    def step(self, step, *rest):
        if step == 1:
            os.rename(tmp_path / 'run', tmp_path / 'moved')
        write(self, step, *rest)

    monkeypatch.setattr(Writer, 'step', step)
    with pytest.raises(CannotWrite, match=r'No such file or directory; bring the folder back'):
        train.run(config(), str(tmp_path / 'run'))


@late
@pytest.mark.parametrize('size', ['300k', '2m'])
def test_a_run_on_a_small_disk_stops_and_goes_on_when_there_is_space(long, straight, tmp_path, small_disk, size):
    workdir = tmp_path / 'disk' / 'run'
    small_disk(tmp_path / 'disk', size)
    with pytest.raises(CannotWrite, match='No space left on device'):
        train.run(config(), str(workdir))
    small_disk(tmp_path / 'disk', '64m')
    train.run(config(), str(workdir))
    assert_equal(workdir, straight)


def test_a_disk_that_is_full_or_read_only_from_the_start_is_named_before_anything_is_compiled(tmp_path, small_disk):
    small_disk(tmp_path / 'disk', '64k')
    with contextlib.suppress(OSError), open(tmp_path / 'disk' / 'full', 'wb', buffering=0) as file:
        files.append_whole(file, bytes(1 << 20))
    began = time.monotonic()
    with pytest.raises(CannotWrite, match=r'owner.json: No space left on device; make space'):
        train.run(config(), str(tmp_path / 'disk' / 'run'))
    assert os.listdir(tmp_path / 'disk') == ['full']
    subprocess.run(['mount', '-o', 'remount,ro', tmp_path / 'disk'], check=True)
    with pytest.raises(BadInput, match=r'--workdir = .*cannot be written to: Read-only file system; choose another'):
        train.run(config(), str(tmp_path / 'disk' / 'run'))
    assert time.monotonic() - began < 1


SMALL = [
    *tiny_run.FLAGS,
    '--config.rollout.max_tokens=8',
    '--config.supervised.updates=0',
    '--config.evaluation.prompts=6',
    '--config.evaluation.samples=2',
    '--config.checkpoint.every=2',
    '--config.log.rollouts=1',
    '--config.steps=12',
]


def command(workdir):
    """(exit status, stderr) of a run as users start it."""
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax.train', '--config=arithmetic', f'--workdir={workdir}', *SMALL],
        cwd=ROOT,
        env=os.environ | {'XLA_FLAGS': quick_compile.FLAGS},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize('folder', ['.', 'tensorboard', 'rollouts', 'checkpoints'])
@pytest.mark.parametrize('size', ['300k', '1m', '2m', '9m'])
def test_no_small_disk_hangs_a_command(long, tmp_path, small_disk, folder, size):
    assert command(tmp_path / 'straight')[0] == 0
    workdir = tmp_path / 'run'
    small_disk(workdir / folder, size)
    status, errors = command(workdir)
    assert 'Traceback' not in errors, errors
    if status:
        assert status == CannotWrite.status == 44
        assert len([line for line in errors.splitlines() if line.startswith('error')]) == 1, errors
        assert errors.splitlines()[-1].startswith(f'error: cannot write {workdir}'), errors
        small_disk(workdir / folder, '200m')
        status, errors = command(workdir)
    assert status == 0, errors
    for name in ('metrics.jsonl', 'evaluations.jsonl'):
        assert (workdir / name).read_bytes() == (tmp_path / 'straight' / name).read_bytes()
