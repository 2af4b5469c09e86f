"""Two presets of a sweep against each other, seed by seed."""

import math
from typing import Any, NamedTuple

import numpy as np

from grpo_jax import statistics
from grpo_jax.errors import BadInput
from grpo_jax.run.figures import LEVEL

# of a sweep's table: (mean, min, max) by column; preset, mark, status, failures, curves, and `runs`, numbers by seed
Rows = list[dict[str, Any]]


class Comparison(NamedTuple):
    """How much higher a number is with one preset than with another, over seeds that both have."""

    name: str
    preset: str
    other: str
    seeds: int
    mean: float  # of the differences by seed
    low: float  # of the interval of that mean
    high: float

    def __str__(self) -> str:
        verdict = 'no difference that these seeds could show'
        if self.low > 0 or self.high < 0:
            verdict = f'{self.preset} is {"higher" if self.mean > 0 else "lower"}'
        return (
            f'{self.name}, {self.preset} - {self.other}: {self.mean:+.3f}, {LEVEL:.0%} interval {self.low:+.3f} to '
            f'{self.high:+.3f} ({self.seeds} seeds): {verdict}'
        )


def compare(rows: Rows, preset: str, other: str, name: str = 'reward_after') -> Comparison:
    """The Comparison of two presets by a column of the table, seed by seed; Student's interval of the mean difference.

    The seeds of both share prompts and cold start, so that differences are steadier than the numbers. BadInput for a
    preset that is not in the rows, and with fewer than two seeds that both have finished.
    """
    runs = {row['preset']: row['runs'] for row in rows}
    for wanted in (preset, other):
        if wanted not in runs:
            raise BadInput('preset', wanted, f'is not in this sweep; choose of {", ".join(runs)}')
    pairs = [(runs[preset][seed][name], runs[other][seed][name]) for seed in runs[preset] if seed in runs[other]]
    differences = np.array([a - b for a, b in pairs if not math.isnan(a - b)])
    if len(differences) < 2:
        raise BadInput('seeds', len(differences), f'of both have {name}; an interval needs at least 2')
    low, high = statistics.mean_interval(differences, level=LEVEL)
    return Comparison(name, preset, other, len(differences), float(differences.mean()), low, high)
