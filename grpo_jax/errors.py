"""Bad input: one message that names the thing, its value and the remedy."""


class BadInput(Exception):
    """Input that the user can mend; the programs print it and exit with status 2."""

    def __init__(self, thing, value, remedy):
        super().__init__(f'{thing} = {value!r}: {remedy}')
