"""How a command ends early: for bad input (the thing, its value, the remedy), or because it was asked to stop."""

from typing import Any


class BadInput(Exception):
    """Input that the user can correct; the commands print it and exit with status 2."""

    def __init__(self, thing: str, value: Any, remedy: str):
        super().__init__(f'{thing} = {value!r}: {remedy}')


class Stopped(Exception):
    """A run that was asked to stop before its end and has saved a checkpoint; the commands exit with status 42."""

    def __init__(self, workdir: str, step: int):
        super().__init__(f'stopped after step {step} of {workdir}, which is saved; the same command goes on')
