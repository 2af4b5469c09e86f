"""Texts of token ids, foreign texts made safe for a terminal, and the program's activities for run/console.py."""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import time
from typing import Any
import unicodedata


def exact_text(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of token ids with every special token, character for character."""
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def completion_text(tokenizer: Any, ids: Iterable[int], stop_tokens: Sequence[int] = ()) -> str:
    """exact_text of a completion without stop tokens and padding, as rewards, metrics and dumps see it.

    All other special tokens stay. stop_tokens: the run's; the tokenizer's eos token is always left out too.
    """
    left_out = {*stop_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return exact_text(tokenizer, [i for i in ids if int(i) not in left_out])


def escape(text: str) -> str:
    r"""The text on one line, with each invisible character written as in a Python string: \x1b, \n, \u202e.

    Invisible are controls (C0 and C1), marks of direction, joiners, blanks but the usual one, unassigned characters,
    and halves of surrogate pairs. Escaping the result again does not change it.
    """
    if text.isprintable():
        return text
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in text)


def shorten(text: str, most: int) -> str:
    """The escaped text, shortened to `most` columns of a terminal: a longer one has ' ... ' in its middle."""
    if len(text) > 2 * most:  # shortened before it is escaped, since it may have megabytes
        shown = escape(text[:most]) + escape(text[-most:])
    else:
        shown = escape(text)
    if columns(shown) <= most:
        return shown
    room = most - len(' ... ')
    if room < 2:
        return _cut_to_fit(shown, most)
    end = _cut_to_fit(shown[::-1], room // 2)[::-1]
    return f'{_cut_to_fit(shown, room - room // 2)} ... {end}'


def columns(text: str) -> int:
    """The most columns of a terminal that an escaped text takes; wide letters of East Asia take two."""
    return sum(2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in text)


def _cut_to_fit(text, most):
    """The longest beginning of a text that fits into `most` columns."""
    width = 0
    for position, character in enumerate(text):
        width += columns(character)
        if width > most:
            return text[:position]
    return text


class Activity:
    """The progress of an activity that takes the program a while. Any thread may change its attributes meanwhile.

    text: the activity in words. done, total: how many items are finished, of how many; total 0: they are not counted.
    even: items take equally long, so the time that remains can be estimated. lines: each item gets a line of output.
    cells: texts about the last item, the most important first. result: the line at the end; '': none. note: what is
    added to that line.
    """

    def __init__(self, text: str, total: int, done: int, even: bool, lines: bool):
        self.text, self.total, self.done, self.even, self.lines = text, total, done, even, lines
        self.cells: tuple[str, ...] = ()
        self.result = self.note = ''
        self.first, self.began = done, time.monotonic()
        self.stage, self.stage_began = '', self.began  # the part that it is in, and since when

    def enter(self, stage: str) -> None:
        """Begins the part of the activity that `stage` names."""
        self.stage, self.stage_began = stage, time.monotonic()

    def advance(self, done: int, *cells: str) -> None:
        """Sets how many items are finished, with the cells of the last one, and tells the listeners."""
        self.done, self.cells, self.stage = done, cells, ''
        for listener in listeners:
            listener.advanced(self)


# objects like run.console.Console: their methods began, advanced and ended are called with an Activity, also on errors
listeners: list[Any] = []


@contextlib.contextmanager
def during(text: str, total: int = 0, done: int = 0, even: bool = True, lines: bool = False) -> Iterator[Activity]:
    """A context that lasts as long as an activity; yields the Activity. Arguments: see Activity."""
    activity = Activity(text, total, done, even, lines)
    for listener in listeners:
        listener.began(activity)
    try:
        yield activity
    finally:
        for listener in listeners:
            listener.ended(activity)
