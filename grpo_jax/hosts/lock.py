"""A folder has one owner: the process that writes there, which WORKDIR/owner.json names while it does.

It works on mounted buckets: no flock, no links, no times of files. The file is made only where there is none, read
again a moment later, and written anew every BEAT_SECONDS. A process that is gone has no lock: on the same machine that
is seen at once, by its number and start; elsewhere, by beats that do not come.
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
BEAT_SECONDS = 20  # between two signs of life
STALE_SECONDS = 90  # an owner elsewhere that has been silent for so long may be gone
WATCH_SECONDS = 30  # and is, when no beat comes in this time: the clocks of two machines may differ
SETTLE_SECONDS = 1  # after which the file is read again: of two that have made it, one sees the other's name
PARTIAL_SECONDS = 2  # how long a file without content may be one that is just being written

_held: dict[str, 'Lock'] = {}  # of this process, by real path


class Lock:
    """This process's lock of a folder; of several processes of a run, only the first has a file."""

    def __init__(self, folder: str, flag: str):
        self.folder, self._flag, self._path = folder, flag, os.path.join(folder, FILE)
        self._record = _identity() | {'started': time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}
        self._made: list[str] = []  # folders that were not there
        self._lost = ''  # why this process is the owner no longer
        self._settled, self._released, self._writes = threading.Event(), threading.Event(), threading.Lock()
        if any(self.folder.startswith(os.path.join(other, '')) for other in held()):
            self._settled.set()  # the owner of a folder is that of the folders in it

    def take(self) -> None:
        """Makes the file. InUse for another owner who lives; BadInput or CannotWrite where nothing can be written."""
        try:
            self._make_folders()
            while True:
                try:
                    self._create()
                    break
                except FileExistsError:
                    self._judge(_read(self._path))
        except OSError as error:
            self._remove_folders()
            if isinstance(error, CannotWrite) or error.errno in TRANSIENT:
                raise CannotWrite(self._path, error) from None
            reason = error.strerror or str(error)
            raise BadInput(self._flag, self.folder, f'cannot be written to: {reason}; choose another') from None
        threading.Thread(target=self._beat, name='lock', daemon=True).start()

    def check(self, settled: bool) -> None:
        """InUse when another process has taken the folder meanwhile, CannotWrite when the folder is gone.

        settled: waits until the file has been read again.
        """
        if settled:
            self._settled.wait(SETTLE_SECONDS + PARTIAL_SECONDS)
        if self._lost == 'gone':
            raise CannotWrite(self._path, FileNotFoundError(errno.ENOENT, 'the file or its folder has been removed'))
        if self._lost:
            raise InUse(self._flag, self.folder, f'{self._lost} has taken it; this process leaves it')

    def release(self) -> None:
        """Removes the file, and the folders that were made for it where nothing came into them."""
        self._released.set()
        quiet = self._writes.acquire(timeout=PARTIAL_SECONDS)  # a write may hang, and this must not
        with contextlib.suppress(OSError):
            if (_read(self._path, 0) or {}).get('token') == self._record['token']:
                os.remove(self._path)
        if quiet:
            self._writes.release()
        self._remove_folders()

    def _make_folders(self):
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise BadInput(self._flag, self.folder, 'is a file; name a folder')
        path = self.folder
        while not os.path.isdir(path):
            self._made.append(path)
            path = os.path.dirname(path)
        os.makedirs(self.folder, exist_ok=True)

    def _remove_folders(self):
        with contextlib.suppress(OSError):  # something is in there, or it was not made
            for path in self._made:
                os.rmdir(path)

    def _create(self):
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._write(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(self._path)
            raise

    def _write(self, descriptor):
        """Writes the whole file, each time equally many bytes, so that a full disk takes it."""
        try:
            content = json.dumps(self._record | {'beat': int(time.time())}, indent=1).encode()
            if os.pwrite(descriptor, content, 0) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _judge(self, owner):
        """InUse when the owner lives; otherwise removes the file, if it is still that owner's."""
        if owner is None:
            return  # removed meanwhile
        alive = _alive_here(owner, self._record)
        if alive is None:
            alive = self._alive_elsewhere(owner)
        if alive:
            raise InUse(self._flag, self.folder, f'{_describe(owner)} is using it; stop that one, or use another')
        now = _read(self._path, 0)
        if now is not None and now.get('token') == owner.get('token'):
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path)

    def _alive_elsewhere(self, owner):
        """Whether an owner on another machine gives signs of life.

        A silent one, or one by this machine's name (its next incarnation, often), is watched.
        """
        if not owner:
            return False
        silent = abs(time.time() - owner.get('beat', 0))
        if silent < STALE_SECONDS and owner.get('host') != self._record['host']:
            return True
        until = time.monotonic() + WATCH_SECONDS
        with during(f'waiting {WATCH_SECONDS} s for a sign of life: {_describe(owner)} seems gone'):
            while time.monotonic() < until:
                time.sleep(0.5)
                now = _read(self._path)
                if now != owner:
                    return now is not None
        return False

    def _beat(self):
        """Reads the file again, and writes it anew, until the release."""
        wait = SETTLE_SECONDS
        while not self._released.wait(wait):
            wait = BEAT_SECONDS
            with contextlib.suppress(OSError):  # a disk that is full, or away for a moment
                owner = _read(self._path)
                if owner is None:
                    self._lost = 'gone'
                elif owner and owner.get('token') != self._record['token']:
                    self._lost = _describe(owner)
                if self._lost:
                    self._settled.set()
                    return
                self._settled.set()
                with self._writes:
                    if not self._released.is_set():
                        self._write(os.open(self._path, os.O_WRONLY))


@contextlib.contextmanager
def own(folder: str, flag: str = '--workdir') -> Iterator[None]:
    """A context in which this process is the owner of a flag's folder; of several that train as one, the first is.

    InUse, in seconds, when another process is; the others of a run learn it from the first. BadInput or CannotWrite for
    a folder that cannot be made or written to. The lock goes with the context, whatever ends it.
    """
    buckets.refuse(flag, folder)
    path = os.path.realpath(folder)
    if path in _held:
        raise InUse(flag, folder, 'this very process is using it; wait for its end')
    _held[path] = lock = Lock(path, flag)
    try:
        if processes.speaks():
            lock.take()
        yield
    finally:
        del _held[path]
        lock.release()


def check(folder: str, settled: bool = False) -> None:
    """Raises what Lock.check raises when this process is no longer the owner of a folder that it owned."""
    lock = _held.get(os.path.realpath(folder))
    if lock is not None:
        lock.check(settled and processes.speaks())


def held() -> list[str]:
    """The folders that this process owns, the innermost last."""
    return [lock.folder for lock in _held.values()]


def release_all() -> None:
    """Gives up all folders, before the process ends without leaving its contexts."""
    for lock in reversed(list(_held.values())):
        lock.release()


def _identity() -> dict[str, Any]:
    """This process, so that it can be told from all others, also from a later one of the same number."""
    try:  # process numbers mean the same within a boot of a kernel, and a container in it
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
    """When a process began, as a text of ticks since the boot; '' where that is not known, None for a dead one."""
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


def _alive_here(owner, own):
    """Whether the owner lives; None where this machine cannot know."""
    if owner.get('machine') != own['machine'] or not isinstance(owner.get('process'), int):
        return None
    mine = _identity()
    if all(owner.get(name) == mine[name] for name in ('process', 'machine', 'birth')):
        return False  # of a run in this process that has ended
    birth = _birth(owner['process'])
    return birth is not None and (not birth or not owner.get('birth') or birth == owner['birth'])


def _describe(owner):
    return f'process {owner.get("process")} on {owner.get("host")}, begun at {owner.get("started")},'


def _read(path, patience=None):
    """What the file says; None without one. {} for one that stays without content, as a crash may leave it."""
    until = time.monotonic() + (PARTIAL_SECONDS if patience is None else patience)
    while True:
        try:
            with open(path, encoding='utf8') as file:
                content = json.load(file)
            return content if isinstance(content, dict) else {}
        except FileNotFoundError:
            return None
        except ValueError:  # in the middle of being written
            if time.monotonic() > until:
                return {}
        time.sleep(0.05)
