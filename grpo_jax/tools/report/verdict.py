"""The verdict on a run in one line: an evaluation figure before and after training, with intervals."""

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

from grpo_jax.figures import LEVEL
from grpo_jax.run.rows import evaluated_prompts
from grpo_jax.statistics import share_interval
from grpo_jax.tools.report.read import Run, Variant, as_number

SHARES = ('greedy', 'pass@', 'maj@', 'truncated', 'failed', 'unparsed')  # beginnings of names of figures in [0, 1]
MOST_PROMPTS = 100_000
MEANINGS = {
    'greedy': 'Greedy accuracy on held-out prompts',
    'pass@1': 'Accuracy of samples on held-out prompts',
    'reward': 'Reward on held-out prompts',
}


class Change(NamedTuple):
    """A figure of a variant before and after training, with intervals; low and high are NaN without an interval."""

    name: str
    first: tuple[float, float, float]  # value, low, high
    last: tuple[float, float, float]
    steps: tuple[int, int]
    seeds: int

    @property
    def direction(self) -> str:
        """'rose' or 'fell' when the intervals do not overlap; 'moved' when they do, or when there are none."""
        if self.last[1] > self.first[2]:
            return 'rose'
        return 'fell' if self.last[2] < self.first[1] else 'moved'


def interval(name: str, value: float, prompts: int) -> tuple[float, float]:
    """Returns (low, high), the interval of a share over prompts; NaN when the figure is no share, or for 0 prompts.

    The interval assumes prompts that are wholly right or wholly wrong. It is exact for greedy completions, and the
    widest possible for samples. name: of the figure; prompts: how many, 0 when unknown.
    """
    if (
        not name.removeprefix('strict/').removeprefix('greedy/').startswith(SHARES)
        or not 0 <= value <= 1
        or not prompts
    ):
        return math.nan, math.nan
    right = round(value * prompts)
    shares = np.repeat([1.0, 0.0], [right, prompts - right])
    low, high = share_interval(shares, level=LEVEL)
    return min(low, value), max(high, value)


def count_prompts(run: Run) -> int:
    """Returns how many prompts a run's evaluations have; 0 when the number is unknown.

    It is config.evaluation.prompts if all greedy figures are multiples of 1 / prompts. Else the split has fewer
    prompts: the result is the least number n with all figures multiples of 1 / n, which makes the widest intervals.
    """
    section = run.config.get('evaluation')
    most = section.get('prompts') if isinstance(section, dict) else None
    if not isinstance(most, int) or not 1 <= most <= MOST_PROMPTS:
        return 0
    names = ('greedy', 'greedy/length', 'greedy/truncated')
    means = np.array([as_number(row.get(name)) for row in run.evaluations[-10:] for name in names])
    means = means[np.isfinite(means)]
    totals = np.arange(1, most + 1)[:, None] * means
    fits = 1 + np.flatnonzero(np.all(np.abs(totals - np.round(totals)) < 1e-6 * np.maximum(1, totals), axis=1))
    return int(most if most in fits else fits[0]) if len(means) and len(fits) else 0


def measure_change(variant: Variant, name: str) -> Change | None:
    """Returns the Change of a figure from the first to the last evaluation; None without two evaluations with it.

    Over several seeds, the values are means, and the intervals run from the min to the max.
    """
    ends = [[run.evaluations[i] for i in (0, -1)] for run in variant.runs if len(run.evaluations) > 1]
    values = np.array([[as_number(row.get(name)) for row in rows] for rows in ends])
    values = values[np.isfinite(values).all(1)] if len(values) else values
    if not len(values):
        return None
    steps = min(rows[0]['step'] for rows in ends), max(rows[1]['step'] for rows in ends)
    if len(values) > 1:
        first, last = ((float(x.mean()), float(x.min()), float(x.max())) for x in values.T)
        return Change(name, first, last, steps, len(values))
    prompts = count_prompts(variant.runs[0])
    (a, b), (c, d) = (interval(name, x, prompts) for x in values[0])
    return Change(name, (float(values[0, 0]), a, b), (float(values[0, 1]), c, d), steps, 1)


def headline(variant: Variant) -> tuple[str, str]:
    """Returns two texts: how a variant's evaluations changed, and what the brackets in it mean ('' without brackets).

    Without two evaluations, the first text has the steps done and the last reward, accuracy or loss.
    """
    name = next((name for name in MEANINGS if measure_change(variant, name)), '')
    changed = measure_change(variant, name) if name else None
    if changed is None:
        return _describe_progress(variant), ''
    ends = []
    for value, low, high in (changed.first, changed.last):
        end = format_figure(name, value)
        if not math.isnan(low) and low != high:
            end += f' ({format_figure(name, low).removesuffix(" %")} to {format_figure(name, high).removesuffix(" %")})'
        ends.append(end)
    meaning = MEANINGS[name].replace('held-out', evaluated_prompts(variant.runs[0].folder))
    text = f'{meaning} {changed.direction} from {ends[0]} to {ends[1]} in {changed.steps[1]} steps.'
    if changed.seeds > 1:
        return text, f'Means over {changed.seeds} seeds, with the least and the greatest in brackets.'
    if math.isnan(changed.first[1]):
        return text, ''
    apart = '' if changed.direction != 'moved' else ' They overlap: the change may be chance.'
    prompts = count_prompts(variant.runs[0])
    return text, f'In brackets, {LEVEL:.0%} intervals over {prompts} prompts.{apart}'


def make_table(variants: Sequence[Variant]) -> tuple[list[str], list[list[str]]]:
    """Returns (headings, rows of texts): each variant's evaluation figures before and after training."""
    names = dict.fromkeys(name for v in variants for run in v.runs for row in run.evaluations for name in row)
    shown = [name for name in names if name in MEANINGS or name.startswith(('pass@', 'maj@', 'length', 'truncated'))]
    shown = [name for name in shown if any(measure_change(variant, name) for variant in variants)]
    rows = []
    for variant in variants:
        steps = max((len(run.metrics) for run in variant.runs), default=0)
        cells = [measure_change(variant, name) for name in shown]
        texts = [
            '' if x is None else f'{format_figure(x.name, x.first[0])} → {format_figure(x.name, x.last[0])}'
            for x in cells
        ]
        rows.append([variant.name, str(len(variant.runs)), str(steps), *texts])
    return ['', 'seeds', 'steps', *shown], rows


def format_figure(name: str, value: float) -> str:
    """Returns the value of the figure `name` as text, in percent for a share."""
    is_share = name.removeprefix('strict/').removeprefix('greedy/').startswith(SHARES)
    return f'{100 * value:.1f} %' if is_share else f'{value:.3g}'


def _describe_progress(variant):
    """A sentence on a variant without two evaluations: its steps, and its last reward, accuracy or loss."""
    done = max(len(run.metrics) for run in variant.runs)
    if not done:
        return 'No step is done yet.'
    last = variant.runs[0].metrics[-1] if variant.runs[0].metrics else {}
    name = next((name for name in ('reward', 'accuracy', 'loss') if not math.isnan(as_number(last.get(name)))), '')
    return f'{done} steps are done.' + (f' The last {name} is {as_number(last[name]):.3g}.' if name else '')
