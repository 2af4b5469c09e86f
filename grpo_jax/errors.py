"""How a command ends early: for bad input (the thing, its value, the remedy), or because it was asked to stop."""

from typing import Any

TERMINATED, INTERRUPTED = 42, 130  # exit statuses of a run that SIGTERM or Ctrl-C has ended
LONGEST = 1000  # characters of a value that a message shows


class BadInput(Exception):
    """Input that the user can correct; the commands print it and exit with status 2."""

    def __init__(self, thing: str, value: Any, remedy: str):
        super().__init__(thing, value, remedy)  # as they are, so that it survives a pipe between processes

    def __str__(self) -> str:
        thing, value, remedy = self.args
        try:
            shown = repr(value)
        except Exception:  # a whole number of thousands of digits, or an object of the user's
            shown = type(value).__name__
        shown = shown if len(shown) <= LONGEST else f'{shown[:LONGEST]}...'
        lines = f'{thing} = {shown}: {remedy}'.splitlines()  # what another library says may have several
        return ' '.join(filter(None, map(str.strip, lines)))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it in a notebook."""
        return [f'error: {self}']


class Stopped(Exception):
    """A run that was asked to stop before its end and has saved a checkpoint; the commands exit with its status."""

    def __init__(self, workdir: str, step: int, status: int = TERMINATED):
        super().__init__(f'stopped after step {step} of {workdir}, which is saved; the same command goes on')
        self.status = status

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it in a notebook."""
        return [str(self)]
