"""Curves of a run by step: reward, held-out figures and length, as a picture and as lines of text."""

import math
import os
import shlex
import sys
from typing import TYPE_CHECKING

from jaxtyping import Float
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.run import metrics, tables
from grpo_jax.text import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, BLUE, ORANGE, GREY = '#333333', '#2a6fbb', '#d9822b', '#cfcfcf'
HELD_OUT = {'greedy': BLUE, 'pass@1': ORANGE}  # figures of evaluations with a verifier -> colour
BLOCKS, COLUMNS = '▁▂▃▄▅▆▇█', 40  # of a curve in text


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
    tables.show(*_changes(workdir), *(f'{name:{width}}  {text_curve(values)}' for name, values in curves.items()))
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
    means = [_mean(part) for part in np.array_split(values, min(COLUMNS, len(values)))]
    least, span = np.nanmin(means), np.nanmax(means) - np.nanmin(means)
    heights = [' ' if math.isnan(x) else BLOCKS[int(x > least and (x - least) / span * 7.99)] for x in means]
    ends = [f'{known[0]:.3g}', ''.join(heights), f'{known[-1]:.3g}']
    return ' '.join(ends if _can_print(BLOCKS) else [ends[0], 'to', ends[2]])


def series(folder: str, name: str, file: str = 'metrics.jsonl') -> Float[np.ndarray, ' N']:
    """A number of each row of a run's file, NaN where it is not finite or missing."""
    rows = metrics.read_rows(os.path.join(folder, file))
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


def _changes(workdir):
    """A table of the first and the last row of evaluations.jsonl; nothing where there is no row."""
    path = os.path.join(workdir, 'evaluations.jsonl')
    evaluations = metrics.read_rows(path) if os.path.isfile(path) else []
    for first, last in [(evaluations[0], evaluations[-1])] if evaluations else []:
        rows = [
            [name, f'{first[name]:.3f}', f'{last[name]:.3f}', f'{last[name] - first[name]:+.3f}']
            for name in _important(first)
            if name in last
        ]
        headings = ['', f'step {first["step"]}', f'step {last["step"]}', 'change']
        yield tables.make_table(headings, rows, title='held-out prompts')


def _important(figures):
    """The names of an evaluation's figures that a short table has; the report has all."""
    passes = [name for name in figures if name.startswith('pass@')]  # by rising k
    names = dict.fromkeys(['greedy', *passes[:1], *passes[-1:], 'reward', 'length', 'truncated'])
    if passes and figures.get('reward') == figures[passes[0]]:  # of a reward that is the verdict
        del names['reward']
    return [name for name in names if name in figures]


def _mean(values):
    known = values[np.isfinite(values)]
    return known.mean() if len(known) else math.nan


def _can_print(text):
    try:
        text.encode(sys.stdout.encoding or 'ascii')
    except UnicodeEncodeError:
        return False
    return True
