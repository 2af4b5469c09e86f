"""The inside of the sandbox: a separate interpreter, without secrets, that runs programs and their tests.

For each job it forks two processes. The program's process has no tests, and is confined before it reads the program.
The judge's process has the tests. Over a pipe it asks the program's process to call functions, gets plain data back,
and compares. So nothing that a program does to its own interpreter can make a test pass.
"""

import builtins
import collections
from collections.abc import Callable
import contextlib
import datetime
import decimal
import fractions
import importlib
import itertools
import json
import math
import operator
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

# modules that programs often import; they are imported before the first program comes
PRELOADED = (
    'bisect cmath collections copy dataclasses datetime decimal fractions functools heapq itertools operator re '
    'statistics string typing'
).split()
LONGEST = 2**24  # characters of an answer from the program's process
CLOSED = 3  # exit status of a judge for which there were no more jobs

EXCEPTIONS = {
    kind.__name__: kind
    for module in (builtins, *map(importlib.import_module, PRELOADED))
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
# plain data beside JSON's: the arguments that its type, or its maker in MAKERS, takes
PLAIN: dict[type, Callable] = {
    collections.Counter: lambda value: [dict(value)],
    collections.OrderedDict: lambda value: [list(value.items())],
    collections.deque: lambda value: [list(value), value.maxlen],
    complex: lambda value: [value.real, value.imag],
    datetime.datetime: lambda value: [value.isoformat()],  # before date, whose subclass it is
    datetime.date: lambda value: [value.isoformat()],
    datetime.time: lambda value: [value.isoformat()],
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    decimal.Decimal: lambda value: [str(value)],
    fractions.Fraction: lambda value: [value.numerator, value.denominator],
    **{kind: lambda value: [value.start, value.stop, value.step] for kind in (range, slice)},
    **{kind: lambda value: [list(value)] for kind in (tuple, set, frozenset, bytes, bytearray)},
}
MAKERS: dict[type, Callable] = {kind: kind.fromisoformat for kind in (datetime.datetime, datetime.date, datetime.time)}
TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, *PLAIN)} | EXCEPTIONS


def encode(value: Any, remember: Callable) -> Any:
    """A value in JSON's types, for the pipe between judge and program; `decode` turns it back.

    Plain data (PLAIN, and JSON's types) becomes its base type. Any other object becomes {'object': remember(value)};
    remember returns a number for it. Exceptions and their classes keep their type; a class of exceptions that the
    program defines becomes its number, name and base.
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):  # Python refuses to write more than 4,300 decimal digits
        return int(value) if abs(value) < 2**64 else {'integer': hex(value)}
    if isinstance(value, list):
        return [encode(item, remember) for item in value]
    if isinstance(value, tuple) and isinstance(fields := getattr(value, '_fields', None), tuple):
        return {'namedtuple': [type(value).__name__, [*fields], [encode(item, remember) for item in value]]}
    for kind, arguments in PLAIN.items():
        if isinstance(value, kind):
            return {kind.__name__: encode(arguments(value), remember)}
    if isinstance(value, dict):
        return {'dict': [[encode(key, remember), encode(item, remember)] for key, item in value.items()]}
    if isinstance(value, BaseException):
        return {'exception': [encode(part, remember) for part in (type(value), value.args, vars(value))]}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {'type': value.__name__}
    if isinstance(value, type) and issubclass(value, BaseException):
        return {'exception type': [remember(value), value.__name__, encode(value.__base__, remember)]}
    return {'object': remember(value)}


def decode(value: Any, find: Callable) -> Any:
    """The inverse of encode; find(number) returns the object that encode remembered under the number.

    find(number, name, base) returns the class of exceptions of this number.
    """
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == 'object':
        return find(content)
    if kind == 'type':
        return TYPES[content]
    if kind == 'integer':
        return int(content, 16)
    content = decode(content, find)
    if kind == 'dict':
        return dict(content)
    if kind == 'namedtuple':
        name, fields, values = content
        return collections.namedtuple(name, fields)(*values)
    if kind == 'exception type':
        return find(*content)
    if kind == 'exception':
        exception, args, attributes = content
        error = exception(*args)
        vars(error).update(attributes)
        return error
    return MAKERS.get(TYPES[kind], TYPES[kind])(*content)


# what the judge may ask of objects of the program: operators, which also take plain data beside one of its objects, ...
OPERATORS = 'add sub mul matmul truediv floordiv mod pow lshift rshift and or xor'.split()
ORDERS = 'eq lt le gt ge'.split()  # of two of its objects, so that it does not decide what equals the tests' data
ACTIONS = {
    **{name: getattr(operator, f'__{name}__') for name in (*OPERATORS, *ORDERS, 'neg', 'pos', 'invert', 'abs')},
    **{name: getattr(operator, name) for name in ('getitem', 'setitem', 'delitem', 'contains')},
    **{
        kind.__name__: kind
        for kind in (bool, float, format, hash, int, isinstance, iter, issubclass, len, next, repr, str)
    },
    'call': lambda f, args, named: f(*args, **named),
    'enter': lambda manager: type(manager).__enter__(manager),
    'exit': lambda manager, kind, error: type(manager).__exit__(manager, kind, error, None),
    'get': getattr,
    'set': setattr,
    'take': lambda iterator, count: list(itertools.islice(iterator, count)),
}


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
        objects, numbers = [program], {id(program): 0}

        def remember(value):
            """Keeps an object, and returns its number."""
            if id(value) not in numbers:
                numbers[id(value)] = len(objects)
                objects.append(value)
            return numbers[id(value)]

        for line in lines:
            try:
                action, *args = decode(json.loads(line), lambda number, *_: objects[number])
                answer = json.dumps({'value': encode(ACTIONS[action](*args), remember)})
            except BaseException as error:  # also SystemExit: the process is to answer the next test
                try:
                    answer = json.dumps({'error': encode(error, remember)})
                except BaseException:  # its attributes are no data
                    answer = json.dumps({'error': {'exception': [encode(type(error), remember), [], {'dict': []}]}})
            print(answer, file=answers, flush=True)


class Remote:
    """The judge's handle to an object in the program's process that is no plain data.

    Its methods ask the program's process. But the program must not decide what equals the tests' data: == and < ask
    only about two objects of the program, and `in` compares the items here, where the object can be iterated.
    """

    def __init__(self, ask, number):
        vars(self).update(_ask=ask, _number=number)

    def __call__(self, *args, **named):
        return self._ask('call', self, args, named)

    def __getattr__(self, name):
        return self._ask('get', self, name)

    def __setattr__(self, name, value):
        self._ask('set', self, name, value)

    def __iter__(self):
        iterator, count = self._ask('iter', self), 1
        while items := self._ask('take', iterator, count):
            yield from items
            if iterator._number != self._number:  # a generator makes no item before it is asked for
                count = min(2 * count, 1024)

    def __contains__(self, value):
        try:
            self._ask('iter', self)
        except TypeError:
            return self._ask('contains', self, value)
        return any(item is value or item == value for item in iter(self))

    def __exit__(self, kind, error, trace):
        return self._ask('exit', self, kind, error)


def _forward():
    """Gives Remote the special methods that ask the program's process."""

    def of(name):
        return lambda self, *args: self._ask(name, self, *args)

    def reflected(name):
        return lambda self, other: self._ask(name, other, self)

    def compared(name):
        return lambda self, other: self._ask(name, self, other) if isinstance(other, Remote) else NotImplemented

    for name in set(ACTIONS) - {'call', 'exit', 'get', 'set', 'take', 'iter', 'contains', 'isinstance', 'issubclass'}:
        setattr(Remote, f'__{name}__', compared(name) if name in ORDERS else of(name))
    checks = {'instancecheck': 'isinstance', 'subclasscheck': 'issubclass'}
    for method, name in ({f'r{name}': name for name in OPERATORS} | checks).items():
        setattr(Remote, f'__{method}__', reflected(name))


_forward()


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
            if isinstance(value, Remote) or value in classes.values():
                return value._number
            raise TypeError(f'{type(value).__name__} cannot be sent to the program')

        def find(number, name='', base=None):
            """The Remote with this number, or, with a base, the class of exceptions with this number; for decode."""
            if base is None:
                return objects.setdefault(number, Remote(ask, number))
            if number not in classes:
                classes[number] = type(name, (base,), {'_number': number})
            return classes[number]

        def ask(*request):
            """The program's decoded answer to a request (action, *arguments); raises what the action raised."""
            request = encode(list(request), number)
            try:
                send(request)
                answer = json.loads(answers.readline(LONGEST))
            except (OSError, ValueError):  # the process has ended, or has written what is no answer
                gone.append(request)
                raise
            if 'error' in answer:
                raise decode(answer['error'], find)
            return decode(answer['value'], find)

        def passes(source):
            try:
                exec(source, namespace)
            except BaseException:  # a program may raise SystemExit
                return False
            return not gone  # a test may expect an exception, but not the end of the process

        namespace, objects, classes, gone = {'__name__': 'tests'}, {}, {}, []
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
    """Closes all file descriptors but these, and points standard input, output and error to /dev/null."""
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

    rules, filter_program: as in confinement.confine; listener: from confinement.listen_for_threads; alone: whether this
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

    folder: the only place where programs may write. alone: whether this process has its own namespaces.
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
