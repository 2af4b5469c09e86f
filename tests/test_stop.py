"""SIGTERM, Ctrl-C, SIGHUP, exceptions: what there is is saved, and the same command goes on."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

from grpo_jax import evaluate, rewards, train
from grpo_jax.errors import BadInput, CannotWrite, Stopped
from grpo_jax.hosts import processes
from grpo_jax.run import loop, signals
from grpo_jax.run.writer import Writer
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def stop_after(monkeypatch):
    """A function (title, step, signal): the signal comes while that step is written down, the first time."""
    write, waiting = Writer.step, {}

    def step(self, step, *rest):
        write(self, step, *rest)
        number = waiting.pop((self._steps.text, step), None)
        if number is not None:
            os.kill(os.getpid(), number)

    def stop(title, step, number):
        waiting[title, step] = number

    monkeypatch.setattr(Writer, 'step', step)
    return stop


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    """The workdir of a run that nothing has stopped."""
    workdir = tmp_path_factory.mktemp('runs') / 'straight'
    train.run(config(), str(workdir))
    return workdir


def config():
    return tiny_run.config(steps=4, supervised__updates=3, checkpoint__every=3)


def assert_equal(workdir, straight):
    for name in ('cold_start/metrics.jsonl', 'metrics.jsonl', 'evaluations.jsonl'):
        assert (workdir / name).read_bytes() == (straight / name).read_bytes(), name
    policies = [evaluate.open_policy(evaluate.open_recorded(str(folder)))[0] for folder in (workdir, straight)]
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, policies))


STOPS = {  # the signal that comes at a step, and where the run says that it stands
    ('cold start', 1): (signal.SIGINT, '2 of 3 steps; .*cold_start is saved'),
    ('train', 0): (signal.SIGTERM, '1 of 4 steps; .*run is saved'),
    ('train', 1): (signal.SIGHUP, '2 of 4 steps; .*run is saved'),
    ('train', 3): (signal.SIGINT, '4 of 4 steps; .*run is saved'),  # the last step
}


@pytest.mark.parametrize('places', [[('train', 0), ('train', 3)], list(STOPS)], ids=['twice', 'everywhere'])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(request, straight, tmp_path, stop_after, places):
    if len(places) > 2:
        request.getfixturevalue('long')
    for place in places:
        stop_after(*place, STOPS[place][0])
    handlers = [signal.getsignal(number) for number in signals.NAMES]
    for place in places:
        with pytest.raises(Stopped, match=f'after {STOPS[place][1]}, .*the same command goes on') as stopped:
            train.run(config(), str(tmp_path / 'run'))
        assert stopped.value.status == 42
        assert [signal.getsignal(number) for number in signals.NAMES] == handlers
    train.run(config(), str(tmp_path / 'run'))
    assert_equal(tmp_path / 'run', straight)


class Failing:
    """A reward that raises in the calls `away`, and after `spared` calls for some completions."""

    def __init__(self, spared, away=range(0)):
        self.calls, self.spared, self.away = itertools.count(), spared, away

    def __call__(self, completion, example):
        call = next(self.calls)
        if call in self.away or (call >= self.spared and len(completion) % 4 == 1):
            raise KeyError('the service is away')
        return float(len(completion) % 3)


def test_a_reward_that_fails_saves_the_last_finished_step_and_goes_on_bit_for_bit(tmp_path, monkeypatch, capsys):
    changed = tiny_run.config(seed=2, steps=3, supervised__updates=0, checkpoint__every=100, data__prompts_per_step=4)
    changed.reward.parts, changed.reward.verifier = (('mine', 1.0),), ''
    changed.reward.retries, changed.reward.most_missing = 0, 0.9
    monkeypatch.setattr(evaluate.Evaluator, '__call__', lambda *_: {'greedy': 0.0})  # which calls the reward too
    rewarded = Failing(17, range(33, 49))  # after one call to try it: all of step 2, and some of step 1
    with pytest.raises(rewards.RewardsMissing, match=r'16 of 16 completions.*the service is away') as error:
        train.run(changed, str(tmp_path / 'run'), functions={'mine': rewarded})
    assert error.value.status == 47  # launchers start it again
    assert sorted(os.listdir(tmp_path / 'run' / 'checkpoints')) == ['2']
    assert f'2 steps of {tmp_path}/run are saved; the same command goes on from there' in capsys.readouterr().err
    train.run(changed, str(tmp_path / 'run'), functions={'mine': Failing(1)})
    said = capsys.readouterr().err
    assert 'train: goes on after 2 of 3 steps\n' in said and 'train: 3 of 3, step 2, reward' in said
    train.run(changed, str(tmp_path / 'run'), functions={'mine': Failing(1)})
    assert 'train: finished after 3 steps; raise steps to go on\n' in capsys.readouterr().err
    shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '3')  # as if the run had been killed before it was written
    train.run(changed, str(tmp_path / 'run'), functions={'mine': Failing(1)})
    assert 'train: goes on after 2 of 3 steps, and does 1 more again, of which there' in capsys.readouterr().err
    train.run(changed, str(tmp_path / 'straight'), functions={'mine': Failing(17)})
    assert (tmp_path / 'run' / 'metrics.jsonl').read_bytes() == (tmp_path / 'straight' / 'metrics.jsonl').read_bytes()
    first, *later = [row['reward_missing'] for row in tiny_run.rows(tmp_path / 'run')]
    assert first == 0 and later[0] > 0


def test_an_exception_after_the_update_keeps_the_older_checkpoint(long, straight, tmp_path, monkeypatch):
    def fail(self, step, row, speeds=None):
        raise RuntimeError('broken')

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, 'log', lambda self, step, *rest: (fail if step == 1 else log)(self, step, *rest))
        with pytest.raises(RuntimeError, match='broken'):
            train.run(config(), str(tmp_path / 'run'))
    train.run(config(), str(tmp_path / 'run'))
    assert_equal(tmp_path / 'run', straight)


log = loop.Loop.log


def test_the_second_ctrl_c_stops_at_once(capsys):
    with signals.Signals(0) as heard:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        assert heard.stopping
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)
    assert 'Ctrl-C: stopping after this step, with a checkpoint; once more stops at once\n' in capsys.readouterr().err


def test_a_background_job_goes_on_ignoring_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.Signals(0) as heard:
            os.kill(os.getpid(), signal.SIGINT)
            assert not heard.stopping
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_may_listen_but_hears_no_signal():
    stopping = []

    def loop():
        with signals.Signals(0) as heard:
            stopping.append(heard.stopping)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert stopping == [0]


# what a command is at when a signal comes, in the main thread
COMMAND = """
import hashlib, sys, threading, time
from grpo_jax.hosts import lock
from grpo_jax.run import cli, signals

def compute():  # as a compiler does: no handler of Python's runs before its end
    print('begun', flush=True)
    hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 30)

def nothing():
    compute()

def run():
    with lock.own(sys.argv[1]):
        compute()

def step():
    with lock.own(sys.argv[1]), signals.Signals(0) as heard:
        heard.has_progress = True
        print('begun', flush=True)
        while not heard.stopping:
            time.sleep(0.01)
        print('asked', flush=True)
        compute()

def threads():
    threading.Thread(target=time.sleep, args=[60]).start()
    print('begun', flush=True)
    time.sleep(60)

main = globals()[sys.argv[2]]
del sys.argv[2:]
cli.run(main)
"""


def start(workdir, main):
    return subprocess.Popen(
        [sys.executable, '-c', COMMAND, str(workdir), main],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_ctrl_c_in_a_command_that_is_no_run_leaves_one_line_and_status_130(tmp_path):
    process = start(tmp_path, 'threads')
    assert process.stdout.readline() == 'begun\n'
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)  # the thread would take longer
    assert process.returncode == 130 and errors == 'stopped by Ctrl-C\n'


@pytest.mark.parametrize('number', signals.NAMES)
def test_a_signal_while_a_run_compiles_ends_it_at_once(tmp_path, number):
    process = start(tmp_path / 'run', 'run')
    assert process.stdout.readline() == 'begun\n'
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 3
    name = signals.NAMES[number]
    assert process.returncode == 42
    assert errors == f'{name}: stopped, with nothing to finish; the same command goes on with {tmp_path}/run\n'
    assert not (tmp_path / 'run').exists()  # the lock is gone too


@pytest.mark.parametrize('number', signals.NAMES)
def test_a_signal_in_a_step_waits_for_its_end_and_a_second_one_does_not(tmp_path, number):
    process = start(tmp_path / 'run', 'step')
    assert process.stdout.readline() == 'begun\n'
    process.send_signal(number)
    assert [process.stdout.readline() for _ in range(2)] == ['asked\n', 'begun\n']
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    first, second = errors.splitlines()
    assert first == f'{signals.NAMES[number]}: stopping after this step, with a checkpoint; once more stops at once'
    assert second == f'{signals.NAMES[number]} once more: stopped at once; the same command goes on'
    assert not (tmp_path / 'run').exists()


def test_what_nohup_ignores_stays_ignored(tmp_path):
    process = subprocess.Popen(
        ['nohup', sys.executable, '-c', COMMAND, str(tmp_path / 'run'), 'step'],
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == 'begun\n'
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    output, errors = process.communicate(timeout=30)
    assert not output and 'SIGHUP' not in errors


def test_a_terminal_that_is_gone_stops_no_run(tmp_path):
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, '-c', COMMAND, str(tmp_path / 'run'), 'step'],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    assert process.stdout.readline() == 'begun\n'
    os.close(ours)  # from here on writing to stderr is an error
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == 'asked\n'
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    'error, line',
    [
        (BadInput('steps', 0, 'must be at least 1'), 'error: steps = 0: must be at least 1'),
        (Stopped('runs/x', 3, 6), 'stopped after 3 of 6 steps; runs/x is saved, and the same command goes on'),
        (
            CannotWrite('runs/x/metrics.jsonl', OSError(28, 'No space left on device')),
            'error: cannot write runs/x/metrics.jsonl: No space left on device; make space, then the same command '
            'goes on',
        ),
    ],
)
def test_a_notebook_shows_one_line_and_no_traceback(error, line):
    assert error._render_traceback_() == [line]  # IPython prints these lines


def test_a_step_whose_row_can_be_read_is_progress(tmp_path, monkeypatch):
    seen, step = [], Writer.step

    def step_and_see(*arguments):
        seen.append(signals._loops[-1].has_progress)
        return step(*arguments)

    monkeypatch.setattr(Writer, 'step', step_and_see)
    train.run(tiny_run.config(steps=2), str(tmp_path / 'run'))
    assert seen == [True, True]


def test_the_first_process_ends_though_its_session_has_ended_meanwhile(monkeypatch):
    told = []
    client = types.SimpleNamespace(key_value_set=lambda key, _: told.append(key))  # and no messages any more
    monkeypatch.setattr(processes, '_client', lambda: client)
    monkeypatch.setattr(processes.distributed.global_state, 'num_processes', 2)
    processes.leave('stopped', 42)
    assert told == [f'{processes.FAILED}0', f'{processes.LEFT}0']
