"""Real processes on loopback train as one: bit for bit, through preemption and kill -9."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_jax import evaluate, rewards
from grpo_jax.errors import BadInput, CannotWrite, InUse, Stopped
from grpo_jax.hosts import lock, processes
from grpo_jax.models.hf import families
from grpo_jax.run import signals
from tests import family_model, quick_compile, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEVICES, STEPS = 4, 4
# data and fsdp both cut, so that a process holds some of each
SMALL = [
    *tiny_run.FLAGS,
    '--config.rollout.max_tokens=8',
    '--config.evaluation.prompts=6',
    '--config.evaluation.samples=4',
    '--config.checkpoint.every=2',
    '--config.log.rollouts=1',
    '--config.mesh.data=2',
    '--config.mesh.fsdp=2',
    f'--config.steps={STEPS}',
    '--config.supervised.updates=0',  # two programs less to compile, in each process
]


def free_port():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


class Run:
    """The same command in as many processes; count: of them, with DEVICES together, or the devices of each."""

    def __init__(self, workdir, count, *flags):
        devices = [DEVICES // count] * count if isinstance(count, int) else count
        count = len(devices)
        # a CPU cuts up its sums by its number of threads, which is at least that of its devices: NPROC sets it
        environment = os.environ | {'XLA_FLAGS': quick_compile.FLAGS, 'NPROC': str(sum(devices))}
        if '--config.mesh.transport=devices' in flags:
            environment['JAX_CROSS_HOST_TRANSPORT_ADDRESSES'] = '127.0.0.1:0'
        command = [
            sys.executable,
            '-m',
            'grpo_jax.train',
            '--config=configs/arithmetic.py:grpo',
            f'--workdir={workdir}',
            *SMALL,
            f'--coordinator=127.0.0.1:{free_port()}',
            f'--processes={count}',
            *flags,
        ]
        self.workdir = workdir
        self.processes = [
            subprocess.Popen(
                [*command, f'--process={i}'],
                cwd=ROOT,
                env=environment
                | {
                    'JAX_NUM_CPU_DEVICES': str(devices[i]),
                    'JAX_CROSS_HOST_TRANSFER_SOCKET_ADDRESS': f'127.0.0.1:{free_port()}'
                    if '--config.mesh.transport=devices' in flags
                    else '',
                },
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for i in range(count)
        ]

    def send(self, process, what, rows):
        """Sends a signal to a process when metrics.jsonl has that many rows."""
        path = pathlib.Path(self.workdir, 'metrics.jsonl')
        while not path.exists() or path.read_text(encoding='utf8').count('\n') < rows:
            assert self.processes[0].poll() is None, self.processes[0].stderr.read()
            time.sleep(0.01)
        self.processes[process].send_signal(what)

    def ends(self, timeout=400):
        """(exit status, stderr) of each process."""
        try:
            errors = [process.communicate(timeout=timeout)[1] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(process.returncode, text) for process, text in zip(self.processes, errors, strict=True)]

    def succeeds(self):
        for status, errors in self.ends():
            assert status == 0, errors


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    """The workdir of one process; it has a coordinator, so that its sums go through the same library."""
    run = Run(tmp_path_factory.mktemp('alone'), 1)
    run.succeeds()
    return run.workdir


def assert_equal(workdir, expected):
    names = [
        'metrics.jsonl',
        'evaluations.jsonl',
        *(['cold_start/metrics.jsonl'] if (expected / 'cold_start').exists() else []),
        'programs.json',
        *(f'rollouts/{step:06d}.jsonl' for step in range(STEPS)),
    ]
    for name in names:
        assert (workdir / name).read_bytes() == (expected / name).read_bytes(), name
    policies = [
        jax.device_get(evaluate.open_policy(evaluate.open_recorded(str(folder), trust=True))[0])
        for folder in (workdir, expected)
    ]
    jax.tree.map(np.testing.assert_array_equal, *policies)


def test_two_processes_equal_one(alone, tmp_path):
    Run(tmp_path, 2).succeeds()
    assert_equal(tmp_path, alone)


def test_two_processes_equal_one_with_steps_that_do_not_wait(long, tmp_path):
    flags = ['--config.collection.in_flight=4', '--config.collection.staleness=1', '--config.rollout.max_tokens=90']
    for count in (1, 2):
        Run(tmp_path / f'{count}', count, *flags, '--config.algorithm.correction=truncated').succeeds()
    assert any(row['carried_rows'] for row in tiny_run.rows(tmp_path / '2'))
    assert_equal(tmp_path / '2', tmp_path / '1')


def test_two_processes_with_adapters_equal_one_from_their_cold_start_on(long, tmp_path):
    flags = (
        '--config.supervised.updates=1',
        '--config.supervised.batch=8',
        '--config.model.lora.rank=2',
        '--config.optimizer.learning_rate=3e-3',
    )
    Run(tmp_path / 'alone', 1, *flags).succeeds()
    run = Run(tmp_path / 'two', 2, *flags)
    run.send(1, signal.SIGKILL, rows=2)
    run.ends()
    Run(tmp_path / 'two', 2, *flags).succeeds()  # what stays frozen is read again
    assert_equal(tmp_path / 'two', tmp_path / 'alone')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_two_processes_through_preemption_equal_one(long, alone, tmp_path, number):
    run = Run(tmp_path, 2)
    run.send(1, number, rows=2)
    for status, errors in run.ends():
        assert status == 42 and 'the same command goes on' in errors, errors
    assert 0 < len(tiny_run.rows(tmp_path)) < STEPS

    Run(tmp_path, 2).succeeds()
    assert_equal(tmp_path, alone)


def test_two_processes_through_kill_equal_one(long, alone, tmp_path):
    run = Run(tmp_path, 2)
    run.send(1, signal.SIGKILL, rows=2)
    began = time.monotonic()
    (status, errors), _ = run.ends(timeout=90)
    assert status not in (0, 42) and time.monotonic() - began < 60, (status, errors)
    assert 'error: process 0 of 2' in errors or 'another task died' in errors, errors

    Run(tmp_path, 2).succeeds()
    assert_equal(tmp_path, alone)


def test_four_processes_equal_one(long, alone, tmp_path):
    Run(tmp_path, 4).succeeds()
    assert_equal(tmp_path, alone)


@pytest.mark.parametrize('family', families.FAMILIES)
def test_two_processes_equal_one_with_every_family(long, tmp_path, family):
    model = family_model.write(family, tmp_path / 'model')
    for count in (1, 2):
        Run(tmp_path / str(count), count, f'--config.model.path={model}').succeeds()
    assert_equal(tmp_path / '2', tmp_path / '1')


PROCESS = """
import sys
import jax
import numpy as np
from grpo_jax.hosts import processes
from grpo_jax.sharding import mesh, specs
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families

address, process, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with processes.session(address, 2, process):
    c = families.load_config(folder)
    here = transformer.map_table(lambda *_: jax.local_devices()[0], transformer.param_table(c))
    whole = jax.device_get(hf.load_params(folder, c, here))
    for shape in [(1, 4, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)]:
        devices = mesh.make(dict(zip(mesh.AXES, shape)))
        params = hf.load_params(folder, c, specs.params(transformer.param_table(c), devices))
        jax.tree.map(np.testing.assert_array_equal, processes.fetch(params), whole)
    third = np.float64(1) / 3  # not a float32
    assert processes.gather((third, process)) == [(third, 0), (third, 1)]
    assert processes.exchange_stop('a step', {'reward': 0.5}, stop=process == 1)
    processes.exchange_stop('the next step', {'reward': 0.5 + process})
"""


def test_weights_are_those_of_the_folder_and_what_differs_ends_all(long, tmp_path):
    stored = np.load(os.path.join(ROOT, 'tests/golden/llama.npz'))
    (tmp_path / 'config.json').write_text(str(stored['config']), encoding='utf8')
    save_file(
        {name.removeprefix('weights/'): stored[name] for name in stored if name.startswith('weights/')},
        tmp_path / 'model.safetensors',
    )
    address, environment = (
        f'127.0.0.1:{free_port()}',
        os.environ | {'XLA_FLAGS': quick_compile.FLAGS, 'JAX_NUM_CPU_DEVICES': '2'},
    )
    running = [
        subprocess.Popen(
            [sys.executable, '-c', PROCESS, address, str(process), str(tmp_path)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1, errors
        assert 'at the next step, the processes differ in reward: process 1 of 2 on' in errors, errors


def test_what_differs_is_named_with_the_process_that_is_alone():
    values = [(f'process {i} of 3 on host{i}', {'config.seed': '1' if i == 1 else '0', 'data': 'ab'}) for i in range(3)]
    message = "the processes differ in config.seed: process 1 of 3 on host1 has '1'; the others have '0'"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        processes._check_equal('the start', values)
    processes._check_equal('the start', values[::2])


@pytest.mark.parametrize(
    'given, message',
    [
        ((None, 2, 0), '--coordinator = None'),
        (('here:1', 2, None), '--processes, --process'),
        (('here:1', 2, 2), 'counted from 0'),
        (('here', 2, 0), 'is not HOST:PORT'),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(given, message):
    with pytest.raises(BadInput, match=message), processes.session(*given):
        pass


def test_hosts_of_a_tpu_pod_find_each_other_without_flags(monkeypatch):
    calls = []
    monkeypatch.setattr(processes, '_on_tpu', lambda: True)
    monkeypatch.setattr(processes, '_watch_failures', lambda *_: None)
    monkeypatch.setattr(jax.distributed, 'initialize', lambda *arguments, **_: calls.append(arguments))
    monkeypatch.setattr(jax.distributed, 'shutdown', lambda: calls.append('shutdown'))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Stopped), processes.session(None, None, None):
            raise Stopped('here', 3, 6)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert calls == [(), 'shutdown']


@pytest.mark.parametrize('error', [BadInput('reward', 'mine.py:f', 'raised'), KeyboardInterrupt(), ValueError('other')])
def test_a_process_that_ends_early_tells_the_others_why(monkeypatch, error):
    reported = {}
    monkeypatch.setattr(processes, '_start', lambda *_: True)
    monkeypatch.setattr(processes, 'has_others', lambda: True)
    monkeypatch.setattr(processes, '_watch_failures', lambda *_: None)
    monkeypatch.setattr(processes, '_client', lambda: types.SimpleNamespace(key_value_set=reported.__setitem__))
    monkeypatch.setattr(jax.distributed, 'shutdown', lambda: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ends = SystemExit if isinstance(error, ValueError) else type(error)
        with pytest.raises(ends), processes.session('here:1', 2, 0, end=lambda text, status: sys.exit(status)):
            raise error
    finally:
        signal.signal(signal.SIGTERM, handler)
    ((name, content),) = reported.items()
    text, status = json.loads(content)
    assert name == 'grpo_jax/failed/0' and text.endswith(f' failed: {str(error) or "KeyboardInterrupt"}')
    assert status == {BadInput: 2, KeyboardInterrupt: 130, ValueError: 1}[type(error)]


def test_shares_of_groups_are_together_all(monkeypatch):
    gathered = []
    monkeypatch.setattr(jax, 'process_count', lambda: 3)
    monkeypatch.setattr(processes, 'gather_rows', lambda rows, tree: gathered.append((list(rows), tree)))
    for process in range(3):
        monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
        processes.by_group(lambda groups, column: (groups, column), list('abcde'), list(range(10)))
    assert [row for rows, _ in gathered for row in rows] == list(range(10))
    assert [groups for _, (groups, _) in gathered] == [['a'], ['b', 'c'], ['d', 'e']]
    assert [column for _, (_, column) in gathered] == [rows for rows, _ in gathered]


HANG = (
    'import time; from grpo_jax.run.signals import Signals\n'
    'with Signals(0.2) as s:\n    s.step("step 7")\n    time.sleep(60)'
)


def test_a_step_that_hangs_ends_the_process_with_all_stacks():
    done = subprocess.run([sys.executable, '-c', HANG], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == signals.HUNG
    assert 'error: step 7 has taken more than log.hang_after = 0.2 s' in done.stderr
    assert 'File "<string>", line 4' in done.stderr


def test_a_step_in_time_ends_nothing():
    done = subprocess.run([sys.executable, '-c', HANG.replace('60', '0') + '\ntime.sleep(0.5)'], cwd=ROOT, timeout=60)
    assert done.returncode == 0


# two processes that meet as those of a run do; then one is in a program of the devices, which waits for the other
TOGETHER = """
import sys, time
from absl import flags
from grpo_jax.errors import CannotWrite
from grpo_jax.hosts import files, lock, processes
from grpo_jax.run import cli, signals

processes.POLL_SECONDS, processes.NOTICE_SECONDS = 1, 2  # half of what users wait

def main():
    with lock.own(flags.FLAGS.workdir), signals.Signals(0) as heard:
        processes.exchange_stop('the start', {})
        heard.has_progress = flags.FLAGS.case == 'steps'
        print('begun', flush=True)
        if flags.FLAGS.case == 'full' and flags.FLAGS.process == 1:
            with files.writing('checkpoints'):
                raise OSError(28, 'No space left on device')
        if flags.FLAGS.case == 'raised' and flags.FLAGS.process == 0:
            raise KeyError('the service is away')
        while not processes.exchange_stop('a step', {}, heard.stopping):
            time.sleep(100 if flags.FLAGS.case != 'steps' else 0.1)

flags.DEFINE_string('workdir', None, '')
flags.DEFINE_string('case', None, '')
cli.run(main)
"""


def together(workdir, case):
    """Two processes of TOGETHER."""
    arguments = [f'--workdir={workdir}', f'--case={case}', f'--coordinator=127.0.0.1:{free_port()}', '--processes=2']
    return [
        subprocess.Popen(
            [sys.executable, '-c', TOGETHER, *arguments, f'--process={process}'],
            cwd=ROOT,
            env=os.environ | {'XLA_FLAGS': quick_compile.FLAGS, 'JAX_NUM_CPU_DEVICES': '1'},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]


def end(running):
    """(exit status, stderr) of each process, which must end in a minute; they are killed else."""
    try:
        errors = [process.communicate(timeout=60)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, text) for process, text in zip(running, errors, strict=True)]


def test_a_workdir_in_use_ends_both_processes_with_its_owners_name(tmp_path):
    with lock.own(str(tmp_path)):
        outcomes = end(together(tmp_path, 'lock'))
    for status, errors in outcomes:
        assert status == InUse.status, errors
        assert f'process {os.getpid()} on {socket.gethostname()}, begun at' in errors
        assert 'Traceback' not in errors
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('asked', [0, 1])
def test_ctrl_c_to_one_process_before_the_first_step_ends_both(request, tmp_path, asked):
    if asked == 0:
        request.getfixturevalue('long')
    running = together(tmp_path, 'lock')
    for process in running:
        assert process.stdout.readline() == 'begun\n'
    running[asked].send_signal(signal.SIGINT)
    for status, errors in end(running):
        assert status == 42, errors
        assert 'Ctrl-C: stopped, with nothing to finish; the same command goes on' in errors
        assert 'Traceback' not in errors
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    'case, expected, reason',
    [
        ('full', CannotWrite.status, 'cannot write checkpoints: No space left on device; make space'),
        ('raised', 1, "KeyError: 'the service is away'"),
    ],
)
def test_what_ends_one_process_ends_the_other_with_its_reason(long, tmp_path, case, expected, reason):
    began = time.monotonic()
    outcomes = end(together(tmp_path, case))
    assert time.monotonic() - began < 60
    for status, errors in outcomes:
        assert status == expected, errors
        assert reason in errors or reason.removeprefix('KeyError: ') in errors, errors
    assert 'Traceback' not in outcomes[case == 'raised'][1]


def test_ctrl_c_to_one_process_lets_both_finish_the_step(long, tmp_path):
    running = together(tmp_path, 'steps')
    for process in running:
        assert process.stdout.readline() == 'begun\n'
    running[1].send_signal(signal.SIGINT)
    assert [status for status, _ in end(running)] == [0, 0]


# right where 'away' is not beside this file, and from the third step on raised where it is
JUDGE = """
import pathlib
HERE = pathlib.Path(__file__).parent

def judge(completion, answer):
    rows = HERE / 'run' / 'metrics.jsonl'
    if (HERE / 'away').exists() and rows.exists() and rows.read_text().count(chr(10)) >= 2:
        raise ConnectionError('the judge is away')
    return float(len(completion) % 3)
"""


def test_a_judge_that_stays_away_ends_two_processes_saved_and_then_they_go_on(long, tmp_path):
    (tmp_path / 'judge.py').write_text(JUDGE)
    (tmp_path / 'away').touch()
    judged = [
        f'--config.reward.parts=(("{tmp_path}/judge.py:judge", 1.0),)',
        '--config.reward.verifier=',
        '--config.reward.retries=0',
        '--config.checkpoint.every=100',
    ]
    for status, errors in Run(tmp_path / 'run', 2, *judged).ends():
        assert status == rewards.RewardsMissing.AGAIN and 'the judge is away' in errors, errors
    assert os.listdir(tmp_path / 'run' / 'checkpoints') == ['2']
    (tmp_path / 'away').unlink()
    Run(tmp_path / 'run', 2, *judged).succeeds()
    Run(tmp_path / 'straight', 2, *judged).succeeds()
    assert_equal(tmp_path / 'run', tmp_path / 'straight')


def test_a_full_disk_of_one_process_ends_two_and_then_they_go_on(long, alone, tmp_path):
    disk = tmp_path / 'disk'
    disk.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o']
    if subprocess.run([*mount, 'size=600k', 'tmpfs', disk], capture_output=True).returncode:
        pytest.skip('NO SMALL DISKS: tmpfs cannot be mounted here')
    try:
        began = time.monotonic()
        outcomes = Run(disk / 'run', 2).ends()
        for status, errors in outcomes:
            assert status == CannotWrite.status and 'No space left on device' in errors, errors
            assert 'Traceback' not in errors, errors
        assert time.monotonic() - began < 200
        subprocess.run([*mount, 'remount,size=500m', 'tmpfs', disk], check=True)
        Run(disk / 'run', 2).succeeds()
        assert_equal(disk / 'run', alone)
    finally:
        subprocess.run(['umount', '-l', disk], check=True)
