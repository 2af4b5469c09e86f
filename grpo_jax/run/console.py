"""The console of a run, on stderr: progress of its activities, and warnings of one line each; also tables and curves.

On a terminal, progress bars stand at the bottom. Elsewhere an activity has a line after its first second, a line a
minute while it lasts, and a line at its end. Each training step has a line in both cases. Only the first of several
processes prints.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import contextlib
import logging
import math
import os
import shlex
import shutil
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
from grpo_jax.run.rows import evaluated_prompts, read_rows, recorded_events
from grpo_jax.text import Activity, columns, escape, listeners, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVERY = 60.0  # seconds between two lines about an activity that lasts
SHORT = 1.0  # seconds before an activity has its first line
RENEWED = 0.25  # seconds between two updates of the bars
SLOW = 5.0  # seconds; a first item that took less tells nothing of the others, since much begins with it
TRIFLE = 0.1  # seconds; a shorter activity has no line at its end
LINES = 10  # further lines about an activity of many steps
BAR = 24  # columns of a bar
WIDTH = 120  # columns of a line where stderr is no terminal
INK, BLUE, ORANGE, GREY = '#333333', '#2a6fbb', '#d9822b', '#cfcfcf'
HELD_OUT = {'greedy': BLUE, 'pass@1': ORANGE}  # figures of evaluations with a verifier -> colour
BLOCKS, COLUMNS = '▁▂▃▄▅▆▇█', 40  # heights and most columns of a curve in text


class Console:
    """Shows the progress of activities on stderr, and prints lines above their bars; one of text.listeners."""

    def __init__(self):
        self._lock = threading.RLock()
        self._running: list[Activity] = []  # the innermost last
        self._named: list[Activity] = []  # running activities that already have a line
        self._printed = 0.0  # time of the last line, by time.monotonic
        self._progress: rich.progress.Progress | None = None  # None where stderr is no terminal
        self._bars: dict[Activity, rich.progress.TaskID] = {}
        self._idle = threading.Event()

    def began(self, activity: Activity) -> None:
        """Shows the activity from now on; does nothing in processes that print nothing."""
        if not processes.speaks():
            return
        with self._lock:
            if not self._running:
                self._start()
            self._running.append(activity)
            if self._progress is not None:
                text, total = escape(activity.text), activity.total or None  # without a total the bar pulses
                with contextlib.suppress(OSError):  # the terminal is gone
                    self._bars[activity] = self._progress.add_task(text, total=total, details='')

    def advanced(self, activity: Activity) -> None:
        """Prints a line of progress: each time if the activity has `lines`; else, without bars, at each tenth."""
        with self._lock:
            tenth = activity.done % math.ceil(activity.total / LINES) == 0 and activity.done < activity.total
            due = activity.lines or (tenth and self._progress is None)
            if due and activity in self._running:
                self._describe(activity)

    def ended(self, activity: Activity) -> None:
        """Removes the activity's bar, and prints its result, if it has one, with the time it took."""
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
        """The columns of a line: the terminal's width, or WIDTH without a terminal."""
        progress = self._progress
        if progress is not None:
            return progress.console.width
        return rich.console.Console(stderr=True).width if sys.stderr.isatty() else WIDTH

    def stop(self) -> None:
        """Forgets all activities, removes their bars and restores the terminal's cursor, before the process ends."""
        if self._lock.acquire(timeout=SHORT):  # another thread may hold the lock while the terminal blocks
            self._running.clear()
            self._stop()
            self._lock.release()

    def print(self, text: str) -> None:
        """Prints a line, escaped; does nothing when the terminal is gone."""
        text = escape(text)
        with self._lock, contextlib.suppress(OSError):
            self._printed = time.monotonic()
            if self._progress is None:
                print(text, file=sys.stderr, flush=True)
            else:
                self._progress.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Updates the bars; without a terminal, prints a line about the innermost activity when one is due."""
        with self._lock:
            if self._progress is not None:
                for activity, bar in self._bars.items():
                    total, details = activity.total or None, escape(_details_text(activity))
                    self._progress.update(bar, total=total, completed=activity.done, details=details)
                with contextlib.suppress(OSError):  # as in print
                    self._progress.refresh()
            elif self._running:
                innermost, now = self._running[-1], time.monotonic()
                unnamed = innermost not in self._named and now - innermost.began >= SHORT
                if unnamed or now - self._printed >= EVERY:
                    self._describe(innermost)

    def _describe(self, activity):
        """Prints a line about an activity: the first names it, the later ones have its progress."""
        self.print(describe(activity, self.width) if activity in self._named or activity.total else activity.text)
        if activity not in self._named:
            self._named.append(activity)

    def _start(self):
        """Starts the bars, if stderr is a terminal, and the thread that calls `tick` again and again."""
        if sys.stderr.isatty():
            text = rich.progress.TextColumn
            self._progress = rich.progress.Progress(
                text('{task.description}', markup=False),
                rich.progress.BarColumn(BAR),
                # cut at its end, so that the bars stay aligned
                text('{task.fields[details]}', markup=False, table_column=rich.table.Column(ratio=1, no_wrap=True)),
                console=rich.console.Console(stderr=True),
                auto_refresh=False,
                transient=True,
                expand=True,
                redirect_stdout=sys.stdout.isatty(),  # else text for a file would go to the terminal
            )
            self._progress.start()
        self._idle = threading.Event()
        threading.Thread(target=self._tick_until, args=[self._idle], name='console', daemon=True).start()

    def _tick_until(self, idle):
        """Calls `tick` at intervals until the event `idle` is set."""
        while not idle.wait(SHORT if self._progress is None else RENEWED):
            self.tick()

    def _stop(self):
        """Ends the thread and removes the bars."""
        self._idle.set()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._bars.clear()


def describe(activity: Activity, width: int) -> str:
    """One line of at most `width` columns about an activity: its text, how much is done, its first cells, the time."""
    begin = f'{activity.text}: {activity.done} of {activity.total}' if activity.total else activity.text
    return fit(begin, activity.cells, [part for part in (_time_text(activity), _stage_text(activity)) if part], width)


def fit(begin: str, cells: Sequence[str], end: Sequence[str], width: int) -> str:
    """One escaped line of at most `width` columns: begin, cells and end with commas; without the last cells if long."""
    for count in range(len(cells), -1, -1):
        line = escape(', '.join([begin, *cells[:count], *end]))
        if columns(line) <= width:
            return line
    return shorten(line, width)


def _details_text(activity):
    """The text beside an activity's bar, with the most important facts first."""
    counted = f'{activity.done}/{activity.total}' if activity.total else ''
    cells = () if activity.lines else activity.cells  # a step's own line has them
    return ', '.join(part for part in (counted, _time_text(activity), _stage_text(activity), *cells) if part)


def _time_text(activity):
    """The time left of an activity with even steps, or else the time so far, in words."""
    took = time.monotonic() - activity.began
    advanced = activity.done - activity.first
    if activity.even and (advanced > 1 or (advanced and took >= SLOW)):
        return f'{duration(took / advanced * (activity.total - activity.done))} left'
    return f'{duration(took)} so far'


def _stage_text(activity):
    """An activity's stage and how long it has lasted; '' for a stage shorter than SHORT."""
    took = time.monotonic() - activity.stage_began
    return f'{activity.stage} ({duration(took)})' if activity.stage and took >= SHORT else ''


def duration(seconds: float) -> str:
    """Seconds in words: 0.4 s, 16 s, 2 min 5 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f'{whole} s' if whole >= 10 else f'{seconds:.1f} s'
    if whole < 3600:
        return f'{whole // 60} min {whole % 60} s'
    return f'{whole // 3600} h {whole % 3600 // 60} min'


class Warnings(logging.Handler):
    """A log handler that prints records of this package, and errors of libraries, as one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record."""
        if not processes.speaks():
            return
        if 'orbax' in record.pathname:  # Orbax's threads also log the errors that it raises
            return
        ours = record.name.partition('.')[0] in ('grpo_jax', 'root')
        if ours or record.levelno >= logging.ERROR:
            name = '' if ours else f'{record.name}: '
            console.print(f'{record.levelname.lower()}: {name}{one_line(record.getMessage())}')


def one_line(text: str) -> str:
    """A text on one line, escaped: each run of blanks and line ends becomes one blank."""
    return escape(' '.join(text.split()))


def print_exception(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Prints a traceback as the interpreter does, but with escaped text; a value for sys.excepthook."""
    lines = ''.join(traceback.format_exception(kind, error, trace)).rstrip('\n').split('\n')
    print(*map(escape, lines), sep='\n', file=sys.stderr)


console = Console()  # one for the process, which has one stderr
_handler = Warnings()


def install() -> None:
    """Starts to show activities and this package's warnings on stderr; a second call does nothing.

    The logger grpo_jax no longer passes warnings to other handlers; set its `propagate` for handlers of your own.
    """
    logger = logging.getLogger('grpo_jax')
    if _handler not in logger.handlers:
        logger.addHandler(_handler)
        logger.setLevel(logging.WARNING)  # a library may have changed the root's level
        logger.propagate = False
        listeners.append(console)


def install_for_command() -> None:
    """Does the same as `install`, and hides warnings of libraries unless python -W asks for them."""
    install()
    logging.root.handlers[:] = [_handler]
    absl.logging.get_absl_handler().setLevel(logging.CRITICAL + 1)  # absl.app adds this handler to the root again
    sys.excepthook = print_exception
    sys.unraisablehook = _print_unraisable
    # asyncio reports further failed writes of arrays; the command itself prints the first
    logging.getLogger('asyncio').setLevel(logging.CRITICAL)
    if not sys.warnoptions:
        warnings.simplefilter('ignore')


def _print_unraisable(unraisable):
    """Prints an unraisable error as Python does, but hides 'Event loop is closed'; a value for sys.unraisablehook.

    After one failed write of tensorstore there are hundreds of these; the first failure is raised as an exception.
    """
    if str(unraisable.exc_value) != 'Event loop is closed':
        sys.__unraisablehook__(unraisable)


def step_cells(row: Mapping[str, Any], timings: Mapping[str, float], shown: Sequence[str] = ()) -> list[str]:
    """Texts like 'reward 0.512' about a step, for its line on the console, the most important first.

    row: the step's row of metrics.jsonl; timings: {stage: seconds}; shown: the metrics to show; where it is empty, the
    ones that matter in GRPO are shown.
    """
    if shown:
        return [f'{name} {row[name]:.3f}' for name in shown if row.get(name) is not None]
    known = {name: value for name, value in row.items() if value is not None}
    cells = ['update skipped'] if known.get('finite', 1) < 1 else []
    cells += [f'reward {known["reward"]:.3f}'] if 'reward' in known else []
    shares = {'dead_groups': 'dead', 'groups_all_right': 'all right', 'groups_all_wrong': 'all wrong'}  # of groups
    cells += [f'{heading} {known[name]:.0%}' for name, heading in shares.items() if known.get(name)]
    parts = {name.removeprefix('reward/'): value for name, value in known.items() if name.startswith('reward/')}
    if list(parts.values()) != [known.get('reward')]:  # a single part of weight 1 is the reward itself
        cells += [f'{name} {value:.3f}' for name, value in parts.items()]
    cells += [f'length {known["length"]:.1f}'] if 'length' in known else []
    cells += [f'truncated {known["truncated"]:.0%}'] if known.get('truncated', 0) >= 0.005 else []
    measured = 'logprob' in known or 'logprob' not in row  # else all groups were dead and dropped, and means are 0
    for name, heading in (('entropy', 'entropy'), ('kl_ref', 'kl')) if measured else ():
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
    """A rich Table of escaped texts, whose first column is aligned left, the others right.

    rows: the cells of each row; title: a line above the table; dense: whether the table has no frame; wrapped: headings
    of columns whose cells may take several lines.
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
    """Prints tables and lines of text to stdout, `width` columns wide; None: the terminal's width."""
    console = rich.console.Console(width=width or (None if sys.stdout.isatty() else WIDTH))
    for item in items:
        console.print(escape(item) if isinstance(item, str) else item, markup=False, emoji=False, highlight=False)


def draw_curve(workdir: str) -> str:
    """Draws reward, held-out figures and length by step into <workdir>/curve.png, and returns its path.

    The reward of a step stands at the same x as the evaluation before the step. Raises BadInput when workdir holds no
    metrics.jsonl.
    """
    steps, rewards, lengths = (_read_metric(workdir, name) for name in ('step', 'reward', 'length'))
    evaluated, held_out = _read_evaluations(workdir)
    figure, (reward_panel, held_out_panel, length_panel) = make_panels(1, 3, (9.0, 2.6))
    _plot(reward_panel, steps, rewards, BLUE)
    _plot(length_panel, steps, lengths, BLUE)
    for name, values in held_out.items():
        _plot(held_out_panel, evaluated, values, HELD_OUT.get(name, BLUE), marker='o', markersize=3.5, label=name)
    evaluated_title = f'{evaluated_prompts(workdir)} prompts'
    titles = {
        reward_panel: 'training reward',
        held_out_panel: evaluated_title if held_out else f'{evaluated_title}: no evaluation',
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
    """Draws curve.png and prints a run's evaluations, curves, paths and report command, in the first process."""
    if not processes.is_first():
        return
    try:
        curve = f'curve: {draw_curve(workdir)}\n'
    except OSError as error:  # a full disk; the curve can be drawn later
        curve = f'curve: not drawn, {error.strerror or error}\n'
    since = reward_amended(workdir)
    paid = f'reward from step {since}, amended' if since else 'reward'
    curves = {paid: _read_metric(workdir, 'reward')[since:], 'length': _read_metric(workdir, 'length')}
    evaluated = evaluated_prompts(workdir)
    curves |= {f'{evaluated} {name}': values for name, values in _read_evaluations(workdir)[1].items()}
    width = max(map(len, curves))
    lines = [f'{name:{width}}  {text_curve(values)}' for name, values in curves.items()]
    show_tables(*_evaluation_table(workdir), *lines)
    homes = {os.path.dirname(path) for path in (sys.executable, shutil.which('python') or '')}
    python = 'python' if len(homes) == 1 else shlex.quote(sys.executable)
    report = f'report: {python} -m grpo_jax report --workdir={shlex.quote(workdir)}'
    # without wrapping, so that paths can be copied
    print(*map(escape, f'{curve}{report}\neverything the run wrote: {workdir}'.split('\n')), sep='\n')


def text_curve(values: Float[np.ndarray, ' N']) -> str:
    """A curve as one line: the first number, at most COLUMNS blocks of 8 heights, and the last number.

    A block is the mean of neighbouring finite numbers, a space where there are none. Without blocks where stdout cannot
    encode them.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return 'no finite number'
    means = []
    for neighbours in np.array_split(values, min(COLUMNS, len(values))):
        finite = neighbours[np.isfinite(neighbours)]
        means.append(finite.mean() if len(finite) else math.nan)
    least, span = np.nanmin(means), np.nanmax(means) - np.nanmin(means)
    heights = [' ' if math.isnan(x) else BLOCKS[int(x > least and (x - least) / span * 7.99)] for x in means]
    ends = [f'{known[0]:.3g}', ''.join(heights), f'{known[-1]:.3g}']
    return ' '.join(ends if _can_print(BLOCKS) else [ends[0], 'to', ends[2]])


def series(folder: str, name: str, file: str = 'metrics.jsonl') -> Float[np.ndarray, ' N']:
    """f64[N]: the number `name` of each row of a file in a run's folder; NaN where it is missing or not finite."""
    rows = read_rows(os.path.join(folder, file))
    return np.array([math.nan if row.get(name) is None else row[name] for row in rows], float)


def make_panels(down: int, across: int, size: tuple[float, float], shared: bool = False) -> 'tuple[Figure, list[Axes]]':
    """(a Figure of `size` inches, its panels in `down` rows of `across`); shared: whether all have the same axes."""
    from matplotlib.figure import Figure  # here, since the import takes half a second

    figure = Figure(figsize=size, layout='constrained')
    panels = list(figure.subplots(down, across, sharex=shared, sharey=shared, squeeze=False).flat)
    for panel in panels:
        panel.spines[['top', 'right']].set_visible(False)
        panel.spines[['left', 'bottom']].set_color(GREY)
        panel.tick_params(labelsize=7, color=GREY, labelcolor=INK)
        panel.grid(axis='y', color='#eeeeee', linewidth=0.6)
        panel.set_axisbelow(True)
        panel.margins(x=0.02)
        panel.locator_params(axis='x', integer=True)  # steps are whole numbers
    return figure, panels


def reward_amended(workdir: str | os.PathLike) -> int:
    """The last step at which --amend changed config.reward, so that earlier rewards mean something else; 0: none."""
    rows = recorded_events(workdir)
    return max(
        (row['step'] for row in rows if row['event'] == 'amended' and row['key'].startswith('reward.')), default=0
    )


def _plot(panel, steps, values, color, **style):
    """Draws values by step as a line; a single finite value, which has no line, as a point."""
    if np.isfinite(values).sum() == 1:
        style.setdefault('marker', 'o')
    panel.plot(steps, values, color=color, linewidth=1.5, **style)


def _read_metric(workdir, name):
    """f64[N]: a metric of each step of a run; raises BadInput where workdir has no metrics.jsonl."""
    if not os.path.isfile(os.path.join(workdir, 'metrics.jsonl')):
        raise BadInput('workdir', workdir, 'holds no metrics.jsonl; name the folder of a run')
    return series(workdir, name)


def _read_evaluations(workdir):
    """(steps, {name: values}) of a run's evaluations: the figures of HELD_OUT, or the reward without a verifier."""
    if not os.path.isfile(os.path.join(workdir, 'evaluations.jsonl')):
        return np.array([]), {}
    figures = {name: series(workdir, name, 'evaluations.jsonl') for name in (*HELD_OUT, 'reward')}
    figures = {name: values for name, values in figures.items() if np.isfinite(values).any()}
    if figures.keys() & HELD_OUT.keys():
        figures.pop('reward', None)
    return series(workdir, 'step', 'evaluations.jsonl'), figures


def _evaluation_table(workdir):
    """[a rich Table of the main figures in a run's first and last evaluation, and their change]; [] without any."""
    path = os.path.join(workdir, 'evaluations.jsonl')
    evaluations = read_rows(path) if os.path.isfile(path) else []
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    passes = [name for name in first if name.startswith('pass@')]  # by rising k
    names = dict.fromkeys(['greedy', *passes[:1], *passes[-1:], 'reward', 'length', 'truncated'])
    # the reward equals pass@1, being the verifier's verdict; or the first and last rewards are different ones
    if first['step'] < reward_amended(workdir) or (passes and first.get('reward') == first[passes[0]]):
        del names['reward']
    rows = [
        [name, f'{first[name]:.3f}', f'{last[name]:.3f}', f'{last[name] - first[name]:+.3f}']
        for name in names
        if name in first and name in last
    ]
    headings = ['', f'step {first["step"]}', f'step {last["step"]}', 'change']
    return [make_table(headings, rows, title=f'{evaluated_prompts(workdir)} prompts')]


def _can_print(text):
    """Whether stdout's encoding has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or 'ascii')
    except UnicodeEncodeError:
        return False
    return True
