"""What a person sees of a run, on stderr: what it is doing now, and warnings of a line each.

On a terminal, live lines at the bottom show it. Elsewhere a line is printed when something has lasted a second, one at
least every EVERY seconds while it goes on, and one at its end. Each step of a training has a line on both. Only the
first of several processes shows anything.
"""

from collections.abc import Sequence
import contextlib
import logging
import math
import sys
import threading
import time
import traceback
import types
import warnings

import absl.logging
import rich.console
import rich.live
import rich.progress_bar
import rich.table
import rich.text

from grpo_jax import activity
from grpo_jax.activity import Activity
from grpo_jax.hosts import processes
from grpo_jax.run.tables import WIDTH
from grpo_jax.text import columns, cut, escape

EVERY = 8.0  # seconds between two lines, at most
SHORT = 1.0  # seconds that something lasts without being named
TRIFLE = 0.1  # seconds: what has taken less leaves no line
LINES = 10  # that something of many steps prints of itself, besides
BAR = 24  # columns of a bar


class Console:
    """Shows activities, and prints lines above them; an activity.Observer."""

    def __init__(self):
        self._lock = threading.RLock()
        self._running: list[Activity] = []  # the innermost last
        self._named: list[Activity] = []  # those of them that a line was printed about
        self._printed = 0.0  # when the last line was
        self._live: rich.live.Live | None = None
        self._idle = threading.Event()

    def began(self, activity: Activity) -> None:
        """Shows the activity from now on."""
        if not processes.speaks():
            return
        with self._lock:
            self._running.append(activity)
            if len(self._running) == 1:
                self._start()

    def advanced(self, activity: Activity) -> None:
        """Prints a line, if the activity has one a step, or else at each tenth of its whole, where nothing is live."""
        with self._lock:
            tenth = activity.done % math.ceil(activity.total / LINES) == 0 and activity.done < activity.total
            due = activity.lines or (tenth and self._live is None)
            if due and activity in self._running:
                self._describe(activity)

    def ended(self, activity: Activity) -> None:
        """Prints the activity's result, and shows it no longer."""
        with self._lock:
            if activity not in self._running:
                return
            self._running.remove(activity)
            if activity in self._named:
                self._named.remove(activity)
            if not self._running:
                self._stop()
            took, note = time.monotonic() - activity.began, f' ({activity.note})' if activity.note else ''
            if activity.result and took >= TRIFLE:
                self.print(f'{activity.result} in {duration(took)}{note}')

    @property
    def width(self) -> int:
        """Columns of a line: those of the terminal, or WIDTH where there is none."""
        live = self._live
        if live is not None:
            return live.console.width
        return rich.console.Console(stderr=True).width if sys.stderr.isatty() else WIDTH

    def stop(self) -> None:
        """Shows nothing more, and gives a terminal its cursor back, before the process ends."""
        if self._lock.acquire(timeout=SHORT):  # another thread may be printing, and wait for a terminal
            self._running.clear()
            self._stop()
            self._lock.release()

    def print(self, text: str) -> None:
        """Prints a line, escaped, unless nobody is there to read it any longer."""
        text = escape(text)
        with self._lock, contextlib.suppress(OSError):
            self._printed = time.monotonic()
            if self._live is None:
                print(text, file=sys.stderr, flush=True)
            else:
                self._live.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Prints a line about the innermost activity, if it is time for one."""
        with self._lock:
            if self._running:
                innermost, now = self._running[-1], time.monotonic()
                unnamed = innermost not in self._named and now - innermost.began >= SHORT
                if unnamed or now - self._printed >= EVERY:
                    self._describe(innermost)

    def _describe(self, activity):
        self.print(describe(activity, self.width) if activity in self._named or activity.total else activity.text)
        if activity not in self._named:
            self._named.append(activity)

    def _start(self):
        if not sys.stderr.isatty():
            self._idle = threading.Event()
            threading.Thread(target=self._tick_until, args=[self._idle], name='console', daemon=True).start()
            return
        self._live = rich.live.Live(
            console=rich.console.Console(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else what goes to a file would come here
            get_renderable=self._render,
        )
        self._live.start()

    def _tick_until(self, idle):
        while not idle.wait(SHORT):
            self.tick()

    def _stop(self):
        self._idle.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self):
        lines = rich.table.Table.grid()
        for running in list(self._running):
            lines.add_row(_live_line(running, self.width))
        return lines


def describe(activity: Activity, width: int) -> str:
    """One line: what is being done, how much of it is finished, and the time that it took or takes.

    Of the activity's cells it has as many as have room.
    """
    begin = f'{activity.text}: {activity.done} of {activity.total}' if activity.total else activity.text
    return fit(begin, activity.cells, [part for part in (_time(activity), _stage(activity)) if part], width)


def fit(begin: str, cells: Sequence[str], end: Sequence[str], width: int) -> str:
    """One line of at most `width` columns, escaped: cells that have no room are left out, the last ones first."""
    for count in range(len(cells), -1, -1):
        line = escape(', '.join([begin, *cells[:count], *end]))
        if columns(line) <= width:
            return line
    return cut(line, width)


def _live_line(activity, width):
    """A line of a terminal, as a rich renderable."""
    line = rich.table.Table.grid(padding=(0, 2, 0, 0))
    times = [text for text in (_time(activity), _stage(activity)) if text]
    if not activity.total:
        cells = [fit(activity.text, (), times, width)]
    else:
        counted = f'{activity.done}/{activity.total}'
        room = width - columns(escape(activity.text)) - BAR - 2 * 3
        bar = rich.progress_bar.ProgressBar(activity.total, activity.done, width=BAR)
        # a step's own line has its cells
        cells = [activity.text, bar, fit(counted, () if activity.lines else activity.cells, times, room)]
    for _ in cells:
        line.add_column(no_wrap=True)
    line.add_row(*(rich.text.Text(escape(cell)) if isinstance(cell, str) else cell for cell in cells))
    return line


def _time(activity):
    took = time.monotonic() - activity.began
    advanced = activity.done - activity.first
    if advanced and activity.even:
        return f'{duration(took / advanced * (activity.total - activity.done))} left'
    return f'{duration(took)} so far'


def _stage(activity):
    took = time.monotonic() - activity.stage_began
    return f'{activity.stage} ({duration(took)})' if activity.stage and took >= SHORT else ''


def duration(seconds: float) -> str:
    """A time in words: 0.4 s, 16 s, 2 min 5 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f'{whole} s' if whole >= 10 else f'{seconds:.1f} s'
    if whole < 3600:
        return f'{whole // 60} min {whole % 60} s'
    return f'{whole // 3600} h {whole % 3600 // 60} min'


class Warnings(logging.Handler):
    """Prints each record of this package, and each error of a library, as one line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record."""
        if not processes.speaks():
            return
        if 'orbax' in record.pathname:  # it logs what it also raises, a few times, from its threads
            return
        ours = record.name.partition('.')[0] in ('grpo_jax', 'root')
        if ours or record.levelno >= logging.ERROR:
            name = '' if ours else f'{record.name}: '
            console.print(f'{record.levelname.lower()}: {name}{one_line(record.getMessage())}')


def one_line(text: str) -> str:
    """The text with each run of blanks and line ends as one blank, escaped."""
    return escape(' '.join(text.split()))


def print_exception(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Prints a traceback as the interpreter does, but that what the exception says is escaped."""
    lines = ''.join(traceback.format_exception(kind, error, trace)).rstrip('\n').split('\n')
    print(*map(escape, lines), sep='\n', file=sys.stderr)


console = Console()  # stderr is one, and so is who writes there
_handler = Warnings()


def install() -> None:
    """Shows activities and this package's warnings from now on; a second call does nothing.

    The warnings go nowhere else then: set `propagate` of the logger grpo_jax for handlers of your own.
    """
    logger = logging.getLogger('grpo_jax')
    if _handler not in logger.handlers:
        logger.addHandler(_handler)
        logger.setLevel(logging.WARNING)  # whatever a library makes of the root's
        logger.propagate = False
        activity.observers.append(console)


def install_for_command() -> None:
    """The same, and nothing else is shown: no warnings of libraries, unless python -W asks for them."""
    install()
    logging.root.handlers[:] = [_handler]
    absl.logging.get_absl_handler().setLevel(logging.CRITICAL + 1)  # absl.app puts it back there
    sys.excepthook = print_exception
    sys.unraisablehook = _print_unraisable
    # of an array whose write fails after another's has: the command says why it ends
    logging.getLogger('asyncio').setLevel(logging.CRITICAL)
    if not sys.warnoptions:
        warnings.simplefilter('ignore')


def _print_unraisable(unraisable):
    """As elsewhere, but for writes of tensorstore that fail after another has ended what waited for them: it prints
    hundreds, and the first comes out as an exception.
    """
    if str(unraisable.exc_value) != 'Event loop is closed':
        sys.__unraisablehook__(unraisable)
