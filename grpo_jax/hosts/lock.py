"""Locks a folder: WORKDIR/owner.json names the one process that owns the folder and writes there.

This works on mounted buckets: no flock, no links, no file times. The owner creates the file only where there is none,
reads it again a moment later, and rewrites it every BEAT_SECONDS. The lock of a dead process does not count. On the
same machine, its process number and start time tell at once that it is dead; on others, its missing beats do: a second
process is refused for STALE_SECONDS after the last beat, and then watches for PATIENCE_SECONDS. If both hosts have
the same name, it watches at once.
"""

from collections.abc import Iterator
import contextlib
import errno
import json
import os
import socket
import threading
import time
from typing import Any
import uuid

from grpo_jax.errors import TRANSIENT, BadInput, CannotWrite, InUse
from grpo_jax.hosts import buckets, processes
from grpo_jax.text import during

FILE = 'owner.json'
BEAT_SECONDS = 20  # between two beats, the owner's signs of life
STALE_SECONDS = 90  # after so long without a beat, an owner on another machine may be dead
PATIENCE_SECONDS = 30  # it is dead if no beat comes while we watch this long; clocks of two machines may differ
SETTLE_SECONDS = 1  # until the file is read again: if two processes have created it, one sees the other's name
PARTIAL_SECONDS = 2  # an empty file this young may be one that is being written

_held: dict[str, 'Lock'] = {}  # this process's locks by real path


class Lock:
    """This process's lock on a folder: owner.json in it, which a thread rewrites until `release`.

    flag: the command-line flag that names the folder in messages. When several processes train as one, only the first
    of them calls `take`.
    """

    def __init__(self, folder: str, flag: str):
        self.folder, self._flag, self._path = folder, flag, os.path.join(folder, FILE)
        self._record = _identity() | {'started': time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}
        self._made: list[str] = []  # folders that this lock has made
        self._lost = ''  # why this process is no longer the owner
        self._settled, self._released, self._write_lock = threading.Event(), threading.Event(), threading.Lock()
        if any(self.folder.startswith(os.path.join(other, '')) for other in owned_folders()):
            self._settled.set()  # a folder in a folder that this process owns needs no wait

    def take(self) -> None:
        """Creates owner.json, and the folder if absent, and starts the thread that beats. Replaces a dead owner's file.

        Raises InUse for an owner that is alive, and BadInput or CannotWrite where nothing can be written.
        """
        try:
            self._make_folders()
            while True:
                try:
                    self._create()
                    break
                except FileExistsError:
                    self._remove_if_dead(_read_record(self._path))
        except OSError as error:
            self._remove_folders()
            if isinstance(error, CannotWrite) or error.errno in TRANSIENT:
                raise CannotWrite(self._path, error) from None
            reason = error.strerror or str(error)
            raise BadInput(self._flag, self.folder, f'cannot be written to: {reason}; choose another folder') from None
        threading.Thread(target=self._beat, name='lock', daemon=True).start()

    def check(self, settled: bool) -> None:
        """Raises InUse when another process has taken the folder, CannotWrite when the folder or owner.json is gone.

        settled: whether to wait first until owner.json has been read again after its creation.
        """
        if settled:
            self._settled.wait(SETTLE_SECONDS + PARTIAL_SECONDS)
        if self._lost == 'gone':
            raise CannotWrite(self._path, FileNotFoundError(errno.ENOENT, 'the file or its folder has been removed'))
        if self._lost:
            raise InUse(self._flag, self.folder, f'{self._lost} has taken it; stop that one, or use another folder')

    def release(self) -> None:
        """Removes owner.json, unless another process owns it by now, and the folders that `take` made, if empty."""
        self._released.set()
        acquired = self._write_lock.acquire(timeout=PARTIAL_SECONDS)  # a write may hang, and this must not
        with contextlib.suppress(OSError):
            if (_read_record(self._path, 0) or {}).get('token') == self._record['token']:
                os.remove(self._path)
        if acquired:
            self._write_lock.release()
        self._remove_folders()

    def _make_folders(self):
        """Makes the folder and its parents, and notes in self._made which ones were absent."""
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise BadInput(self._flag, self.folder, 'is a file; name a folder')
        path = self.folder
        while not os.path.isdir(path):
            self._made.append(path)
            path = os.path.dirname(path)
        os.makedirs(self.folder, exist_ok=True)

    def _remove_folders(self):
        """Removes the folders in self._made, the innermost first, up to the first that is not empty."""
        with contextlib.suppress(OSError):  # the folder is not empty, or was not made
            for path in self._made:
                os.rmdir(path)

    def _create(self):
        """Creates the file with this process's record. Raises FileExistsError where there is one."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._write(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(self._path)
            raise

    def _write(self, descriptor):
        """Writes record and time over an open file, and closes it; its length stays, so that a full disk takes it."""
        try:
            content = json.dumps(self._record | {'beat': int(time.time())}, indent=1).encode()
            if os.pwrite(descriptor, content, 0) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _remove_if_dead(self, owner):
        """Raises InUse when the owner (a _read_record) is alive; else removes the file, if it still is that owner's."""
        if owner is None:
            return  # the file was removed meanwhile
        alive = _is_alive_here(owner, self._record)
        if alive is None:
            alive = self._is_alive_elsewhere(owner)
        if alive:
            remedy = 'stop that one, or use another folder'
            raise InUse(self._flag, self.folder, f'{_describe(owner)} is using it; {remedy}')
        current = _read_record(self._path, 0)
        if current is not None and current.get('token') == owner.get('token'):
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path)

    def _is_alive_elsewhere(self, owner):
        """Whether an owner on another machine is alive.

        An owner without a recent beat is watched for PATIENCE_SECONDS. So is one with this machine's host name, which
        often is the same machine before a restart.
        """
        if not owner:
            return False
        silent = abs(time.time() - owner.get('beat', 0))
        if silent < STALE_SECONDS and owner.get('host') != self._record['host']:
            return True
        until = time.monotonic() + PATIENCE_SECONDS
        with during(f'waiting {PATIENCE_SECONDS} s for a sign of life: {_describe(owner)} seems gone'):
            while time.monotonic() < until:
                time.sleep(0.5)
                current = _read_record(self._path)
                if current != owner:
                    return current is not None
        return False

    def _beat(self):
        """The body of the lock's thread: rewrites owner.json every BEAT_SECONDS, until `release`.

        Ends when the file is gone or another process's, and notes this in self._lost, which `check` reads.
        """
        wait = SETTLE_SECONDS
        while not self._released.wait(wait):
            wait = BEAT_SECONDS
            with contextlib.suppress(OSError):  # the disk is full, or absent for a moment
                owner = _read_record(self._path)
                if owner is None:
                    self._lost = 'gone'
                elif owner and owner.get('token') != self._record['token']:
                    self._lost = _describe(owner)
                if self._lost:
                    self._settled.set()
                    return
                self._settled.set()
                with self._write_lock:
                    if not self._released.is_set():
                        self._write(os.open(self._path, os.O_WRONLY))


@contextlib.contextmanager
def own(folder: str, flag: str = '--workdir') -> Iterator[None]:
    """Makes this process, or the first of several that train as one, the owner of a folder within the context.

    flag: names the folder in messages. Raises InUse, within a minute, when another process is the owner; the other
    processes of a run learn this from the first. Raises BadInput or CannotWrite for a folder that cannot be made or
    written to. The lock is released at the end of the context, also after an error.
    """
    if not folder:
        raise BadInput(flag, folder, 'names no folder; name one')
    buckets.refuse(flag, folder)
    path = os.path.realpath(folder)
    if path in _held:
        raise InUse(flag, folder, 'this very process is using it; wait until it has ended, or use another folder')
    _held[path] = lock = Lock(path, flag)
    try:
        if processes.speaks():
            lock.take()
        yield
    finally:
        del _held[path]
        lock.release()


def check(folder: str, settled: bool = False) -> None:
    """Calls Lock.check(settled) for a folder that this process owns: it raises InUse or CannotWrite if that is lost."""
    lock = _held.get(os.path.realpath(folder))
    if lock is not None:
        lock.check(settled and processes.speaks())


def owned_folders() -> list[str]:
    """The folders that this process owns, the innermost one last."""
    return [lock.folder for lock in _held.values()]


def release_all() -> None:
    """Releases all locks; for a process that is about to end without leaving its contexts."""
    for lock in reversed(list(_held.values())):
        lock.release()


def _identity() -> dict[str, Any]:
    """A record that identifies this process among all others, also later ones with the same process number."""
    try:  # a process number is only unique within one boot of a kernel, and within one container
        with open('/proc/sys/kernel/random/boot_id', encoding='utf8') as file:
            machine = f'{file.read().strip()} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        machine = socket.gethostname()
    return {
        'host': socket.gethostname(),
        'process': os.getpid(),
        'machine': machine,
        'birth': _birth(os.getpid()),
        'token': uuid.uuid4().hex,
    }


def _birth(process):
    """When a process began, as text: clock ticks since the boot; '' where that is unknown, None for a dead process."""
    try:
        with open(f'/proc/{process}/stat', encoding='utf8', errors='replace') as file:
            fields = file.read().rpartition(')')[2].split()
        return None if fields[0] in 'ZX' else fields[19]
    except OSError:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return ''
        return ''


def _is_alive_here(owner, record):
    """Whether an owner on this machine is alive; None for an owner on another one. record: this process's _identity."""
    if owner.get('machine') != record['machine'] or not isinstance(owner.get('process'), int):
        return None
    identity = _identity()
    if all(owner.get(name) == identity[name] for name in ('process', 'machine', 'birth')):
        return False  # an earlier run in this process, which has ended
    birth = _birth(owner['process'])
    return birth is not None and (not birth or not owner.get('birth') or birth == owner['birth'])


def _describe(owner):
    """The words that name an owner in messages."""
    return f'process {owner.get("process")} on {owner.get("host")}, begun at {owner.get("started")},'


def _read_record(path, patience=None):
    """The record in the lock file; None where the file is absent, {} where it holds no record, as after a crash.

    patience: seconds to wait for the content of an empty file; None: PARTIAL_SECONDS.
    """
    until = time.monotonic() + (PARTIAL_SECONDS if patience is None else patience)
    while True:
        try:
            with open(path, encoding='utf8') as file:
                content = json.load(file)
            return content if isinstance(content, dict) else {}
        except FileNotFoundError:
            return None
        except ValueError:  # another process is writing it
            if time.monotonic() > until:
                return {}
        time.sleep(0.05)
