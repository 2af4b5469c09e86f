"""Texts of others, which are shown and never obeyed; and what the program is doing now, for run/console.py."""

from collections.abc import Iterator
import contextlib
import time
from typing import Protocol
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


class Activity:
    """Something that lasts. Its attributes may change while it does, from any thread.

    text names it; `done` of `total` are finished (total 0: nobody counts), which take equally long if `even`, and have
    a line each if `lines`; cells describe what is finished, the most important first. result is the line at its end,
    and note what that line adds; without a result there is no line.
    """

    def __init__(self, text: str, total: int, done: int, even: bool, lines: bool):
        self.text, self.total, self.done, self.even, self.lines = text, total, done, even, lines
        self.cells: tuple[str, ...] = ()
        self.result = self.note = ''
        self.first, self.began = done, time.monotonic()
        self.stage, self.stage_began = '', self.began  # what it does at the moment

    def enter(self, stage: str) -> None:
        """Begins a stage."""
        self.stage, self.stage_began = stage, time.monotonic()

    def advance(self, done: int, *cells: str) -> None:
        """`done` are finished now."""
        self.done, self.cells, self.stage = done, cells, ''
        for listener in listeners:
            listener.advanced(self)


class Listener(Protocol):
    """What is told of each activity."""

    def began(self, activity: Activity) -> None: ...

    def advanced(self, activity: Activity) -> None: ...

    def ended(self, activity: Activity) -> None: ...


listeners: list[Listener] = []


@contextlib.contextmanager
def during(text: str, total: int = 0, done: int = 0, even: bool = True, lines: bool = False) -> Iterator[Activity]:
    """A context in which the program does what `text` says; gives the Activity."""
    activity = Activity(text, total, done, even, lines)
    for listener in listeners:
        listener.began(activity)
    try:
        yield activity
    finally:
        for listener in listeners:
            listener.ended(activity)
