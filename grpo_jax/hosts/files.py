"""Writes files and folders that get their names only when they are whole, and files that grow by whole lines."""

from collections.abc import Iterator
import contextlib
import errno
import os
import re
import shutil
from typing import IO, Any

from grpo_jax.errors import BadInput, CannotWrite

# In the Hugging Face hub's cache: the folder of a snapshot, and the files that its links lead to. These are blobs of
# the same repository, or blobs that repositories share.
SNAPSHOT = re.compile(r'(?P<cache>.*)/(?P<repository>(?:models|datasets|spaces)--[^/]+)/snapshots/[^/]+(?:/.*)?')
BLOBS = r'(?:%s/blobs/[^/]+|blobs/[0-9a-f]{2}/[0-9a-f]{64})'
# Errors of disks. Libraries that raise other types than OSError quote their texts.
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOENT)


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """A context that raises CannotWrite(path) in place of an exception behind which disk_error finds an OSError."""
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
    """The OSError behind an exception, or None where a disk's error is not its reason.

    Looks at the exception, its cause and the exceptions of its group, then for a text of OF_DISKS in its message.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error
    inner = [*getattr(error, 'exceptions', ()), *filter(None, [error.__cause__])]
    for exception in inner:
        if cause := disk_error(exception):
            return cause
    for number in OF_DISKS:
        if os.strerror(number) in str(error):
            return OSError(number, os.strerror(number))
    return error if isinstance(error, OSError) else None


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = 'w') -> Iterator[IO[Any]]:
    """Opens a file beside path, in mode 'w' (UTF-8) or 'wb', and renames it to path at the end of the context.

    A reader of path, also after a crash, sees the old file or the whole new one. After an error path is as it was.
    Raises CannotWrite for an error of the disk.
    """
    temporary = f'{os.fspath(path)}.writing'
    with writing(path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)  # left by a process that was killed, or a link to a file elsewhere
        try:
            with open(temporary, mode, encoding=None if 'b' in mode else 'utf8') as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else a crash may keep the new name and lose the content
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the file was not made, or the folder is gone
                os.remove(temporary)
            raise


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[str]:
    """Makes an empty folder beside path, yields its name, and renames it to path at the end of the context.

    After an error the new folder is removed. Raises CannotWrite for an error of the disk, and when path is not empty.
    """
    temporary = f'{os.path.normpath(path)}.writing'
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    with writing(path):
        try:
            os.makedirs(temporary)
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def path_inside(folder: str | os.PathLike, name: str) -> str:
    """The path of the file `name` in a folder that others have made, checked to lie in the folder.

    Raises BadInput for a name that no file can have, and where the name or a link leads out of the folder. From a
    snapshot in the hub's cache, links may lead to blobs of the repository, or to blobs that repositories share.
    """
    home, path = os.path.realpath(folder), os.path.join(folder, name)
    try:
        target = os.path.realpath(path)
    except ValueError as error:  # the name has a zero byte, or half a surrogate pair
        remedy = f'cannot be the name of a file ({error}); correct the file that lists it, or fetch the folder again'
        raise BadInput(f'a file of {folder}', name, remedy) from None
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
    """Copies a folder's files into another folder, each whole or not at all; raises CannotWrite."""
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
    """A file that grows by whole lines; a line is on the disk when `append` returns.

    On a mounted bucket, each append uploads the file. As a context manager, it closes the file at the end.
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
        """Adds a line. Raises CannotWrite for an error of the disk; the file then keeps its length."""
        with writing(self._path):
            before = os.fstat(self._file.fileno()).st_size
            try:
                append_whole(self._file, f'{line}\n'.encode())
                os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(before)
                raise
            os.stat(self._path)  # a removed file takes lines without an error, and they are lost

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        with contextlib.suppress(OSError):  # every line is on the disk
            self._file.close()


def append_whole(file: Any, content: bytes) -> None:
    """Writes content to an unbuffered file. Raises OSError when the disk is full; the file then has a part of it."""
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


def cut_lines(path: str | os.PathLike, keep: Any) -> None:
    """Shortens a file: cuts it before the first line that is incomplete, or for which keep(line) is false.

    keep: gets the line as bytes. This needs no disk space, and does nothing without a file. Raises CannotWrite.
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
