"""Files and folders that appear under their names only when they are whole, or grow by whole lines."""

from collections.abc import Iterator
import contextlib
import errno
import os
import re
import shutil
from typing import IO, Any

from grpo_jax.errors import BadInput, CannotWrite

# the cache of the Hugging Face hub: a snapshot's folder, and below the cache, what its links lead to: the repository's
# blobs, or those that repositories share
SNAPSHOT = re.compile(r'(?P<cache>.*)/(?P<repository>(?:models|datasets|spaces)--[^/]+)/snapshots/[^/]+(?:/.*)?')
BLOBS = r'(?:%s/blobs/[^/]+|blobs/[0-9a-f]{2}/[0-9a-f]{64})'
# what an operating system says of a disk, in the texts of libraries that raise errors of their own
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOENT)


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """A context in which an OSError becomes CannotWrite of path."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(path, error) from error


@contextlib.contextmanager
def foreign_writing(path: str | os.PathLike) -> Iterator[None]:
    """As writing, around a library that writes path: whatever it raises because of the disk becomes CannotWrite."""
    try:
        yield
    except (BadInput, CannotWrite):
        raise
    except Exception as error:
        cause = disk_error(error)
        if cause is None:
            raise
        raise CannotWrite(path, cause) from error


def disk_error(error: BaseException) -> OSError | None:
    """The OSError that an exception is, was raised from or speaks of; None for an exception with another cause."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    inner = [*getattr(error, 'exceptions', ()), *filter(None, [error.__cause__])]
    for one in inner:
        if cause := disk_error(one):
            return cause
    for number in OF_DISKS:
        if os.strerror(number) in str(error):
            return OSError(number, os.strerror(number))
    return error if isinstance(error, OSError) else None


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = 'w') -> Iterator[IO[Any]]:
    """Opens a file beside path, in mode 'w' (UTF-8) or 'wb', that takes path's place at the end.

    Whoever reads path, also after a crash, sees the old file or the whole new one. After an error path is as it was;
    CannotWrite where the disk is to blame.
    """
    temporary = f'{os.fspath(path)}.writing'
    with writing(path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)  # of a process that was killed, or a link to a file elsewhere
        try:
            with open(temporary, mode, encoding=None if 'b' in mode else 'utf8') as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else a crash may keep the new name and lose the content
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # it was not made, or the folder is gone
                os.remove(temporary)
            raise


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[str]:
    """Makes an empty folder beside path and gives its name; it becomes path at the end, unless an error ends it.

    CannotWrite when path exists by then and is not empty.
    """
    temporary = f'{os.path.normpath(path)}.writing'
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    with foreign_writing(path):
        try:
            os.makedirs(temporary)
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def inside(folder: str | os.PathLike, name: str) -> str:
    """The path of a file in a folder that others have made; BadInput where the name or a link leads out of the folder.

    From a snapshot in the hub's cache links lead to the blobs of its repository, or to those that repositories share.
    """
    home, path = os.path.realpath(folder), os.path.join(folder, name)
    try:
        target = os.path.realpath(path)
    except ValueError as error:  # of a zero byte, or of half a surrogate pair
        raise BadInput(path, name, f'can be the name of no file ({error}); mend it') from None
    within = target.startswith(os.path.join(home, ''))
    if not within and (snapshot := SNAPSHOT.fullmatch(home)):
        blobs = BLOBS % re.escape(snapshot['repository'])
        within = bool(re.fullmatch(blobs, os.path.relpath(target, snapshot['cache'])))
    if os.path.isabs(name) or not within:
        raise BadInput(
            path, target, f'lies outside of {os.fspath(folder)}; put a copy there, or name the folder where it lies'
        )
    return path


def copy_folder(source: str, target: str) -> None:
    """Copies a folder's files into another folder, each whole or not at all."""
    for folder, _, names in os.walk(source):
        place = os.path.join(target, os.path.relpath(folder, source))
        with writing(place):
            os.makedirs(place, exist_ok=True)
        for name in names:
            with (
                open(os.path.join(folder, name), 'rb') as original,
                atomic_write(os.path.join(place, name), 'wb') as copy,
            ):
                shutil.copyfileobj(original, copy)


class Lines:
    """A file that grows by whole lines, which are on the disk when `append` returns.

    On a mounted bucket this uploads the file. A context manager: its end closes the file.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = os.fspath(path)
        with writing(path):
            self._file = open(path, 'ab', buffering=0)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def append(self, line: str) -> None:
        """Adds a line. CannotWrite when that cannot be, and then the file is as long as before, if it is there."""
        with writing(self._path):
            before = os.fstat(self._file.fileno()).st_size
            try:
                append_whole(self._file, f'{line}\n'.encode())
                os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(before)
                raise
            os.stat(self._path)  # a file that was removed takes what is written, and loses it

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        with contextlib.suppress(OSError):  # every line is on the disk
            self._file.close()


def append_whole(file: Any, content: bytes) -> None:
    """Writes all of content to an unbuffered file; a disk that fills up takes the beginning, and then raises."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def cut_lines(path: str | os.PathLike, keep: Any) -> None:
    """Shortens a file to the lines before the first one that is not whole or that keep(line) is false for.

    It takes no space. Nothing happens where there is no file.
    """
    if not os.path.exists(path):
        return
    length = 0
    with open(path, 'rb') as lines:
        for line in lines:
            if not line.endswith(b'\n') or not keep(line):
                break
            length += len(line)
    if length < os.path.getsize(path):
        with writing(path):
            os.truncate(path, length)
