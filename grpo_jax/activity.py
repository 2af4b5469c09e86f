"""What the program is doing now: what lasts says it here, and run/console.py shows it."""

from collections.abc import Iterator
import contextlib
import time
from typing import Protocol


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
        for observer in observers:
            observer.advanced(self)


class Observer(Protocol):
    """What is told of each activity."""

    def began(self, activity: Activity) -> None: ...

    def advanced(self, activity: Activity) -> None: ...

    def ended(self, activity: Activity) -> None: ...


observers: list[Observer] = []


@contextlib.contextmanager
def during(text: str, total: int = 0, done: int = 0, even: bool = True, lines: bool = False) -> Iterator[Activity]:
    """A context in which the program does what `text` says; gives the Activity."""
    activity = Activity(text, total, done, even, lines)
    for observer in observers:
        observer.began(activity)
    try:
        yield activity
    finally:
        for observer in observers:
            observer.ended(activity)
