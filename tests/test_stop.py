"""SIGTERM and Ctrl-C: the step at hand is finished and saved, and the same command goes on."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from grpo_jax import train
from grpo_jax.errors import BadInput, Stopped
from grpo_jax.run import metrics, watch
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def stop_after(monkeypatch):
    """A function (title, step, signal): the signal comes while that step is written down, the first time."""
    write, waiting = metrics.Writer.step, {}

    def step(self, step, *rest):
        write(self, step, *rest)
        number = waiting.pop((self._steps.text, step), None)
        if number is not None:
            os.kill(os.getpid(), number)

    def stop(title, step, number):
        waiting[title, step] = number

    monkeypatch.setattr(metrics.Writer, 'step', step)
    return stop


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, stop_after):
    config = tiny_run.config(steps=2, supervised__updates=3)
    stop_after('cold start', 1, signal.SIGINT)
    stop_after('train', 0, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Stopped, match=r'after step 1 of .*cold_start, .*the same command goes on') as stopped:
        train.run(config, str(tmp_path / 'run'))
    assert stopped.value.status == 130
    with pytest.raises(Stopped, match=r'after step 0 of .*run, .*the same command goes on') as stopped:
        train.run(config, str(tmp_path / 'run'))
    assert stopped.value.status == 42
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    train.run(config, str(tmp_path / 'run'))
    train.run(config, str(tmp_path / 'straight'))
    for name in ('cold_start/metrics.jsonl', 'metrics.jsonl', 'evaluations.jsonl'):
        assert (tmp_path / 'run' / name).read_bytes() == (tmp_path / 'straight' / name).read_bytes()


def test_the_second_ctrl_c_stops_at_once(capsys):
    with watch.Watch(0) as watched:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        assert watched.stopping == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)
    assert 'Ctrl-C: stopping after this step, with a checkpoint; once more stops at once\n' in capsys.readouterr().err


def test_a_background_job_goes_on_ignoring_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watch.Watch(0) as watched:
            os.kill(os.getpid(), signal.SIGINT)
            assert not watched.stopping
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_may_watch_but_hears_no_signal():
    stopping = []

    def loop():
        with watch.Watch(0) as watched:
            stopping.append(watched.stopping)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert stopping == [0]


COMMAND = """
import threading, time
from grpo_jax.run import cli

def main():
    threading.Thread(target=time.sleep, args=[60]).start()  # as one that compiles
    print('begun', flush=True)
    time.sleep(60)

cli.run(main)
"""


def test_ctrl_c_before_the_first_step_leaves_one_line_and_status_130():
    process = subprocess.Popen(
        [sys.executable, '-c', COMMAND], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == 'begun\n'
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)  # the thread would take longer
    assert process.returncode == 130 and errors == 'stopped by Ctrl-C\n'


@pytest.mark.parametrize(
    'error, line',
    [
        (BadInput('steps', 0, 'must be at least 1'), 'error: steps = 0: must be at least 1'),
        (Stopped('runs/x', 3), 'stopped after step 3 of runs/x, which is saved; the same command goes on'),
    ],
)
def test_a_notebook_shows_one_line_and_no_traceback(error, line):
    assert error._render_traceback_() == [line]  # IPython prints these lines
