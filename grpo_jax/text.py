"""Texts of others on a terminal: they are shown, and never obeyed."""


def escape(text: str) -> str:
    r"""The text in which each character that cannot be seen is written as in a Python string: \x1b, \n, \u202e.

    Those are controls (C0 and C1), marks of direction, joiners, blanks but the usual one, unassigned characters, and
    halves of surrogate pairs. What the function returns is one line, and stays the same when it is escaped again.
    """
    if text.isprintable():
        return text
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in text)
