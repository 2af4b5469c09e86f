"""Programs that want out, or to pass without being right: they score 0, and nothing of them stays on the machine."""

import ast
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from grpo_jax.errors import BadInput
from grpo_jax.workers import Died, Expired, confinement, sandbox
from tests.rewards.hostile import ATTACKS, CHEATS, ENDED, OPENS, READS_JUDGE, STOPPED

TESTS = ('assert f(2) == 4', 'assert f(3) == 9')
RIGHT = 'def f(x): return x * x'
LISTING = 'import os\ndef f(x): return os.listdir()'
SANDBOX = sandbox.Sandbox()
JAIL = 4  # processes of a jail that waits: two that keep it, two for the next job
ORDINARY = 65534  # a user without rights, whom root can become


@pytest.fixture(scope='module', autouse=True)
def folder():
    """Where this module's jails have their folders; in the end nothing is in it, and no process knows its name."""
    path = tempfile.mkdtemp()
    os.chmod(path, 0o777)  # also for jails of an ordinary user
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, 'tempdir', path)
        yield path
        SANDBOX.close()
    assert processes(path) == []
    os.rmdir(path)


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


def read_programs():
    """programs.txt: a name -> (program, a test that passes, a test that fails)."""
    found = {}
    for section in pathlib.Path(__file__).with_name('programs.txt').read_text(encoding='utf8').split('\n# ')[1:]:
        name, content = section.split('\n', 1)
        program, tests = content.split('\npasses:\n')
        found[name] = (program, *tests.split('\nfails:\n'))
    return found


PROGRAMS = read_programs()


@pytest.mark.parametrize('program, passes, fails', PROGRAMS.values(), ids=PROGRAMS)
def test_right_programs_pass_whatever_types_their_tests_use(program, passes, fails):
    names = [part.name for part in ast.parse(program).body if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
    names += [part.targets[0].id for part in ast.parse(program).body if isinstance(part, ast.Assign)]
    assert run(program, [passes, fails], names=names) == [True, False]


def test_a_test_that_expects_an_exception_does_not_take_the_end_of_the_process_for_it():
    tests = [
        'try:\n    f(2)\n    assert False\nexcept Exception:\n    pass',
        'try:\n    f(3)\nexcept BaseException:\n    pass',
    ]
    assert run('import os\ndef f(x): os._exit(1)', tests) == [False, False]
    assert run('def f(x): raise OSError("no")', tests) == [True, True]


ALWAYS = """
    class Always:
        def __eq__(self, other): return True
        __lt__ = __le__ = __gt__ = __ge__ = __eq__
        def __ne__(self, other): return False
        def __contains__(self, value): return True
        def __iter__(self): return iter([])
        def __hash__(self): return 4
    class Number(int):
        def __eq__(self, other): return True
        def __hash__(self): return 4
    def f(x): return Always()
    def g(x): return Number(x)
"""


@pytest.mark.parametrize(
    'test',
    ['f(2) == 4', '4 == f(2)', 'f(2) in [4, 5]', 'f(2) < 4', '4 > f(2)', '4 in f(2)', 'f(2) in {4}', '[f(2)] == [4]']
    + ['g(3) == 4', 'g(3) in [4]', '{1: g(3)} == {1: 4}', 'not f(2) != 4'],
)
def test_an_object_does_not_decide_what_it_equals(test):
    assert run(ALWAYS, [f'assert {test}'], names=['f', 'g']) == [False]


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


def test_the_judge_has_random_numbers_of_its_own_that_are_the_same_in_every_run():
    program = 'import random\nrandom.seed(0)\ndef f(x): return random.random()\ndef g(x): return x < 0.5'
    start = 'import random\nassert f(0) != random.random()'
    draws = ['assert g(random.random())'] * 40
    marks = [run(program, [start, *draws, last], names=['f', 'g']) for last in ('pass', 'pass', 'g')]
    assert marks[0] == marks[1] and marks[0][0] is True and 5 < sum(marks[0]) < 36
    assert marks[0] != marks[2]  # other tests have other numbers


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


BOMB = """
    import threading, time
    threading.stack_size(32768)
    def f():
        count = 0
        try:
            while count < 3000:
                threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
                count += 1
        except RuntimeError: return count
    """


def test_the_number_of_threads_is_limited():
    if 'system calls' not in SANDBOX.layers():
        pytest.skip('the filter counts them')
    assert run(BOMB, ['assert f() == 1024'], memory_mib=4096) == [True]
    assert run(BOMB, ['assert f() == 1024'], memory_mib=4096) == [True]  # the next program's are counted anew


# programs that would pass without being right


@pytest.mark.parametrize('program', CHEATS.values(), ids=CHEATS)
def test_cheats_fail(program, folder):
    tests = ['assert f(2) == 73501', 'assert f(3) >= 42017', 'assert not f(2) != 73501', 'assert f(2) in {73501, 9}']
    try:
        assert run(program, tests, timeout=3.0) == [False] * 4
    except Expired:
        assert 'while True' in program
    assert left_clean(folder)


class Target:
    """A process, a file and sockets of a user that attacks are to leave alone."""

    def __init__(self, user):
        self.folder = tempfile.mkdtemp(dir='/tmp')
        self.path = os.path.join(self.folder, 'file')
        with open(self.path, 'w', encoding='utf8') as file:
            file.write('untouched')
        environment = os.environ | {'SECRET': 'hidden'}
        options = {} if user is None else {'user': user, 'group': user, 'extra_groups': []}
        self.process = subprocess.Popen(['sleep', '100'], env=environment, **options)
        self.sockets = [socket.create_server(('127.0.0.1', 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        port = self.sockets[0].getsockname()[1]
        self.sockets[1].bind(('127.0.0.1', port))
        for name in (f'{self.path}.socket', f'\0{self.path}'):
            if sys.platform == 'linux' or name[0] != '\0':
                self.sockets.append(socket.socket(socket.AF_UNIX))
                self.sockets[-1].bind(name)
                self.sockets[-1].listen()
        for path in [self.folder, self.path, f'{self.path}.socket'] if user is not None else []:
            os.chown(path, user, user)
        os.chmod(self.folder, 0o755)
        self.arguments = self.process.pid, self.path, port
        self._before = self._state()

    def _state(self):
        with open(self.path, encoding='utf8') as file:
            text = file.read()
        stats = [os.stat(path) for path in (self.path, self.folder)]
        rights = [(one.st_mode, one.st_uid, one.st_gid, one.st_nlink, one.st_mtime_ns) for one in stats]
        return text, rights, sorted(os.listdir(self.folder))

    def untouched(self):
        return self.process.poll() is None and self._state() == self._before

    def close(self):
        for server in self.sockets:
            server.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)


@pytest.fixture
def targets():
    """A function that makes the Target of a user, which ends with the test."""
    made = []

    def make(user=None):
        made.append(Target(user))
        return made[-1]

    yield make
    for one in made:
        one.close()


def guards(ordinary):
    """What holds the sandbox's programs, in the words of ATTACKS."""
    layers = {*SANDBOX.layers(), 'ordinary' if ordinary else 'root'}
    versions = range(1, confinement.landlock_version() + 1) if 'landlock' in layers else ()
    return layers | {f'landlock {version}' for version in versions}


def refused(attack, target):
    """Whether the attack fails, and leaves its target as it was."""
    passed = run(ATTACKS[attack][1], [f'assert attack{target.arguments}'], names=['attack'])
    if attack == 'signals by input':  # its target ends a while later
        with contextlib.suppress(subprocess.TimeoutExpired):
            target.process.wait(0.3)
    return passed == [False] and target.untouched()


@pytest.mark.parametrize('attack', ATTACKS)
def test_attacks_fail(attack, targets, folder):
    if not ATTACKS[attack][0] & guards(os.getuid() != 0):
        pytest.skip('what refuses it is not to be had here')
    assert refused(attack, targets()) and left_clean(folder)


@pytest.mark.parametrize('attack', ATTACKS)
def test_attacks_succeed_outside(attack, targets):
    # else the test above could not fail
    if attack.startswith('reads memory') and os.path.exists('/proc/sys/kernel/yama'):
        pytest.skip('this kernel refuses it to everybody')
    target = targets()
    program = f'{textwrap.dedent(ATTACKS[attack][1])}\nprint(attack{target.arguments})'
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    found = subprocess.run(
        [sys.executable, '-Wignore', '-c', program], text=True, stdout=subprocess.PIPE, pass_fds=descriptors
    )
    for descriptor in descriptors:
        os.close(descriptor)
    assert found.stdout == 'True\n' or -target.process.wait(5) == signal.SIGIO


# what is left where a layer is missing, and when processes are killed

LAYERS = {
    'namespaces': 'enter_namespaces',
    'own root': 'enter_own_root',
    'own file system': 'mount_folder',
    'landlock': 'landlock_rules',
    'system calls': '_has_filters',
}
WITHIN = {'own root', 'own file system'}  # the namespaces'


@pytest.fixture
def without(monkeypatch):
    """A function that starts jails without the named layers, and otherwise changed, from then on."""

    def change(*layers, ordinary=False, readable='', lines=()):
        start, end = sandbox.SCRIPT.splitlines()
        script = [start, 'import confinement, os', *lines]
        script += [f'confinement.{LAYERS[layer]} = lambda *_: None' for layer in layers]
        if readable:
            script += [f'usual = confinement.libraries; confinement.libraries = lambda: [*usual(), {readable!r}]']
        if ordinary and os.getuid() == 0:
            # the interpreter's own files may be root's alone; what attacks import is imported before
            script += ['import ctypes, encodings.ascii, encodings.idna, fcntl, itertools, shutil, socket, subprocess']
            script += ['import tempfile, threading; [__import__(name) for name in jail.PRELOADED]']
            script += [f'os.chown(sys.argv[1], {ORDINARY}, {ORDINARY}); os.setgroups([])']
            script += [f'os.setresgid(*[{ORDINARY}] * 3); os.setresuid(*[{ORDINARY}] * 3)']
            script += ['confinement.libc.prctl(confinement.DUMPABLE, 1, 0, 0, 0)  # as a user who began as such']
        SANDBOX.close()
        monkeypatch.setattr(sandbox, 'SCRIPT', '\n'.join([*script, end]))

    yield change
    SANDBOX.close()


SITUATIONS = pytest.mark.parametrize(
    'user, missing',
    [
        (user, [*spaces, *layer])
        for user in ('root', 'ordinary')
        for spaces in ([], ['namespaces'])
        for layer in ([], ['landlock'], ['system calls'])
    ],
)
# what nothing refuses where two layers are missing; docs/sandbox.md says so
OPEN = {
    'landlock': {'reads a file', 'lists a folder'},
    'system calls': {
        'changes rights',
        'changes times',
        'limits another process',
        'sends a datagram',
        'connects to a local socket',
    },
}


@SITUATIONS
def test_with_a_layer_off_the_others_refuse_the_attacks(user, missing, without, targets, folder):
    if user == 'root' and os.getuid():
        pytest.skip('root alone can be root')
    SANDBOX.close()
    if not set(LAYERS) <= set(SANDBOX.layers()) or confinement.landlock_version() < 6:
        pytest.skip('this machine lacks layers')
    ordinary = user == 'ordinary'
    target = targets(ORDINARY if ordinary and os.getuid() == 0 else None)
    without(*missing, ordinary=ordinary)
    assert set(SANDBOX.layers()) == {'limits', *LAYERS} - {*missing, *(WITHIN if 'namespaces' in missing else ())}
    held = guards(ordinary)
    unguarded = {attack for attack, (layers, _) in ATTACKS.items() if not layers & held}
    expected = set().union(*(OPEN.get(layer, ()) for layer in missing)) if 'namespaces' in missing else set()
    if 'namespaces' in missing and 'landlock' in missing and ordinary:
        expected |= {'reads the environment', 'reads memory'}
    if 'system calls' in missing and not ordinary:
        expected |= {'forks', 'forks by the library'}
    assert unguarded == expected
    assert [attack for attack in ATTACKS if attack not in unguarded and not refused(attack, target)] == []
    assert left_clean(folder)


@pytest.mark.parametrize('user', ['root', 'ordinary'])
def test_with_all_layers_off_the_attacks_succeed(user, without, targets):
    # else the test above could not fail
    if (user == 'root' and os.getuid()) or sys.platform != 'linux':
        pytest.skip('root alone can be root, on Linux')
    ordinary = user == 'ordinary'
    without(*LAYERS, ordinary=ordinary)
    held, failed = guards(ordinary), []
    for attack, (layers, _) in ATTACKS.items():
        if not layers & held and refused(attack, targets(ORDINARY if ordinary and os.getuid() == 0 else None)):
            failed.append(attack)
    assert failed == []


@SITUATIONS
def test_no_combination_of_flags_opens_a_file_of_a_readable_folder_to_be_changed(user, missing, without, targets):
    ordinary = user == 'ordinary'
    if not ordinary and os.getuid():
        pytest.skip('root alone can be root')
    target = targets(ORDINARY if ordinary and os.getuid() == 0 else None)
    without(*missing, ordinary=ordinary, readable=target.folder)
    if not {'landlock', 'system calls'} & set(SANDBOX.layers()):
        pytest.skip('this machine lacks layers')
    tests = [f'count = attack({target.path!r})', 'assert count > 0']  # to be read it may be opened
    assert run(OPENS, tests, names=['attack'], timeout=30.0) == [True, True]
    assert target.untouched()


def test_the_first_version_of_landlock_and_the_filter_keep_files_whole(without, targets):
    target = targets()
    first = 'confinement.RIGHTS = {1: confinement.RIGHTS[1]}'
    without('namespaces', readable=target.folder, lines=[first])
    if not {'landlock', 'system calls'} <= set(SANDBOX.layers()):
        pytest.skip('this machine lacks layers')
    assert run(OPENS, [f'assert attack({target.path!r}) > 0'], names=['attack'], timeout=30.0) == [True]
    assert target.untouched()


def test_without_a_count_of_threads_there_are_none(without):
    without(lines=['confinement.listen_for_threads = lambda: None'])
    if 'system calls' not in SANDBOX.layers():
        pytest.skip('the filter refuses them')
    assert run(BOMB, ['assert f() == 0']) == [True]


@pytest.mark.parametrize('missing', [[name] for name in LAYERS] + [['namespaces', 'landlock'], list(LAYERS)])
def test_missing_layers_are_reported_and_made_up_for(missing, without, targets, folder, caplog):
    without(*missing)
    assert not set(missing) & set(SANDBOX.layers())
    assert ('held by' in caplog.text) == bool({'landlock', 'system calls'} & set(missing))
    assert run(RIGHT) == [True, True] and run('def f(x): return x') == [False, False]
    with pytest.raises(Expired):
        run('while True: pass', timeout=0.2)
    assert left_clean(folder)
    target = targets()
    assert run(READS_JUDGE, [f'assert attack{target.arguments}'], names=['attack']) == [False]
    for program in ('huge file', 'closed folder', '10 GB', 'hard exit'):
        assert run(ENDED[program]) == [False, False]
        assert left_clean(folder)
    run(f'import os\nos.symlink({target.folder!r}, "link")')  # not to be followed when the folder is emptied
    assert left_clean(folder) and target.untouched()
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
        'from grpo_jax.workers import Sandbox\nsandbox = Sandbox()\nprint(sandbox.layers(), flush=True)\n'
        'sandbox.run("while True: pass", ["f"], names={}, setup="", timeout=1.0, memory_mib=512)'
    )
    SANDBOX.close()
    with subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        parent.stdout.readline()
        assert processes(folder)
        parent.kill()
        assert parent.stderr.read() == b''  # until the last of them has ended
    assert processes(folder) == [] and os.listdir(folder) == []
