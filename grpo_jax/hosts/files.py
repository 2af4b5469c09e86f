"""Files and folders that appear under their names only when they are whole; and files that lie where they seem to."""

from collections.abc import Iterator
import contextlib
import os
import re
import shutil
from typing import IO, Any

from grpo_jax.errors import BadInput

# the cache of the Hugging Face hub: a snapshot's folder, and below the cache, what its links lead to: the repository's
# blobs, or those that repositories share
SNAPSHOT = re.compile(r'(?P<cache>.*)/(?P<repository>(?:models|datasets|spaces)--[^/]+)/snapshots/[^/]+(?:/.*)?')
BLOBS = r'(?:%s/blobs/[^/]+|blobs/[0-9a-f]{2}/[0-9a-f]{64})'


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = 'w') -> Iterator[IO[Any]]:
    """Opens a file beside path, in mode 'w' (UTF-8) or 'wb', that takes path's place at the end.

    Whoever reads path, also after a crash, sees the old file or the whole new one. After an error path is as it was.
    """
    temporary = f'{os.fspath(path)}.writing'
    with contextlib.suppress(FileNotFoundError):
        os.remove(temporary)  # of a process that was killed, or a link to a file elsewhere
    try:
        with open(temporary, mode, encoding=None if 'b' in mode else 'utf8') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash may keep the new name and lose the content
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[str]:
    """Makes an empty folder beside path and gives its name; it becomes path at the end, unless an error ends it.

    OSError when path exists by then and is not empty.
    """
    temporary = f'{os.path.normpath(path)}.writing'
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    os.makedirs(temporary)
    try:
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
