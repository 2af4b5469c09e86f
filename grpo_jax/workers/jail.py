"""The inside of the sandbox: a script that runs programs and their tests, in an interpreter that holds no secrets.

For each job it forks two processes. The program's process is confined before it sees the first byte of the program,
and has no test. The judge's process has the tests. Over a pipe it asks the program's process to call functions; plain
data comes back, and the judge compares it. So nothing that a program does to its own interpreter can make a test pass.
"""

from collections.abc import Callable
import contextlib
import ctypes
import errno
import importlib
import json
import math
import os
import platform
import random
import resource
import signal
import struct
import sys
import types
from typing import Any

# what programs often import
PRELOADED = (
    'bisect cmath collections copy dataclasses datetime decimal fractions functools heapq itertools operator re '
    'statistics string typing'
).split()
FILE_MIB = 16  # a file's size
FOLDER_MIB = 64  # all files together, where the folder is a file system of its own
OPEN_FILES = 64
LONGEST = 2**24  # bytes of what a function returns, as text
NOBODY = 65534  # the user's number inside
CLOSED = 3  # exit status of a judge for which there were no more jobs

NO_NEW_PRIVS, DUMPABLE, SECCOMP = 38, 4, 22  # of prctl
NEW_USER, NEW_PID, NEW_NET, NEW_IPC, NEW_MOUNT = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000
NOSUID_NODEV_NOEXEC, CLONE_THREAD, F_DUPFD_CLOEXEC, F_SETOWN = 2 | 4 | 8, 0x10000, 1030, 8
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock, whatever the machine
ALL_RIGHTS, READING, DEVICE = 2**13 - 1, 4 | 8, 2 | 4  # in Landlock's first version
ALLOW, REFUSE, ABSENT = 0x7FFF0000, 0x00050001, 0x00050026  # of the filter: yes, EPERM, ENOSYS
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
MACHINES = {'x86_64': (1, 0xC000003E), 'aarch64': (2, 0xC00000B7)}  # column in CALLS, AUDIT_ARCH

# What an interpreter needs to compute, to wait, and to read and write files: name, number on x86_64, on aarch64. No
# call among them starts or touches another process, opens a socket, or changes owners or rights.
CALLS = """
read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
madvise 28 233, dup 32 23, dup2 33 -, nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172,
sendfile 40 71, exit 60 93, uname 63 160, fsync 74 82, ftruncate 77 46, getcwd 79 17, chdir 80 49, readlink 89 -,
gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176,
geteuid 107 175, getegid 108 177, getppid 110 173, sigaltstack 131 132, statfs 137 43, fstatfs 138 44, arch_prctl 158 -,
gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123, getdents64 217 61, set_tid_address 218 96,
restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
newfstatat 262 79, readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
dup3 292 24, pipe2 293 59, getrandom 318 278, membarrier 324 283, statx 332 291, rseq 334 293, close_range 436 436,
faccessat2 439 439"""
FILE_CALLS = """
rename 82 -, mkdir 83 -, rmdir 84 -, unlink 87 -, mkdirat 258 34, unlinkat 263 35, renameat 264 38, renameat2 316 276"""
# allowed by their arguments
JUDGED_CALLS = 'clone 56 220, clone3 435 435, fcntl 72 25, ioctl 16 29, openat 257 56, prlimit64 302 261'

TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}

libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces() -> bool:
    """Gives the children of this process users, processes, network and IPC of their own; False where refused."""
    if not hasattr(libc, 'unshare'):
        return False
    maps = [('setgroups', 'deny'), ('uid_map', f'{NOBODY} {os.getuid()} 1'), ('gid_map', f'{NOBODY} {os.getgid()} 1')]
    if libc.unshare(NEW_USER | NEW_PID | NEW_NET | NEW_IPC):
        return False
    with contextlib.suppress(OSError):  # without a map there is no file system of its own; the rest holds
        for name, text in maps:
            with open(f'/proc/self/{name}', 'w', encoding='ascii') as file:
                file.write(text)
    return True


def mount_folder(folder: str) -> bool:
    """Mounts a small file system on the folder, which this process alone sees; False where refused."""
    if not hasattr(libc, 'mount') or libc.unshare(NEW_MOUNT):
        return False
    flags, options = ctypes.c_ulong(NOSUID_NODEV_NOEXEC), f'size={FOLDER_MIB}m,nr_inodes=4k,mode=700'
    return not libc.mount(b'tmpfs', folder.encode(), b'tmpfs', flags, options.encode())


def give_up_rights():
    """Drops what a root user has, for good, and hides this process and its children from each other's eyes."""
    if hasattr(libc, 'capset'):
        libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(DUMPABLE, 0, 0, 0, 0)


def landlock_rules(folder: str) -> int | None:
    """Descriptor of Landlock's rules: anything in the folder, reading of Python's files; None without Landlock."""
    if sys.platform != 'linux':
        return None
    rules = libc.syscall(CREATE_RULESET, struct.pack('Q', ALL_RIGHTS), ctypes.c_size_t(8), 0)
    if rules < 0:
        return None
    libraries = {os.path.join(prefix, name) for prefix in (sys.base_prefix, '/usr', '/') for name in ('lib', 'lib64')}
    for path, rights in [(folder, ALL_RIGHTS), (os.devnull, DEVICE), *((path, READING) for path in libraries)]:
        with contextlib.suppress(FileNotFoundError):
            place = os.open(path, os.O_PATH)
            libc.syscall(ADD_RULE, rules, 1, struct.pack('=Qi', rights, place), 0)
            os.close(place)
    return rules


def call_filter(files: bool) -> bytes | None:
    """The filter of system calls, as BPF; None where the kernel has none. files: whether files may be written."""
    if sys.platform != 'linux' or platform.machine() not in MACHINES:
        return None
    libc.prctl(SECCOMP, 2, None)
    if ctypes.get_errno() != errno.EFAULT:  # the answer of a kernel that would have read the filter
        return None
    column, architecture = MACHINES[platform.machine()]
    judged, plain = _numbers(JUDGED_CALLS, column), _numbers(CALLS + (',' + FILE_CALLS if files else ''), column)
    load, equal, at_least, any_bit = 0x20, 0x15, 0x35, 0x45
    yes, no, absent = (0x06, 0, 0, ALLOW), (0x06, 0, 0, REFUSE), (0x06, 0, 0, ABSENT)

    def when(name, *rows):
        return [(equal, 0, len(rows), judged[name]), *rows]

    def argument(index):  # the low half
        return load, 0, 0, 16 + 8 * index

    rows = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        no,
        (load, 0, 0, 0),
        *when('clone', argument(0), (any_bit, 0, 1, CLONE_THREAD), yes, no),
        *when('clone3', absent),  # its arguments cannot be seen; the C library then takes clone
        *when('fcntl', argument(1), (equal, 1, 0, F_DUPFD_CLOEXEC), (at_least, 1, 0, F_SETOWN), yes, no),
        *when('ioctl', argument(1), (at_least, 0, 1, 0x5400), (at_least, 0, 1, 0x5500), no, yes),  # of terminals
        *when('openat', argument(2), (any_bit, 0, 1, 0 if files else WRITING), no, yes),
        *when('prlimit64', argument(0), (equal, 0, 1, 0), yes, no),  # of itself
    ]
    for number in plain.values():
        rows += [(equal, 0, 1, number), yes]
    return b''.join(struct.pack('HBBI', *row) for row in [*rows, no])


def _numbers(table, column):
    rows = [row.split() for row in table.split(',')]
    return {row[0]: int(row[column]) for row in rows if row[column] != '-'}


def confine(memory: int, seconds: int, rules: int | None, calls: bytes | None):
    """Limits this process, for good, to bytes of memory, seconds of CPU, Landlock's rules and the filter's calls."""
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: FILE_MIB * 2**20, resource.RLIMIT_CORE: 0}
    if calls is None:
        limits[resource.RLIMIT_NPROC] = 0  # no further process; root may all the same
    if sys.platform == 'linux':
        limits[resource.RLIMIT_AS] = memory  # macOS refuses it
    for name, most in limits.items():
        resource.setrlimit(name, (most, most))
    if rules is not None:
        if libc.syscall(RESTRICT_SELF, rules, 0):
            raise OSError(ctypes.get_errno(), 'Landlock refused')
        os.close(rules)
    if calls is not None:
        text = ctypes.create_string_buffer(calls, len(calls))
        if libc.prctl(SECCOMP, 2, struct.pack('HP', len(calls) // 8, ctypes.addressof(text)), 0, 0):
            raise OSError(ctypes.get_errno(), 'seccomp refused')


def pack(value: Any, remember: Callable) -> Any:
    """A value in JSON's types: plain data, whole and without its class; of other objects the number remember(value)."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [pack(item, remember) for item in value]
    for kind in (tuple, set, frozenset, bytes):
        if isinstance(value, kind):
            return {kind.__name__: [pack(item, remember) for item in value]}
    if isinstance(value, dict):
        return {'dict': [[pack(key, remember), pack(item, remember)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {'complex': [value.real, value.imag]}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {'type': value.__name__}
    return {'object': remember(value)}


def unpack(value: Any, find: Callable) -> Any:
    """The value that pack packed; find(number) gives the object."""
    if isinstance(value, list):
        return [unpack(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == 'object':
        return find(content)
    if kind == 'type':
        return TYPES[content]
    content = unpack(content, find)
    return complex(*content) if kind == 'complex' else TYPES[kind](content)


def run_program(requests: int, replies: int, rules: int | None, calls: bytes | None):
    """The program's process: runs the program, then answers the judge's requests, which are about its objects."""
    _shut(requests, replies, rules)
    with os.fdopen(requests, 'rb') as lines, os.fdopen(replies, 'w') as answers:
        line = lines.readline()
        if not line:  # the judge had no job
            return
        job = json.loads(line)
        confine(job['memory'], job['seconds'], rules, calls)
        program = sys.modules['program'] = types.ModuleType('program')
        exec(compile(job['program'], 'program.py', 'exec'), vars(program))
        objects = [program]

        def remember(value):
            objects.append(value)
            return len(objects) - 1

        actions = {'call': lambda f, args, named: f(*args, **named), 'get': getattr, 'set': setattr, 'items': list}
        for line in lines:
            try:
                action, *args = unpack(json.loads(line), objects.__getitem__)
                answer = json.dumps({'value': pack(actions[action](*args), remember)})
            except BaseException as error:  # also SystemExit: the process is to answer the next test
                answer = json.dumps({'error': type(error).__name__})
            print(answer, file=answers, flush=True)


class Remote:
    """An object of the program's process that is no plain data. It equals nothing but itself."""

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


def run_judge(requests: int, replies: int, verdict: int, rules: int | None, calls: bytes | None):
    """The judge's process: takes a job, and writes 1 or 0 for each of its tests; ends itself at the deadline."""
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(CLOSED)
    job = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, job['timeout'])  # nothing catches the alarm, whatever the process waits for
    _shut(requests, replies, verdict, rules)
    seconds = math.ceil(job['timeout']) + 1
    confine(job['memory'], seconds, rules, calls)
    with os.fdopen(requests, 'w') as requested, os.fdopen(replies) as answers:

        def send(value):
            print(json.dumps(value), file=requested, flush=True)

        def number(value):
            if isinstance(value, Remote):
                return value._number
            raise TypeError(f'{type(value).__name__} cannot be sent to the program')

        def ask(*request):
            send(pack(list(request), number))
            answer = json.loads(answers.readline(LONGEST))
            if 'error' in answer:
                raise RuntimeError(answer['error'])
            return unpack(answer['value'], lambda number: Remote(ask, number))

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
            ready = False  # a name would mean a builtin, or nothing
        passed = ['01'[ready and passes(test)] for test in job['tests']]
        os.write(verdict, ''.join(passed).encode())


def _shut(*descriptors):
    """Closes all other descriptors; standard input and output lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    for fd in set(range(3, OPEN_FILES)) - set(descriptors):
        os.closerange(fd, fd + 1)


def _start(body, *args):
    """Process id of a child that runs body(*args)."""
    child = os.fork()
    if not child:
        try:
            random.seed(0)  # forking draws a seed
            body(*args)
        finally:
            os._exit(0)
    return child


def empty(folder: str):
    """Deletes all that is in the folder, however deep: it lifts what is deep to the top."""
    while names := os.listdir(folder):
        for path in (os.path.join(folder, name) for name in names):
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                os.rename(os.path.join(path, inner), os.path.join(folder, os.urandom(8).hex()))
            os.rmdir(path)


def run_job(folder: str, rules: int | None, calls: bytes | None, alone: bool) -> bool:
    """Runs the next job to its end, then kills and deletes what it left; False when there are no more jobs."""
    requests, replies, verdict = os.pipe(), os.pipe(), os.pipe()
    program = _start(run_program, requests[0], replies[1], rules, calls)
    judge = _start(run_judge, requests[1], replies[0], verdict[1], rules, calls)
    for fd in (*requests, *replies, verdict[1]):
        os.close(fd)
    with os.fdopen(verdict[0]) as pipe:
        passed = pipe.read()  # until the judge ends
    _, status = os.waitpid(judge, 0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1 if alone else program, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    empty(folder)
    if os.waitstatus_to_exitcode(status) == CLOSED:
        return False
    print(json.dumps({'passed': passed, 'expired': os.waitstatus_to_exitcode(status) == -signal.SIGALRM}), flush=True)
    return True


def serve(folder: str, alone: bool):
    """Writes which layers contain programs, then runs jobs from standard input until it closes."""
    mounted = alone and mount_folder(folder)
    give_up_rights()
    os.chdir(folder)
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    rules = landlock_rules(folder)
    calls = call_filter(rules is not None)
    layers = {
        'limits': True,
        'namespaces': alone,
        'own file system': mounted,
        'landlock': rules is not None,
        'system calls': calls is not None,
    }
    print(json.dumps([name for name, active in layers.items() if active]), flush=True)
    for name in PRELOADED:
        importlib.import_module(name)
    exec('')  # the compiler's first use makes its types
    while run_job(folder, rules, calls, alone):
        pass


def main(folder: str):
    """Serves in a child, which is the first process of its namespace, and deletes the folder afterwards."""
    alone = enter_namespaces()
    server = os.fork()
    if not server:
        serve(folder, alone)
        return
    give_up_rights()
    os.waitpid(server, 0)
    empty(folder)
    os.rmdir(folder)


if __name__ == '__main__':
    main(sys.argv[1])
