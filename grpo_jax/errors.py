"""Exceptions that end a command early, with a message of one line and an exit status; docs/start.md lists them."""

import errno
import os
from typing import Any

from grpo_jax.text import escape

LONGEST = 4000  # characters of a message; a name or a value in a stranger's file may have millions
# exit statuses of a run that a signal has ended: after it was saved; at once, by Ctrl-C
TERMINATED, INTERRUPTED = 42, 130
# errno -> what a person can do about it
REMEDIES = {
    errno.ENOSPC: 'make space',
    errno.EDQUOT: 'make space, or raise the quota',
    errno.EFBIG: 'raise the limit of the size of a file',
    errno.EROFS: 'make it writable',
    errno.EACCES: 'let this user write there',
    errno.EPERM: 'let this user write there',
    errno.ENOENT: 'bring the folder back',
}
TRANSIENT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)  # errors of a disk that may pass


class BadInput(Exception):
    """Input that the user can correct; the commands print it and exit with status 2."""

    status = 2

    def __init__(self, thing: str, value: Any, remedy: str):
        super().__init__(thing, value, remedy)  # as they are, so that pickle can send it between processes

    def __str__(self) -> str:
        thing, value, remedy = self.args
        try:
            value = repr(value)
        except Exception:  # an integer of thousands of digits, or an object of the user's
            value = type(value).__name__
        value = value if len(value) <= LONGEST // 4 else f'{value[: LONGEST // 4]}...'
        lines = f'{thing} = {value}: {remedy}'.splitlines()  # a library's message may have several
        line = ' '.join(filter(None, map(str.strip, lines)))
        return escape(line if len(line) <= LONGEST else f'{line[:LONGEST]}...')

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in a notebook instead of a traceback."""
        return [f'error: {self}']


class InUse(BadInput):
    """A workdir that another process writes to. Its own exit status tells a script that it may try again later."""

    status = 45


class Stopped(Exception):
    """Raised when a run was asked to stop, and has saved a checkpoint; the commands exit with its status."""

    status = TERMINATED

    def __init__(self, workdir: str, step: int):
        super().__init__(f'stopped after step {step} of {workdir}, which is saved; the same command goes on')

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in a notebook instead of a traceback."""
        return [str(self)]


class Diagnosed(Stopped):
    """Raised when a diagnosis has stopped a run, because config.diagnose.on is 'stop'.

    The same command continues the run; the cause of the diagnosis remains.
    """

    status = 46

    def __init__(self, workdir: str, step: int):
        Exception.__init__(
            self,
            f'stopped after step {step} of {workdir} by its diagnosis (config.diagnose.on = stop), which '
            f'{os.path.join(workdir, "events.jsonl")} has; it is saved, and the same command goes on',
        )


class CannotWrite(OSError):
    """Raised for a file that must be kept and cannot be written; the commands print it and exit with its status."""

    status = 44

    def __init__(self, path: str | os.PathLike, cause: OSError):
        super().__init__(cause.errno, cause.strerror or str(cause), os.fspath(path))

    def __str__(self) -> str:
        remedy = REMEDIES.get(self.errno or 0, 'mend the disk')
        return f'cannot write {self.filename}: {self.strerror}; {remedy}, then the same command goes on'

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in a notebook instead of a traceback."""
        return [f'error: {self}']
