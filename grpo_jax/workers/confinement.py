"""Confines a process: namespaces, a root of its own, Landlock, a filter of system calls, resource limits.

jail.py calls these functions. For a layer that the machine lacks they return False or None; none needs privileges.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import struct
import sys

FILE_MIB = 16  # size of a file, at most
FOLDER_MIB = 64  # size of all files together, where the folder is a file system of its own
OPEN_FILES = 64
THREADS = 1024  # threads that a program and its tests may start in all
NOBODY = 65534  # the user id inside

NO_NEW_PRIVS, DUMPABLE, SECCOMP = 38, 4, 22  # of prctl
NEW_USER, NEW_PID, NEW_NET, NEW_IPC, NEW_MOUNT = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000
NOSUID_NODEV_NOEXEC, BIND, PRIVATE, DETACH = 2 | 4 | 8, 4096 | 16384, 262144 | 16384, 2  # all but the first recursive
CLONE_THREAD, F_DUPFD_CLOEXEC, F_SETOWN = 0x10000, 1030, 8
MOUNT_SETATTR, RECURSIVE, READ_ONLY, HERE = 442, 0x8000, 1, -100  # the first is one number on all machines
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's calls, one number on all machines
READING, DEVICE, EXECUTING = 4 | 8, 2 | 4, 1  # Landlock's rights
# version of Landlock -> masks of the rights that it governs: files, TCP, signals and abstract sockets
RIGHTS = {1: (2**13 - 1, 0, 0), 2: (2**14 - 1, 0, 0), 3: (2**15 - 1, 0, 0), 4: (2**15 - 1, 3, 0), 5: (2**16 - 1, 3, 0)}
RIGHTS[6] = 2**16 - 1, 3, 3
ALLOW, REFUSE, ABSENT, ASK = (0x7FFF0000, 0x00050001, 0x00050026, 0x7FC00000)  # verdicts: yes, EPERM, ENOSYS, ask
# for the verdict ask: ioctl number and size of a notice, ioctl number and structure of an answer, the flag for yes
NOTICE, ANSWER, GO_ON = (0xC0502100, 80), (0xC0182101, 'QqiI'), 1
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
MACHINES = {'x86_64': (1, 0xC000003E, 317), 'aarch64': (2, 0xC00000B7, 277)}  # column in CALLS, AUDIT_ARCH, seccomp

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
JUDGED_CALLS = (
    'clone 56 220, clone3 435 435, fcntl 72 25, ioctl 16 29, openat 257 56, openat2 437 437, prlimit64 302 261'
)

libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces() -> bool:
    """Moves this process into new namespaces: users, network, IPC, and process ids for its children.

    Returns whether the machine allows it.
    """
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


def libraries() -> list[str]:
    """The folders that a program may read: Python's modules and the system's shared libraries."""
    places = (os.path.join(prefix, name) for prefix in (sys.base_prefix, '/usr', '/') for name in ('lib', 'lib64'))
    return sorted({place for place in places if os.path.isdir(place)})


def enter_own_root(folder: str) -> bool:
    """Replaces the root by a read-only file system that has only the libraries, /dev/null and an empty `folder`.

    Only this process and its children see it. Returns False where the kernel refuses, and all is as before; raises
    OSError where the kernel also refuses to undo a part.
    """
    if not hasattr(libc, 'mount') or libc.unshare(NEW_MOUNT) or libc.mount(None, b'/', None, PRIVATE, None):
        return False
    if not _mount_memory(folder, 'size=1m,mode=755'):
        return False
    made = _bind(os.devnull, folder) and all(_bind(place, folder) for place in libraries())
    if made:
        os.makedirs(folder + folder)
        read_only = struct.pack('4Q', READ_ONLY, 0, 0, 0)
        made = not libc.syscall(MOUNT_SETATTR, HERE, folder.encode(), RECURSIVE, read_only, ctypes.c_size_t(32))
    if made:
        os.chdir(folder)
        made = hasattr(libc, 'pivot_root') and not libc.pivot_root(b'.', b'.')
    # either the old root, which now lies on the new one, or what was built on the folder
    if libc.umount2(b'.' if made else folder.encode(), DETACH):
        raise OSError(ctypes.get_errno(), 'half a root')  # the folder is emptied later: no library may lie in it
    os.chdir('/')
    return made


def _bind(place, folder):
    """Makes the file or folder `place` visible at the same path below `folder`; False where the kernel refuses."""
    target = folder + place
    os.makedirs(target if os.path.isdir(place) else os.path.dirname(target), exist_ok=True)
    if not os.path.exists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    return not libc.mount(place.encode(), target.encode(), None, ctypes.c_ulong(BIND), None)


def mount_folder(folder: str) -> bool:
    """Mounts a small file system on the folder, seen by this process alone; False where the kernel refuses."""
    if not hasattr(libc, 'mount') or libc.unshare(NEW_MOUNT):
        return False
    return _mount_memory(folder, f'size={FOLDER_MIB}m,nr_inodes=4k,mode=700')


def _mount_memory(folder, options):
    """Mounts a file system in memory on the folder; False where the kernel refuses."""
    flags = ctypes.c_ulong(NOSUID_NODEV_NOEXEC)
    return not libc.mount(b'tmpfs', folder.encode(), b'tmpfs', flags, options.encode())


def give_up_rights():
    """Drops all capabilities for good, and keeps this process and its children from inspecting each other."""
    if hasattr(libc, 'capset'):
        libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(DUMPABLE, 0, 0, 0, 0)


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 without one."""
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)) if sys.platform == 'linux' else 0


def landlock_rules(folder: str) -> int | None:
    """File descriptor of Landlock rules that allow all but execution in `folder`, reading in libraries, and /dev/null.

    They forbid the rest of what the kernel's version of Landlock (1 to 6) can govern. None without Landlock.
    """
    version = min(landlock_version(), max(RIGHTS))
    if not version:
        return None
    files, _, _ = RIGHTS[version]
    rules = libc.syscall(CREATE_RULESET, struct.pack('3Q', *RIGHTS[version]), ctypes.c_size_t(24), 0)
    if rules < 0:
        return None
    for path, rights in [(folder, ~EXECUTING), (os.devnull, DEVICE), *((path, READING) for path in libraries())]:
        place = os.open(path, os.O_PATH)
        libc.syscall(ADD_RULE, rules, 1, struct.pack('=Qi', rights & files, place), 0)
        os.close(place)
    return rules


def call_filter(files: bool, threads: bool) -> bytes | None:
    """The filter of system calls, as a BPF program; None where the kernel has no filters.

    files: whether files may be opened for writing, since another layer limits which files. threads: whether threads may
    start.
    """
    if not _has_filters():
        return None
    column, architecture, _ = MACHINES[platform.machine()]
    judged, plain = _numbers(JUDGED_CALLS, column), _numbers(CALLS + (',' + FILE_CALLS if files else ''), column)
    load, equal, at_least, any_bit, both = 0x20, 0x15, 0x35, 0x45, 0x54
    yes, no, absent = (0x06, 0, 0, ALLOW), (0x06, 0, 0, REFUSE), (0x06, 0, 0, ABSENT)

    def when(name, *rows):
        """The rows for one call of JUDGED_CALLS, which other calls skip."""
        return [(equal, 0, len(rows), judged[name]), *rows]

    def argument(index):  # loads the low half of the call's argument
        return load, 0, 0, 16 + 8 * index

    # Landlock checks the right to write only where a file is opened for writing. Access mode 3 escapes the check, and
    # O_TRUNC empties a file in any mode, which the first versions of Landlock do not govern
    opening = [
        *(argument(2), (both, 0, 0, os.O_ACCMODE), (equal, 0, 1, os.O_ACCMODE), no),
        *((equal, 0, 3, os.O_RDONLY), argument(2), (any_bit, 0, 1, os.O_TRUNC), no, yes),
    ]
    rows = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        no,
        (load, 0, 0, 0),
        *when('clone', argument(0), (any_bit, 0, 1, CLONE_THREAD if threads else 0), yes, no),
        *when('clone3', absent),  # its arguments cannot be seen; the C library then takes clone
        *when('openat2', absent),  # likewise
        *when('fcntl', argument(1), (equal, 1, 0, F_DUPFD_CLOEXEC), (at_least, 1, 0, F_SETOWN), yes, no),
        *when('ioctl', argument(1), (at_least, 0, 1, 0x5400), (at_least, 0, 1, 0x5500), no, yes),  # of terminals
        *when('openat', *(opening if files else [argument(2), (any_bit, 0, 1, WRITING), no, yes])),
        *when('prlimit64', argument(0), (equal, 0, 1, 0), yes, no),  # of itself
    ]
    for number in plain.values():
        rows += [(equal, 0, 1, number), yes]
    return _assemble([*rows, no])


def _has_filters():
    """Whether this kernel has filters, and MACHINES has this architecture's numbers."""
    if sys.platform != 'linux' or platform.machine() not in MACHINES:
        return False
    libc.prctl(SECCOMP, 2, None)
    return ctypes.get_errno() == errno.EFAULT  # of a kernel that has filters, and that found none to read


def _numbers(table, column):
    """{name: number} of the system calls in a table like CALLS; column: 1 or 2, this machine's in MACHINES."""
    rows = [row.split() for row in table.split(',')]
    return {row[0]: int(row[column]) for row in rows if row[column] != '-'}


def _assemble(rows):
    """The BPF program of rows (code, jump if true, jump if false, value)."""
    return b''.join(struct.pack('HBBI', *row) for row in rows)


def _filter_pointer(filter_program):
    """(the filter as the kernel takes it, the buffer that it points to, which must outlive it)."""
    text = ctypes.create_string_buffer(filter_program, len(filter_program))
    return struct.pack('HP', len(filter_program) // 8, ctypes.addressof(text)), text


def listen_for_threads() -> int | None:
    """File descriptor of a listener: it gets a notice of each thread that this process or a child starts from now on.

    answer_thread allows or refuses the thread. None where the kernel has no such notices.
    """
    if not _has_filters():
        return None
    column, _, seccomp = MACHINES[platform.machine()]
    number = _numbers(JUDGED_CALLS, column)['clone']
    rows = [(0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16), (0x45, 0, 1, CLONE_THREAD), (0x06, 0, 0, ASK)]
    pointer, _text = _filter_pointer(_assemble([*rows, (0x06, 0, 0, ALLOW)]))
    listener = libc.syscall(seccomp, 1, 8, pointer)
    return None if listener < 0 else listener


def answer_thread(listener: int, allowed: bool):
    """Reads the listener's next notice and lets its thread start, or refuses with EAGAIN, as a full machine would."""
    (receive, size), (send, structure) = NOTICE, ANSWER
    notice = bytearray(size)
    with contextlib.suppress(OSError):  # of a process that has ended
        fcntl.ioctl(listener, receive, notice)
        (number,) = struct.unpack_from('Q', notice)
        error, flag = (0, GO_ON) if allowed else (-errno.EAGAIN, 0)
        fcntl.ioctl(listener, send, struct.pack(structure, number, 0, error, flag))


def confine(memory: int, seconds: int, rules: int | None, filter_program: bytes | None):
    """Limits this process's memory, time, files and system calls for good.

    memory: bytes of address space; seconds: of CPU; rules: from landlock_rules; filter_program: from call_filter.
    Raises OSError when the kernel refuses rules or filter.
    """
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: FILE_MIB * 2**20, resource.RLIMIT_CORE: 0}
    if filter_program is None:
        limits[resource.RLIMIT_NPROC] = 0  # no further process; root may all the same
    if sys.platform == 'linux':
        limits[resource.RLIMIT_AS] = memory  # macOS refuses it
    for name, most in limits.items():
        resource.setrlimit(name, (most, most))
    if rules is not None:
        if libc.syscall(RESTRICT_SELF, rules, 0):
            raise OSError(ctypes.get_errno(), 'Landlock refused')
        os.close(rules)
    if filter_program is not None:
        pointer, _text = _filter_pointer(filter_program)
        if libc.prctl(SECCOMP, 2, pointer, 0, 0):
            raise OSError(ctypes.get_errno(), 'seccomp refused')
