"""The inside of the sandbox: a separate interpreter, without secrets, that runs programs and their tests.

For each job it forks two processes. The program's process has no tests, and is confined before it reads the program.
The judge's process has the tests. Over a pipe it asks the program's process to call functions, gets plain data back,
and compares. So nothing that a program does to its own interpreter can make a test pass.
"""

from collections.abc import Callable
import contextlib
import importlib
import json
import math
import os
import random
import resource
import select
import signal
import sys
import types
from typing import Any

if __package__:
    from grpo_jax.workers import confinement
else:  # in an interpreter that has these two files alone
    import confinement

# modules that programs often import
PRELOADED = (
    'bisect cmath collections copy dataclasses datetime decimal fractions functools heapq itertools operator re '
    'statistics string typing'
).split()
LONGEST = 2**24  # characters of an answer from the program's process
CLOSED = 3  # exit status of a judge for which there were no more jobs

TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}


def encode(value: Any, remember: Callable) -> Any:
    """A value in JSON's types: plain data without its subclass; another object becomes {'object': remember(value)}."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, remember) for item in value]
    for kind in (tuple, set, frozenset, bytes):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, remember) for item in value]}
    if isinstance(value, dict):
        return {'dict': [[encode(key, remember), encode(item, remember)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {'complex': [value.real, value.imag]}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {'type': value.__name__}
    return {'object': remember(value)}


def decode(value: Any, find: Callable) -> Any:
    """The inverse of encode; find(number) returns the object that encode remembered under the number."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == 'object':
        return find(content)
    if kind == 'type':
        return TYPES[content]
    content = decode(content, find)
    return complex(*content) if kind == 'complex' else TYPES[kind](content)


def run_program(requests: int, replies: int, rules: int | None, filter_program: bytes | None):
    """The program's process: runs the program, then serves the judge's requests about the program's objects.

    requests, replies: file descriptors of pipes; rules, filter_program: as in confinement.confine.
    """
    _shut(requests, replies, rules)
    with os.fdopen(requests, 'rb') as lines, os.fdopen(replies, 'w') as answers:
        line = lines.readline()
        if not line:  # the judge had no job
            return
        job = json.loads(line)
        confinement.confine(job['memory'], job['seconds'], rules, filter_program)
        program = sys.modules['program'] = types.ModuleType('program')
        exec(compile(job['program'], 'program.py', 'exec'), vars(program))
        objects = [program]

        def remember(value):
            """Keeps an object, and returns its number."""
            objects.append(value)
            return len(objects) - 1

        actions = {'call': lambda f, args, named: f(*args, **named), 'get': getattr, 'set': setattr, 'items': list}
        for line in lines:
            try:
                action, *args = decode(json.loads(line), objects.__getitem__)
                answer = json.dumps({'value': encode(actions[action](*args), remember)})
            except BaseException as error:  # also SystemExit: the process is to answer the next test
                answer = json.dumps({'error': type(error).__name__})
            print(answer, file=answers, flush=True)


class Remote:
    """The judge's handle to an object in the program's process that is no plain data; it equals only itself."""

    def __init__(self, ask, number):
        vars(self).update(_ask=ask, _number=number)

    def __call__(self, *args, **named):
        return self._ask('call', self, args, named)

    def __getattr__(self, name):
        return self._ask('get', self, name)

    def __setattr__(self, name, value):
        self._ask('set', self, name, value)

    def __iter__(self):
        return iter(self._ask('items', self))


def run_judge(requests: int, replies: int, verdict: int, rules: int | None, filter_program: bytes | None):
    """The judge's process: reads a job, and writes 1 or 0 for each test; an alarm ends it at the deadline.

    requests, replies, verdict: file descriptors of pipes; rules, filter_program: as in confinement.confine.
    """
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(CLOSED)
    job = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, job['timeout'])  # nothing catches the alarm, so it ends the process
    _shut(requests, replies, verdict, rules)
    # the program does not know the tests, so it cannot foresee the judge's random numbers
    random.seed(json.dumps([job['tests'], job['setup']]))
    seconds = math.ceil(job['timeout']) + 1
    confinement.confine(job['memory'], seconds, rules, filter_program)
    with os.fdopen(requests, 'w') as requested, os.fdopen(replies) as answers:

        def send(value):
            print(json.dumps(value), file=requested, flush=True)

        def number(value):
            if isinstance(value, Remote):
                return value._number
            raise TypeError(f'{type(value).__name__} cannot be sent to the program')

        def ask(*request):
            send(encode(list(request), number))
            answer = json.loads(answers.readline(LONGEST))
            if 'error' in answer:
                raise RuntimeError(answer['error'])
            return decode(answer['value'], lambda number: Remote(ask, number))

        def passes(source):
            try:
                exec(source, namespace)
            except Exception:
                return False
            return True

        namespace = {'__name__': 'tests'}
        try:
            send({'program': job['program'], 'memory': job['memory'], 'seconds': seconds})
            for name, attribute in job['names'].items():
                namespace[name] = ask('get', Remote(ask, 0), attribute)
            ready = passes(job['setup'])
        except Exception:
            ready = False  # without its names, a test would call builtins, or nothing
        passed = ['01'[ready and passes(test)] for test in job['tests']]
        os.write(verdict, ''.join(passed).encode())


def _shut(*descriptors):
    """Closes all other descriptors, and points standard input, output and error to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    for fd in set(range(3, confinement.OPEN_FILES)) - set(descriptors):
        os.closerange(fd, fd + 1)


def _start(body, *args):
    """Forks a child that runs body(*args) and exits; returns its process id."""
    child = os.fork()
    if not child:
        try:
            random.seed(0)  # forking draws a seed
            body(*args)
        finally:
            os._exit(0)
    return child


def empty(folder: str):
    """Deletes the folder's content, without recursion: deep folders are moved to the top first."""
    while names := os.listdir(folder):
        for path in (os.path.join(folder, name) for name in names):
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                os.rename(os.path.join(path, inner), os.path.join(folder, os.urandom(8).hex()))
            os.rmdir(path)


def run_job(folder: str, rules: int | None, filter_program: bytes | None, listener: int | None, alone: bool) -> bool:
    """Runs the next job, then kills its processes and deletes its files; False when there are no more jobs.

    rules, filter_program: as in confinement.confine; listener: of confinement.listen_for_threads; alone: whether this
    process has its own namespace of processes, in which it may kill all others.
    """
    requests, replies, verdict = os.pipe(), os.pipe(), os.pipe()
    program = _start(run_program, requests[0], replies[1], rules, filter_program)
    judge = _start(run_judge, requests[1], replies[0], verdict[1], rules, filter_program)
    for fd in (*requests, *replies, verdict[1]):
        os.close(fd)
    passed = _read_verdict(verdict[0], listener)
    _, status = os.waitpid(judge, 0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1 if alone else program, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    empty(folder)
    if os.waitstatus_to_exitcode(status) == CLOSED:
        return False
    _answer({'passed': passed, 'expired': os.waitstatus_to_exitcode(status) == -signal.SIGALRM})
    return True


def _read_verdict(verdict, listener):
    """The marks, 1 or 0, that the judge writes until it ends; program and judge may meanwhile start THREADS threads."""
    marks, threads, sources = b'', 0, [verdict] if listener is None else [verdict, listener]
    with os.fdopen(verdict, 'rb', 0) as pipe:
        while True:
            ready, _, _ = select.select(sources, [], [])
            if listener is not None and listener in ready:
                threads += 1
                confinement.answer_thread(listener, threads <= confinement.THREADS)
            if verdict in ready:
                piece = pipe.read(2**16)
                if not piece:
                    return marks.decode()
                marks += piece


def _answer(value):
    """Writes a value as a JSON line for the trainer; ends this process when the trainer has ended."""
    try:
        os.write(1, json.dumps(value).encode() + b'\n')
    except BrokenPipeError:
        os._exit(0)


def serve(folder: str, alone: bool):
    """Writes the names of the active layers, then runs jobs from standard input until it closes.

    alone: whether this process has its own namespaces.
    """
    rooted = alone and confinement.enter_own_root(folder)
    mounted = alone and confinement.mount_folder(folder)
    confinement.give_up_rights()
    os.chdir(folder)
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_NOFILE, (confinement.OPEN_FILES, confinement.OPEN_FILES))
    rules = confinement.landlock_rules(folder)
    listener = confinement.listen_for_threads()
    filter_program = confinement.call_filter(files=rooted or rules is not None, threads=listener is not None)
    layers = {
        'limits': True,
        'namespaces': alone,
        'own root': rooted,
        'own file system': mounted,
        'landlock': rules is not None,
        'system calls': filter_program is not None,
    }
    _answer([name for name, active in layers.items() if active])
    for name in PRELOADED:
        importlib.import_module(name)
    exec('')  # the compiler's first use makes its types
    while run_job(folder, rules, filter_program, listener, alone):
        pass


def main(folder: str):
    """Runs serve in a child, the first process of its namespace, and deletes the folder afterwards."""
    alone = confinement.enter_namespaces()
    server = os.fork()
    if not server:
        serve(folder, alone)
        return
    confinement.give_up_rights()
    os.waitpid(server, 0)
    empty(folder)
    os.rmdir(folder)
