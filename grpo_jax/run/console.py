"""What a person sees of a run, on stderr: what it is doing now, and warnings of a line each.

On a terminal, bars at the bottom show it. Elsewhere a line is printed when something has lasted a second, one a minute
while it goes on, and one at its end. Each step of a training has a line on both. Only the first of several processes
shows anything.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import contextlib
import logging
import math
import os
import shlex
import sys
import threading
import time
import traceback
import types
from typing import TYPE_CHECKING, Any
import warnings

import absl.logging
from jaxtyping import Float
import numpy as np
import rich.box
import rich.console
import rich.progress
import rich.table
import rich.text

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.run.rows import read_rows
from grpo_jax.text import Activity, columns, cut, escape, listeners

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVERY = 60.0  # seconds between two lines about something that goes on
SHORT = 1.0  # seconds that something lasts without being named
RENEWED = 0.25  # seconds between two looks at the bars of a terminal
TRIFLE = 0.1  # seconds: what has taken less leaves no line
LINES = 10  # that something of many steps prints of itself, besides
BAR = 24  # columns of a bar
WIDTH = 120  # columns of a pipe, which has no width of its own
INK, BLUE, ORANGE, GREY = '#333333', '#2a6fbb', '#d9822b', '#cfcfcf'
HELD_OUT = {'greedy': BLUE, 'pass@1': ORANGE}  # figures of evaluations with a verifier -> colour
BLOCKS, COLUMNS = '▁▂▃▄▅▆▇█', 40  # of a curve in text


class Console:
    """Shows activities, and prints lines above them; a text.Listener."""

    def __init__(self):
        self._lock = threading.RLock()
        self._running: list[Activity] = []  # the innermost last
        self._named: list[Activity] = []  # those of them that a line was printed about
        self._printed = 0.0  # when the last line was
        self._progress: rich.progress.Progress | None = None  # where stderr is a terminal
        self._bars: dict[Activity, rich.progress.TaskID] = {}
        self._idle = threading.Event()

    def began(self, activity: Activity) -> None:
        """Shows the activity from now on."""
        if not processes.speaks():
            return
        with self._lock:
            if not self._running:
                self._start()
            self._running.append(activity)
            if self._progress is not None:
                text, total = escape(activity.text), activity.total or None  # None: nobody counts, and the bar pulses
                with contextlib.suppress(OSError):  # the terminal is gone
                    self._bars[activity] = self._progress.add_task(text, total=total, details='')

    def advanced(self, activity: Activity) -> None:
        """Prints a line, if the activity has one a step, or else at each tenth of its whole, where no bar shows it."""
        with self._lock:
            tenth = activity.done % math.ceil(activity.total / LINES) == 0 and activity.done < activity.total
            due = activity.lines or (tenth and self._progress is None)
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
            if self._progress is not None and activity in self._bars:
                self._progress.remove_task(self._bars.pop(activity))
            if not self._running:
                self._stop()
            took, note = time.monotonic() - activity.began, f' ({activity.note})' if activity.note else ''
            if activity.result and took >= TRIFLE:
                self.print(f'{activity.result} in {duration(took)}{note}')

    @property
    def width(self) -> int:
        """Columns of a line: those of the terminal, or WIDTH where there is none."""
        progress = self._progress
        if progress is not None:
            return progress.console.width
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
            if self._progress is None:
                print(text, file=sys.stderr, flush=True)
            else:
                self._progress.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Renews the bars; without a terminal, prints a line about the innermost activity if it is time for one."""
        with self._lock:
            if self._progress is not None:
                for activity, bar in self._bars.items():
                    total, details = activity.total or None, escape(_details(activity))
                    self._progress.update(bar, total=total, completed=activity.done, details=details)
                with contextlib.suppress(OSError):  # as in print
                    self._progress.refresh()
            elif self._running:
                innermost, now = self._running[-1], time.monotonic()
                unnamed = innermost not in self._named and now - innermost.began >= SHORT
                if unnamed or now - self._printed >= EVERY:
                    self._describe(innermost)

    def _describe(self, activity):
        self.print(describe(activity, self.width) if activity in self._named or activity.total else activity.text)
        if activity not in self._named:
            self._named.append(activity)

    def _start(self):
        if sys.stderr.isatty():
            text = rich.progress.TextColumn
            self._progress = rich.progress.Progress(
                text('{task.description}', markup=False),
                rich.progress.BarColumn(BAR),
                # cut at its end, so that the bars stay under one another
                text('{task.fields[details]}', markup=False, table_column=rich.table.Column(ratio=1, no_wrap=True)),
                console=rich.console.Console(stderr=True),
                auto_refresh=False,
                transient=True,
                expand=True,
                redirect_stdout=sys.stdout.isatty(),  # else what goes to a file would come here
            )
            self._progress.start()
        self._idle = threading.Event()
        threading.Thread(target=self._tick_until, args=[self._idle], name='console', daemon=True).start()

    def _tick_until(self, idle):
        while not idle.wait(SHORT if self._progress is None else RENEWED):
            self.tick()

    def _stop(self):
        self._idle.set()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._bars.clear()


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


def _details(activity):
    """What stands behind a bar of a terminal, the most important first."""
    counted = f'{activity.done}/{activity.total}' if activity.total else ''
    cells = () if activity.lines else activity.cells  # a step's own line has them
    return ', '.join(part for part in (counted, _time(activity), _stage(activity), *cells) if part)


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
        listeners.append(console)


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


def step_cells(row: Mapping[str, Any], timings: Mapping[str, float], shown: Sequence[str] = ()) -> list[str]:
    """Texts of a row of metrics.jsonl: of the metrics that `shown` names, or of what matters in a step of GRPO."""
    if shown:
        return [f'{name} {row[name]:.3f}' for name in shown if row.get(name) is not None]
    known = {name: value for name, value in row.items() if value is not None}
    cells = ['update skipped'] if known.get('finite', 1) < 1 else []
    cells += [f'reward {known["reward"]:.3f}'] if 'reward' in known else []
    if known.get('dead_groups'):  # groups without a difference, by what they are where a verifier tells
        kinds = {word: known[f'groups_all_{word}'] for word in ('right', 'wrong') if known.get(f'groups_all_{word}')}
        text = ' '.join(f'{share:.0%} {word}' for word, share in kinds.items())
        cells.append(f'dead {text or format(known["dead_groups"], ".0%")}')
    parts = {name.removeprefix('reward/'): value for name, value in known.items() if name.startswith('reward/')}
    if list(parts.values()) != [known.get('reward')]:  # else it is the only part, which is the reward
        cells += [f'{name} {value:.3f}' for name, value in parts.items()]
    cells += [f'length {known["length"]:.1f}'] if 'length' in known else []
    cells += [f'truncated {known["truncated"]:.0%}'] if known.get('truncated', 0) >= 0.005 else []
    for name, heading in (('entropy', 'entropy'), ('kl_ref', 'kl')):
        cells += [f'{heading} {known[name]:.3f}'] if name in known else []
    if known.get('tokens') and timings.get('sample'):
        cells.append(f'{known["tokens"] / timings["sample"]:.0f} tokens/s')
    return cells


def make_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = '',
    dense: bool = False,
    wrapped: Collection[str] = (),
) -> rich.table.Table:
    """Table of texts, escaped: the first column begins at the left, the others end at the right.

    dense leaves out the frame. Cells keep to one line, but for those of the columns whose headings are in `wrapped`.
    """
    table = rich.table.Table(
        title=rich.text.Text(escape(title), style='table.title') if title else None,
        title_justify='left',
        box=rich.box.SIMPLE_HEAD if dense else rich.box.HEAVY_HEAD,
        pad_edge=not dense,
        collapse_padding=dense,
    )
    for position, heading in enumerate(headings):
        table.add_column(
            rich.text.Text(heading), justify='right' if position else 'left', no_wrap=heading not in wrapped
        )
    for row in rows:
        table.add_row(*(rich.text.Text(escape(cell)) for cell in row))
    return table


def show_tables(*items: rich.table.Table | str, width: int | None = None) -> None:
    """Prints tables and lines of text, `width` columns wide; without it as wide as the terminal is."""
    console = rich.console.Console(width=width or (None if sys.stdout.isatty() else WIDTH))
    for item in items:
        console.print(escape(item) if isinstance(item, str) else item, markup=False, emoji=False, highlight=False)


def draw_curve(workdir: str) -> str:
    """Writes <workdir>/curve.png from metrics.jsonl and evaluations.jsonl, and returns its path.

    The x axis counts finished steps, so that the reward of a step stands beside the evaluation before it. BadInput when
    workdir holds no metrics.
    """
    steps, rewards, lengths = (_read(workdir, name) for name in ('step', 'reward', 'length'))
    evaluated, held_out = _evaluations(workdir)
    figure, (reward_panel, held_out_panel, length_panel) = make_panels(1, 3, (9.0, 2.6))
    _plot(reward_panel, steps, rewards, BLUE)
    _plot(length_panel, steps, lengths, BLUE)
    for name, values in held_out.items():
        _plot(held_out_panel, evaluated, values, HELD_OUT.get(name, BLUE), marker='o', markersize=3.5, label=name)
    titles = {
        reward_panel: 'training reward',
        held_out_panel: 'held-out prompts' if held_out else 'held-out prompts: no evaluation',
        length_panel: 'tokens of a completion',
    }
    for panel, title in titles.items():
        panel.set_title(title, loc='left', fontsize=9, color=INK, fontweight='bold')
        panel.set_xlabel('step', fontsize=8, color=INK)
    if held_out:
        held_out_panel.legend(fontsize=8, frameon=False, labelcolor=INK)
    path = os.path.join(workdir, 'curve.png')
    figure.savefig(path, dpi=160)
    return path


def print_outcome(workdir: str) -> None:
    """Prints what a run has come to, and where it is; the first process does, and draws curve.png.

    The first evaluation beside the last, the curves in text, the paths, and the command for the rest.
    """
    if not processes.is_first():
        return
    try:
        curve = f'curve: {draw_curve(workdir)}\n'
    except OSError as error:  # on a full disk: it can be drawn at any time
        curve = f'curve: not drawn, {error.strerror or error}\n'
    curves = {name: _read(workdir, name) for name in ('reward', 'length')}
    curves |= {f'held-out {name}': values for name, values in _evaluations(workdir)[1].items()}
    width = max(map(len, curves))
    lines = [f'{name:{width}}  {text_curve(values)}' for name, values in curves.items()]
    show_tables(*_evaluation_table(workdir), *lines)
    report = f'report: python -m grpo_jax report --workdir={shlex.quote(workdir)}'
    # whole, however narrow the terminal is
    print(*map(escape, f'{curve}{report}\neverything the run wrote: {workdir}'.split('\n')), sep='\n')


def text_curve(values: Float[np.ndarray, ' N']) -> str:
    """One line: the first number, a row of blocks from the least to the greatest number, and the last number.

    Blocks are means over neighbouring numbers where there are more than COLUMNS, and spaces where there is none. They
    are left out where the terminal cannot show them.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return 'no finite number'
    means = []
    for part in np.array_split(values, min(COLUMNS, len(values))):
        finite = part[np.isfinite(part)]
        means.append(finite.mean() if len(finite) else math.nan)
    least, span = np.nanmin(means), np.nanmax(means) - np.nanmin(means)
    heights = [' ' if math.isnan(x) else BLOCKS[int(x > least and (x - least) / span * 7.99)] for x in means]
    ends = [f'{known[0]:.3g}', ''.join(heights), f'{known[-1]:.3g}']
    return ' '.join(ends if _can_print(BLOCKS) else [ends[0], 'to', ends[2]])


def series(folder: str, name: str, file: str = 'metrics.jsonl') -> Float[np.ndarray, ' N']:
    """A number of each row of a run's file, NaN where it is not finite or missing."""
    rows = read_rows(os.path.join(folder, file))
    return np.array([math.nan if row.get(name) is None else row[name] for row in rows], float)


def make_panels(down: int, across: int, size: tuple[float, float], shared: bool = False) -> 'tuple[Figure, list[Axes]]':
    """(figure of `size` inches, its down * across panels, styled); shared: all have the same axes."""
    from matplotlib.figure import Figure  # half a second, and only here

    figure = Figure(figsize=size, layout='constrained')
    panels = list(figure.subplots(down, across, sharex=shared, sharey=shared, squeeze=False).flat)
    for panel in panels:
        panel.spines[['top', 'right']].set_visible(False)
        panel.spines[['left', 'bottom']].set_color(GREY)
        panel.tick_params(labelsize=7, color=GREY, labelcolor=INK)
        panel.grid(axis='y', color='#eeeeee', linewidth=0.6)
        panel.set_axisbelow(True)
        panel.margins(x=0.02)
        panel.locator_params(axis='x', integer=True)  # steps
    return figure, panels


def _plot(panel, steps, values, color, **style):
    """A line, or a point where one number alone has no line."""
    if np.isfinite(values).sum() == 1:
        style.setdefault('marker', 'o')
    panel.plot(steps, values, color=color, linewidth=1.5, **style)


def _read(workdir, name):
    if not os.path.isfile(os.path.join(workdir, 'metrics.jsonl')):
        raise BadInput('workdir', workdir, 'holds no metrics.jsonl; name the folder of a run')
    return series(workdir, name)


def _evaluations(workdir):
    """(steps, {name: numbers}) of a run's evaluations: what the verifier says, or without one the reward."""
    if not os.path.isfile(os.path.join(workdir, 'evaluations.jsonl')):
        return np.array([]), {}
    figures = {name: series(workdir, name, 'evaluations.jsonl') for name in (*HELD_OUT, 'reward')}
    figures = {name: values for name, values in figures.items() if np.isfinite(values).any()}
    if figures.keys() & HELD_OUT.keys():
        figures.pop('reward', None)
    return series(workdir, 'step', 'evaluations.jsonl'), figures


def _evaluation_table(workdir):
    """[table of the first and the last evaluation, the figures that a short one has]; [] where there is none."""
    path = os.path.join(workdir, 'evaluations.jsonl')
    evaluations = read_rows(path) if os.path.isfile(path) else []
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    passes = [name for name in first if name.startswith('pass@')]  # by rising k
    names = dict.fromkeys(['greedy', *passes[:1], *passes[-1:], 'reward', 'length', 'truncated'])
    if passes and first.get('reward') == first[passes[0]]:  # of a reward that is the verdict
        del names['reward']
    rows = [
        [name, f'{first[name]:.3f}', f'{last[name]:.3f}', f'{last[name] - first[name]:+.3f}']
        for name in names
        if name in first and name in last
    ]
    headings = ['', f'step {first["step"]}', f'step {last["step"]}', 'change']
    return [make_table(headings, rows, title='held-out prompts')]


def _can_print(text):
    try:
        text.encode(sys.stdout.encoding or 'ascii')
    except UnicodeEncodeError:
        return False
    return True
