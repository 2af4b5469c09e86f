"""Programs that want out, or to pass without being right: they score 0, and nothing of them stays on the machine."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from grpo_jax.errors import BadInput
from grpo_jax.workers import sandbox
from grpo_jax.workers.pool import Died, Expired
from tests.rewards.hostile import ATTACKS, CHEATS, ENDED, READS_JUDGE, STOPPED

TESTS = ('assert f(2) == 4', 'assert f(3) == 9')
RIGHT = 'def f(x): return x * x'
LISTING = 'import os\ndef f(x): return os.listdir()'
SANDBOX = sandbox.Sandbox()
JAIL = 4  # processes of a jail that waits: two that keep it, two for the next job


@pytest.fixture(scope='module', autouse=True)
def folder(tmp_path_factory):
    """Where this module's jails have their folders; in the end nothing is in it, and no process knows its name."""
    path = tmp_path_factory.mktemp('jails')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, 'tempdir', str(path))
        yield str(path)
        SANDBOX.close()
    assert processes(path) == [] and os.listdir(path) == []


def run(program, tests=TESTS, names=('f',), setup='', timeout=10.0, memory_mib=512):
    return SANDBOX.run(
        textwrap.dedent(program),
        list(tests),
        names={name: name for name in names},
        setup=setup,
        timeout=timeout,
        memory_mib=memory_mib,
    )


def processes(folder):
    """Ids of the processes that have the folder in their command line, zombies left out."""
    found = []
    for pid in os.listdir('/proc') if os.path.isdir('/proc') else []:
        try:
            with open(f'/proc/{pid}/cmdline', encoding='utf8', errors='replace') as file:
                found += [int(pid)] if pid.isdigit() and str(folder) in file.read() else []
        except OSError:
            continue
    return found


# what a test sees


def test_each_test_passes_or_fails_by_itself():
    assert run(RIGHT, ['assert f(2) == 4', 'assert f(2) == 5', 'raise ValueError', 'assert f(-3) == 9']) == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    'program',
    [
        'def g(x): return x',
        'def f(x): return x',
        'f = 3',
        'def f(x) return x',
        '',
        'f',
        '\0',
        '\ud800',
        'def f(): return 4',
        f'{RIGHT}\nraise ValueError',
    ],
)
def test_wrong_programs_fail(program):
    assert run(program) == [False, False]


def test_a_program_that_failed_does_not_leave_its_names_to_builtins():
    assert run('1 / 0', ['assert max(1, 2) == 2'], names=['max']) == [False]
    assert run('def max(a, b): return -1', ['assert max(1, 2) == 2'], names=['max']) == [False]
    assert run('max = 1', ['assert max([1, 2]) == 2'], names=[]) == [True]  # the tests' own


@pytest.mark.parametrize(
    'value',
    [
        'None',
        'True',
        '-7',
        '3 ** 2000',
        '0.1',
        'float("inf")',
        '"a\\n\\0\\ud800é"',
        'b"\\x00\\xff"',
        '1j',
        '[]',
        '()',
        '[1, [2, (3,)]]',
        '{"a": [1], (1, 2): None}',
        '{1, "b"}',
        'frozenset({(1, 2)})',
        'int',
        '[int, dict]',
    ],
)
def test_plain_data_crosses_both_ways(value):
    program = f'def f(x): return {value}\ndef g(x): return repr(x), x == {value}'
    tests = [f'v = f(0); assert v == {value} and type(v) is type({value})', f'r, same = g({value}); assert same']
    assert run(program, tests, names=['f', 'g']) == [True, True]


def test_objects_of_the_program_can_be_used():
    program = """
        class Node:
            def __init__(self, value): self.value, self.left = value, None
            def add(self, n, *, sign): return self.value + sign * n
        def depth(node): return 1 + depth(node.left) if node else 0
        def count(n): yield from range(n)
    """
    setup = 'root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)'
    tests = [
        'assert depth(root) == 3',
        'assert depth(root.left) == 2',
        'assert root.left.add(1, sign=-1) == 1',
        'assert list(count(3)) == [0, 1, 2]',
        'assert sorted(count(2)) == [0, 1]',
        'assert root == 1',
        'assert depth([root, lambda: 0]) == 1',
        'root.missing',
    ]
    assert run(program, tests, names=['Node', 'depth', 'count'], setup=setup) == [True] * 5 + [False] * 3


def test_every_run_has_the_same_order_of_sets_and_the_same_random_numbers():
    program = 'import random\ndef f(x): return list(set("abcdefgh")), random.random()'
    found = subprocess.run(
        [sys.executable, '-c', f'{program}\nrandom.seed(0)\nprint(f(0))'],
        text=True,
        check=True,
        capture_output=True,
        env={'PYTHONHASHSEED': '0'},
    ).stdout
    for _ in range(2):
        assert run(program, [f'assert f(0) == {found}']) == [True]
        SANDBOX.close()


def test_threads_run_side_by_side():
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append((n, run(RIGHT, [f'assert f({n}) == 4'])))) for n in range(1, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(1, [False]), (2, [True]), (3, [False])]
    SANDBOX.close()  # later tests count processes


@pytest.mark.parametrize(
    'program',
    [
        'for _ in range(100): print("x" * 2 ** 20)',
        'import csv, hashlib, json, tempfile\nwith tempfile.TemporaryFile() as file: assert file.write(b"x")',
        'import threading\nthreads = [threading.Thread(target=print) for _ in range(9)]\n'
        'for t in threads: t.start()\nfor t in threads: t.join()',
        'import os\nos.mkdir("a")\nopen("a/b", "w").write("x")\nos.rename("a/b", "a/c")\n'
        'assert open("a/c").read() == "x"',
        'import signal\nsignal.alarm(5)',
        'try: input()\nexcept EOFError: pass',
        'if __name__ == "__main__": 1 / 0',
    ],
)
def test_what_right_programs_may_do_beside(program, folder):
    assert run(f'{program}\n{RIGHT}') == [True, True]
    assert left_clean(folder)


@pytest.mark.parametrize('limits', [{'timeout': 0.0}, {'memory_mib': -1}])
def test_numbers_that_cannot_work_are_refused(limits):
    with pytest.raises(BadInput, match=f'^{next(iter(limits))} = .*must be above 0'):
        run(RIGHT, **limits)


# programs that are stopped, or end themselves


def left_clean(folder):
    return len(processes(folder)) <= JAIL and run(LISTING, ['assert f(0) == []']) == [True]


@pytest.mark.parametrize('program', STOPPED.values(), ids=STOPPED)
def test_programs_that_do_not_end_are_stopped(program, folder):
    began = time.monotonic()
    with pytest.raises(Expired, match=r'still running after 0\.5 s'):
        run(program, timeout=0.5)
    assert time.monotonic() - began < 5
    assert left_clean(folder)


@pytest.mark.parametrize('program', ENDED.values(), ids=ENDED)
def test_programs_that_end_or_exhaust_themselves_fail(program, folder):
    assert run(program, memory_mib=256) == [False, False]
    assert left_clean(folder)


# programs that would pass without being right


@pytest.mark.parametrize('program', CHEATS.values(), ids=CHEATS)
def test_cheats_fail(program, folder):
    tests = ['assert f(2) == 73501', 'assert f(3) >= 42017', 'assert not f(2) != 73501', 'assert f(2) in {73501, 9}']
    try:
        assert run(program, tests, timeout=3.0) == [False] * 4
    except Expired:
        assert 'while True' in program
    assert left_clean(folder)


@pytest.fixture
def target(tmp_path):
    """(pid, path): a process and a file that attacks are to leave alone."""
    path = tmp_path / 'file'
    path.write_text('untouched')
    with subprocess.Popen(['sleep', '100'], env=os.environ | {'SECRET': 'hidden'}) as process:
        yield process.pid, str(path)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize('attack', ATTACKS)
def test_attacks_fail(attack, target, folder):
    layer, program = ATTACKS[attack]
    if layer not in SANDBOX.layers():
        pytest.skip(f'{layer} is not to be had here')
    before = os.stat(target[1])
    assert run(program, [f'assert attack{target}'], names=['attack']) == [False]
    assert os.stat(target[1]) == before and os.listdir(os.path.dirname(target[1])) == ['file']
    assert left_clean(folder)


@pytest.mark.parametrize('attack', ATTACKS)
def test_attacks_succeed_outside(attack, target):
    # else the test above could not fail
    if attack.startswith('reads memory') and os.path.exists('/proc/sys/kernel/yama'):
        pytest.skip('this kernel refuses it to everybody')
    program = f'{textwrap.dedent(ATTACKS[attack][1])}\nprint(attack{target})'
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    found = subprocess.run([sys.executable, '-c', program], text=True, stdout=subprocess.PIPE, pass_fds=descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    assert found.stdout == 'True\n'


# what is left where a layer is missing, and when processes are killed


@pytest.fixture
def without(monkeypatch, tmp_path):
    """A function that starts jails without the named functions of jail.py from then on."""

    def change(*functions):
        script = tmp_path / 'jail.py'
        refused = ''.join(f'jail.{name} = lambda *_: None\n' for name in functions)
        script.write_text(
            'import importlib.util, sys\n'
            f'spec = importlib.util.spec_from_file_location("jail", {sandbox.SCRIPT!r})\n'
            'jail = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(jail)\n'
            f'{refused}jail.main(sys.argv[1])\n'
        )
        SANDBOX.close()
        monkeypatch.setattr(sandbox, 'SCRIPT', str(script))

    yield change
    SANDBOX.close()


LAYERS = {
    'namespaces': 'enter_namespaces',
    'own file system': 'mount_folder',
    'landlock': 'landlock_rules',
    'system calls': 'call_filter',
}


@pytest.mark.parametrize('missing', [[name] for name in LAYERS] + [['namespaces', 'landlock'], list(LAYERS)])
def test_missing_layers_are_reported_and_made_up_for(missing, without, target, folder, caplog):
    without(*(LAYERS[name] for name in missing))
    assert not set(missing) & set(SANDBOX.layers())
    assert ('held by' in caplog.text) == bool({'landlock', 'system calls'} & set(missing))
    assert run(RIGHT) == [True, True] and run('def f(x): return x') == [False, False]
    with pytest.raises(Expired):
        run('while True: pass', timeout=0.2)
    assert left_clean(folder)
    if 'system calls' not in missing:  # without Landlock they refuse all writing
        for attack in (
            'writes a file',
            'deletes a file',
            'forks',
            'opens a socket',
            'kills',
            'reads memory by a call',
            'limits another process',
        ):
            assert run(ATTACKS[attack][1], [f'assert attack{target}'], names=['attack']) == [False], attack
    assert run(READS_JUDGE, [f'assert attack{target}'], names=['attack']) == [False]
    for program in ('huge file', 'closed folder', '10 GB', 'hard exit'):
        assert run(ENDED[program]) == [False, False]
        assert left_clean(folder)
    outside = os.path.dirname(target[1])
    run(f'import os\nos.symlink({outside!r}, "link")')  # not to be followed when the folder is emptied
    assert left_clean(folder) and 'file' in os.listdir(outside)
    if 'namespaces' not in missing or 'system calls' not in missing:  # either ends daemons
        for program in ('fork bomb', 'daemon', 'other program'):
            assert not any(attempt(ENDED[program]))
            assert left_clean(folder)


def attempt(program):
    try:
        return run(program, timeout=1.0)
    except Expired:
        return [False, False]


def test_a_killed_jail_is_replaced(folder):
    SANDBOX.layers()
    os.killpg(SANDBOX._idle[-1].process.pid, signal.SIGKILL)
    SANDBOX._idle[-1].process.wait()
    assert run(RIGHT) == [True, True]
    killer = threading.Timer(0.3, os.killpg, (SANDBOX._idle[-1].process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(Died):
        run('while True: pass')
    killer.join()
    assert left_clean(folder)


def test_a_jail_that_does_not_end_its_job_is_killed(folder, monkeypatch):
    SANDBOX.layers()
    monkeypatch.setattr(sandbox, 'GRACE', 0.3)
    os.killpg(SANDBOX._idle[-1].process.pid, signal.SIGSTOP)
    with pytest.raises(Died, match=r'said nothing for 0\.5 s'):
        run(RIGHT, timeout=0.2)
    assert left_clean(folder)


def test_jails_end_with_their_parent(folder):
    program = (
        f'import sys, tempfile; sys.path[:0] = {sys.path!r}; tempfile.tempdir = {folder!r}\n'
        'from grpo_jax.workers.sandbox import Sandbox\nsandbox = Sandbox()\nprint(sandbox.layers(), flush=True)\n'
        'sandbox.run("while True: pass", ["f"], names={}, setup="", timeout=1.0, memory_mib=512)'
    )
    SANDBOX.close()
    with subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        parent.stdout.readline()
        assert processes(folder)
        parent.kill()
    for _ in range(100):
        if not processes(folder) and not os.listdir(folder):
            return
        time.sleep(0.1)
    raise AssertionError((processes(folder), os.listdir(folder)))
