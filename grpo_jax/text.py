"""Texts of others on a terminal: they are shown, and never obeyed."""

import unicodedata


def escape(text: str) -> str:
    r"""The text in which each character that cannot be seen is written as in a Python string: \x1b, \n, \u202e.

    Those are controls (C0 and C1), marks of direction, joiners, blanks but the usual one, unassigned characters, and
    halves of surrogate pairs. What the function returns is one line, and stays the same when it is escaped again.
    """
    if text.isprintable():
        return text
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in text)


def cut(text: str, most: int) -> str:
    """The text, escaped; of one that takes more than `most` columns the beginning and the end, around ' ... '."""
    if len(text) > 2 * most:  # before it is escaped, since it may have megabytes
        shown = escape(text[:most]) + escape(text[-most:])
    else:
        shown = escape(text)
    if columns(shown) <= most:
        return shown
    room = most - len(' ... ')
    if room < 2:
        return _fitting(shown, most)
    end = _fitting(shown[::-1], room // 2)[::-1]
    return f'{_fitting(shown, room - room // 2)} ... {end}'


def columns(text: str) -> int:
    """How many columns of a terminal an escaped text takes, at most: letters of East Asia take two."""
    return sum(2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in text)


def _fitting(text, most):
    """The longest beginning of a text that has room in so many columns."""
    taken = 0
    for position, character in enumerate(text):
        taken += columns(character)
        if taken > most:
            return text[:position]
    return text
