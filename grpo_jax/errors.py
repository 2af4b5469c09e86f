"""How a program ends early: bad input (what it is, its value and the remedy), or because it was asked to."""


class BadInput(Exception):
    """Input that the user can mend; the programs print it and exit with status 2."""

    def __init__(self, thing, value, remedy):
        super().__init__(f'{thing} = {value!r}: {remedy}')


class Stopped(Exception):
    """A run that was asked to stop before its end, and has saved a checkpoint; the programs exit with status 42."""

    def __init__(self, workdir, step):
        super().__init__(f'stopped after step {step} of {workdir}, which is saved; the same command goes on')
