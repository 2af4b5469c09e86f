"""How a command ends early: for bad input (the thing, its value, the remedy), or because it was asked to stop."""

from typing import Any

from grpo_jax.text import escape

TERMINATED, INTERRUPTED = 42, 130  # exit statuses of a run that SIGTERM or Ctrl-C has ended
LONGEST = 4000  # characters of a message; a name or a value of a stranger's file may have millions


class BadInput(Exception):
    """Input that the user can correct; the commands print it and exit with status 2."""

    def __init__(self, thing: str, value: Any, remedy: str):
        super().__init__(thing, value, remedy)  # as they are, so that it survives a pipe between processes

    def __str__(self) -> str:
        thing, value, remedy = self.args
        try:
            value = repr(value)
        except Exception:  # a whole number of thousands of digits, or an object of the user's
            value = type(value).__name__
        value = value if len(value) <= LONGEST // 4 else f'{value[: LONGEST // 4]}...'
        lines = f'{thing} = {value}: {remedy}'.splitlines()  # what another library says may have several
        line = ' '.join(filter(None, map(str.strip, lines)))
        return escape(line if len(line) <= LONGEST else f'{line[:LONGEST]}...')

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
