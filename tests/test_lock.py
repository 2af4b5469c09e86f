"""owner.json: a workdir has one owner, who is gone when the process is."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from grpo_jax import reward_model, supervised, train
from grpo_jax.errors import BadInput, CannotWrite, InUse
from grpo_jax.hosts import lock, processes
from grpo_jax.run.loop import owns_workdir
from grpo_jax.run.rows import EVENTS
from grpo_jax.tools import iterate, pipeline, sweep
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def soon(monkeypatch):
    """Beats and patience a hundred times as fast."""
    for name in ('BEAT', 'STALE', 'PATIENCE', 'SETTLE', 'PARTIAL'):
        monkeypatch.setattr(lock, f'{name}_SECONDS', getattr(lock, f'{name}_SECONDS') / 100)


def owner(folder, **changes):
    """Writes owner.json as another process has left it."""
    record = lock._identity() | {'started': '2026-01-02 03:04:05 UTC', 'beat': int(time.time()), **changes}
    (folder / lock.FILE).write_text(json.dumps(record), encoding='utf8')
    return record


def dead_process():
    process = subprocess.Popen([sys.executable, '-c', ''])
    process.wait()
    return process.pid


def test_the_owner_is_named_while_it_runs_and_leaves_nothing(tmp_path):
    folder = tmp_path / 'a' / 'run'
    with lock.own(str(folder)):
        record = json.loads((folder / lock.FILE).read_text(encoding='utf8'))
        assert (record['process'], record['host']) == (os.getpid(), socket.gethostname())
        assert lock.owned_folders() == [os.path.realpath(folder)]
    assert not list(tmp_path.iterdir()) and not lock.owned_folders()


def test_an_exception_gives_the_folder_back_and_keeps_what_is_in_it(tmp_path):
    with pytest.raises(KeyboardInterrupt), lock.own(str(tmp_path / 'run')):
        (tmp_path / 'run' / 'config.json').touch()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path / 'run') == ['config.json']
    with lock.own(str(tmp_path / 'run')):
        pass


def test_a_living_owner_is_named_and_keeps_the_folder(tmp_path):
    process = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)
    owner(tmp_path, process=process.pid, birth=lock._birth(process.pid))
    message = f'process {process.pid} on {socket.gethostname()}, begun at 2026-01-02 03:04:05 UTC, is using it'
    before = (tmp_path / lock.FILE).read_bytes()
    with pytest.raises(InUse, match=message), lock.own(str(tmp_path)):
        pass
    assert (tmp_path / lock.FILE).read_bytes() == before
    process.kill()  # a process that is dead and that nobody has waited for is dead
    while lock._birth(process.pid) is not None:
        time.sleep(0.01)
    with lock.own(str(tmp_path)):
        pass
    process.communicate()


@pytest.mark.parametrize('changes', [{'process': 'dead'}, {'birth': '1'}, {}])
def test_a_dead_process_of_this_machine_owns_nothing(tmp_path, changes):
    # one that has ended, one whose number another process has by now, and a run of this very process that has ended
    owner(tmp_path, **({'process': dead_process()} if 'process' in changes else changes))
    began = time.monotonic()
    with lock.own(str(tmp_path)):
        assert time.monotonic() - began < 1
    assert not os.listdir(tmp_path)


def test_one_process_does_not_own_a_folder_twice_at_a_time(tmp_path):
    with lock.own(str(tmp_path)), pytest.raises(InUse, match='this very process'), lock.own(f'{tmp_path}/.'):
        pass
    with lock.own(str(tmp_path)), lock.own(str(tmp_path / 'cold_start')):
        assert len(lock.owned_folders()) == 2


def test_a_fresh_beat_from_another_host_refuses_at_once(tmp_path):
    owner(tmp_path, host='elsewhere', machine='another')
    began = time.monotonic()
    with pytest.raises(InUse, match='on elsewhere'), lock.own(str(tmp_path)):
        pass
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    'changes',
    [
        {'host': 'elsewhere', 'beat': 0},
        {'host': 'elsewhere', 'beat': 1 << 40},  # of a clock that is wrong
        {},  # by this host's name: a container that was started anew
    ],
)
def test_an_owner_elsewhere_who_stays_silent_is_gone(tmp_path, soon, changes):
    owner(tmp_path, machine='another', **changes)
    with lock.own(str(tmp_path)):
        assert json.loads((tmp_path / lock.FILE).read_text(encoding='utf8'))['process'] == os.getpid()


def test_an_owner_elsewhere_with_a_wrong_clock_keeps_the_folder_while_it_beats(tmp_path):
    owner(tmp_path, host='elsewhere', machine='another', beat=0)
    beating = threading.Timer(0.7, owner, [tmp_path], {'host': 'elsewhere', 'machine': 'another', 'beat': 20})
    beating.start()
    with pytest.raises(InUse, match='on elsewhere'), lock.own(str(tmp_path)):
        pass
    beating.join()


@pytest.mark.parametrize('content', ['', '{"host"', '[]', '{}', '\0' * 40])
def test_a_file_that_a_crash_left_half_written_is_no_owner(tmp_path, soon, content):
    (tmp_path / lock.FILE).write_text(content, encoding='utf8')
    with lock.own(str(tmp_path)):
        pass


def test_the_file_is_written_anew_with_as_many_bytes(tmp_path, soon):
    with lock.own(str(tmp_path)):
        contents = set()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            contents.add((tmp_path / lock.FILE).read_bytes())
            time.sleep(0.05)
        lock.check(str(tmp_path))
    assert len(contents) > 1 and len({len(content) for content in contents}) == 1


@pytest.mark.parametrize('what', ['taken', 'removed'])
def test_an_owner_notices_that_it_is_one_no_longer(tmp_path, soon, what):
    with lock.own(str(tmp_path)):
        if what == 'taken':
            theirs = owner(tmp_path, host='elsewhere', process=7, token='theirs')
        else:
            os.remove(tmp_path / lock.FILE)
        time.sleep(0.6)
        error, text = (InUse, 'process 7') if what == 'taken' else (CannotWrite, 'has been removed')
        with pytest.raises(error, match=text):
            lock.check(str(tmp_path), settled=True)
    if what == 'taken':  # and does not remove the other's file
        assert json.loads((tmp_path / lock.FILE).read_text(encoding='utf8')) == theirs


CONTENDER = """
import sys, time
from grpo_jax.errors import InUse
from grpo_jax.hosts import lock
print('ready', flush=True)
input()
try:
    with lock.own(sys.argv[1]):
        time.sleep(1.5)
        lock.check(sys.argv[1], settled=True)
        print('owner')
except InUse:
    print('refused')
"""


@pytest.mark.parametrize('left', [False, True])
def test_of_processes_that_come_together_one_becomes_the_owner(tmp_path, left):
    if left:  # of a dead process, which all see at the same moment
        owner(tmp_path, process=dead_process())
    contenders = [
        subprocess.Popen(
            [sys.executable, '-c', CONTENDER, str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for _ in range(3)
    ]
    for contender in contenders:
        assert contender.stdout.readline() == 'ready\n'
    for contender in contenders:
        contender.stdin.write('\n')
    outcomes = sorted(contender.communicate(timeout=60)[0].strip() for contender in contenders)
    assert outcomes == ['owner', 'refused', 'refused']


def test_only_the_first_of_several_processes_writes_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, 'speaks', lambda: False)
    with lock.own(str(tmp_path)):
        assert not os.listdir(tmp_path) and lock.owned_folders()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(BadInput, match=r'--to = .* is a file; name a folder'), lock.own(str(tmp_path / 'file'), '--to'):
        pass
    for path in (str(tmp_path / 'file' / 'run'), '/proc/none/run', f'{tmp_path}/{"x" * 300}'):
        with pytest.raises(BadInput, match=r'--workdir = .*cannot be written to'), lock.own(path):
            pass


def test_a_file_that_cannot_be_written_is_named_before_the_run(tmp_path, monkeypatch):
    (tmp_path / EVENTS).touch()
    monkeypatch.setattr(os, 'access', lambda path, mode: False)  # root may write anything
    with pytest.raises(BadInput, match='cannot be written to; make it writable, or name another folder'):
        owns_workdir(lambda workdir: pytest.fail('has run'))(str(tmp_path))


RUNS = {
    'train': train.run,
    'supervised': supervised.run,
    'reward_model': reward_model.run,
    'iterate': lambda config, workdir: iterate.run(config, workdir, 1, 'none'),
    'pipeline': lambda config, workdir: pipeline.run([], workdir),
    'sweep': lambda config, workdir: sweep.run(lambda preset: config, ['grpo'], 1, workdir),
}


@pytest.mark.parametrize('name', RUNS)
def test_a_run_on_a_folder_in_use_is_refused_and_changes_nothing(tmp_path, name):
    record = owner(tmp_path, host='elsewhere', machine='another')
    with pytest.raises(InUse):
        RUNS[name](tiny_run.config(), str(tmp_path))
    assert os.listdir(tmp_path) == [lock.FILE]
    assert json.loads((tmp_path / lock.FILE).read_text(encoding='utf8')) == record


@pytest.mark.parametrize('command', ['train', 'supervised', 'reward_model', 'iterate', 'sweep'])
def test_each_command_is_refused_in_seconds(request, tmp_path, command):
    if command != 'train':  # above each is refused without its command
        request.getfixturevalue('long')
    arguments = {'iterate': ['--labelled=none'], 'sweep': ['--presets=grpo']}.get(command, [])
    config = {'iterate': 'arithmetic_iterative', 'reward_model': 'arithmetic_reward'}.get(command, 'arithmetic')
    with lock.own(str(tmp_path)):
        before = os.times()
        done = subprocess.run(
            [sys.executable, '-m', 'grpo_jax', command, f'--config={config}', f'--workdir={tmp_path}', *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        after = os.times()
    assert done.returncode == InUse.status == 45
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: --workdir = '{tmp_path}': process {os.getpid()} on {socket.gethostname()}, begun at"
    )
    took = after.children_user + after.children_system - before.children_user - before.children_system
    assert took < 5  # of the processor: others use it too; imports are most of it
    assert not os.listdir(tmp_path)


HOLDER = """
import sys, time
from grpo_jax.hosts import lock
with lock.own(sys.argv[1]):
    print('begun', flush=True)
    time.sleep(60)
"""


def test_kill_leaves_a_lock_that_the_next_run_takes_over(tmp_path):
    process = subprocess.Popen(
        [sys.executable, '-c', HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'begun\n'
    with pytest.raises(InUse, match=f'process {process.pid} on'), lock.own(str(tmp_path)):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert os.listdir(tmp_path) == [lock.FILE]
    with lock.own(str(tmp_path)):
        pass
    assert not os.listdir(tmp_path)
