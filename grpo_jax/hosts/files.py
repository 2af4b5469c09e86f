"""Files and folders that appear under their names only when they are whole."""

from collections.abc import Iterator
import contextlib
import os
import shutil
from typing import IO, Any


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = 'w') -> Iterator[IO[Any]]:
    """Opens a file beside path, in mode 'w' (UTF-8) or 'wb', that takes path's place at the end.

    Whoever reads path, also after a crash, sees the old file or the whole new one. After an error path is as it was.
    """
    temporary = f'{os.fspath(path)}.writing'
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
