"""Exceptions that end a command early, with a message of one line and an exit status; docs/start.md lists them."""

from collections.abc import Callable
import errno
import os
from typing import Any

from grpo_jax.text import escape

NO_VALUE = ...  # in place of a value, where none was given or the thing alone is the subject
LONGEST = 4000  # characters of a message; a name or a value in a stranger's file may have millions
# exit statuses after a signal: of a run, which was saved or had nothing to save; of another command, after Ctrl-C
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
    """Raised for input that the user can correct; the commands print it and exit with status 2.

    It reads as a sentence, `thing = value: remedy`, about something that the user named; with NO_VALUE, `thing remedy`.
    """

    status = 2

    def __init__(self, thing: str, value: Any, remedy: str):
        super().__init__(thing, value, remedy)  # as they are, so that pickle can send it between processes

    @property
    def refusals(self) -> tuple['BadInput', ...]:
        """The single BadInputs in this error, which is one itself; each is a line of output."""
        return (self,)

    def __str__(self) -> str:
        thing, value, remedy = self.args
        try:
            shown = repr(value)
        except Exception:  # an integer of thousands of digits, or an object of the user's
            shown = type(value).__name__
        shown = shown if len(shown) <= LONGEST // 4 else f'{shown[: LONGEST // 4]}...'
        subject = thing if value is NO_VALUE else f'{thing} = {shown}:'
        lines = f'{subject} {remedy}'.splitlines()  # a library's message may have several
        line = ' '.join(filter(None, map(str.strip, lines)))
        return escape(line if len(line) <= LONGEST else f'{line[:LONGEST]}...')

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in a notebook instead of a traceback."""
        return [f'error: {refusal}' for refusal in self.refusals]


class InUse(BadInput):
    """Raised for a workdir that another process writes to. By its exit status a script may try again later."""

    status = 45


class BadInputs(BadInput):
    """Several BadInputs as one, in the order of the checks that raised them; each is a line of the message."""

    def __init__(self, *refusals: BadInput):
        Exception.__init__(self, *refusals)

    @property
    def refusals(self) -> tuple[BadInput, ...]:
        """The BadInputs that are joined here."""
        return self.args

    def __str__(self) -> str:
        return '\n'.join(map(str, self.args))


class _Unmade:
    """The type of UNMADE, which stands for a value that a check has refused. Its attributes and sums are UNMADE too."""

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return self

    def __add__(self, other):
        return self

    __radd__ = __add__

    def __iter__(self):
        return iter(())


UNMADE: Any = _Unmade()


class Checks:
    """A context for independent checks; its end raises everything that they have refused.

    `check(function, ...)` returns what the function returns, or UNMADE when it raises BadInput. With an UNMADE argument
    it does not call the function, and returns UNMADE: a value that could not be made causes no further refusals.
    """

    def __init__(self, outer: 'Checks | None' = None):
        """outer: Checks that get these refusals and raise them later, so that the block may return UNMADE values."""
        self._outer = outer
        self._refusals: dict[str, BadInput] = {}  # by message, since two checks may read the same key

    def __call__(self, function: Callable, *arguments: Any, **named: Any) -> Any:
        if any(value is UNMADE for value in (*arguments, *named.values())):
            return UNMADE
        try:
            return function(*arguments, **named)
        except InUse:
            raise
        except BadInput as error:
            self.keep(error)
            return UNMADE

    def keep(self, error: BadInput) -> None:
        """Adds an error to those that the end of the context raises."""
        for refusal in error.refusals:
            self._refusals.setdefault(str(refusal), refusal)

    def __enter__(self) -> 'Checks':
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, BadInput) and not isinstance(error, InUse):
            self.keep(error)
        elif error is not None:
            return
        refusals = [*self._refusals.values()]
        if self._outer is not None and error is None:
            for refusal in refusals:
                self._outer.keep(refusal)
        elif len(refusals) > 1:
            raise BadInputs(*refusals) from None
        elif refusals and refusals[0] is not error:
            raise refusals[0]


class Stopped(Exception):
    """Raised when a run was asked to stop, and has saved a checkpoint; the commands exit with its status."""

    status = TERMINATED

    def __init__(self, workdir: str, done: int, steps: int):
        super().__init__(workdir, done, steps)  # as they are, so that pickle can send it between processes

    def __str__(self) -> str:
        workdir, done, steps = self.args
        return f'stopped after {done} of {steps} steps; {workdir} is saved, and the same command goes on'

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in a notebook instead of a traceback."""
        return [str(self)]


class Diagnosed(Stopped):
    """Raised when a diagnosis has stopped a run, because config.diagnose.on is 'stop'.

    The same command continues the run; the cause of the diagnosis remains.
    """

    status = 46

    def __str__(self) -> str:
        workdir, done, steps = self.args
        return (
            f'stopped after {done} of {steps} steps by a diagnosis (config.diagnose.on = stop), which '
            f'{os.path.join(workdir, "events.jsonl")} has; {workdir} is saved, and the same command goes on'
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
