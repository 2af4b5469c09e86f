"""What steps wait for, and whether steps that do not wait would pay: sentences for the console and for the report.

They are no monitors, since they read timings: a diagnosis is a function of metrics.jsonl, and so of the seed.
"""

from collections.abc import Callable, Mapping, Sequence
import statistics
from typing import Any

from jaxtyping import Int
import numpy as np

STEPS = 10  # steps that are measured before something is said
STAGES = ('sample', 'reward', 'observe', 'update')  # of a step, in timings.jsonl
FEWER = 1.3  # times fewer decode steps that pay for older tokens
HIDDEN = 0.1  # share of a step that pays for them
IDLE = 0.3  # share of the time in which a side may be idle


def choose_in_flight(prompts: int, devices: int) -> int:
    """Returns collection.in_flight for a step of so many prompts: half as many, or as many where devices ask for it."""
    return prompts if prompts // 2 % devices or prompts == 1 else prompts // 2


def count_carried_steps(longest: Int[np.ndarray, ' P'], in_flight: int, cut: int, rounds: int = 8) -> float:
    """Returns the decode steps of a step whose groups go on, if groups with completions of these lengths came again.

    longest: tokens of each group's longest completion. in_flight, cut: groups under way besides the P of a step, and
    tokens between the moments at which a step may end, as in collect/carry.py. The mean over steps behind the first,
    which begins with nothing under way.
    """
    prompts, coming, steps = len(longest), np.resize(longest, len(longest) * rounds + in_flight), []
    left, coming = coming[:in_flight], coming[in_flight:]
    for begun in range(rounds):
        left = np.concatenate([left, coming[begun * prompts : (begun + 1) * prompts]])
        spent = cut
        while np.sum(left <= spent) < prompts:
            spent += cut
        steps.append(min(spent, left.max()))
        left = np.delete(left - spent, np.flatnonzero(left <= spent)[:prompts])
    return float(np.mean(steps[1:]))


def describe_waits(
    rows: Sequence[Mapping[str, Any]], config: Any, acts: Callable[[str], bool] = bool, in_flight: int = 0
) -> list[str]:
    """Returns sentences on what a run's steps wait for, with the flags that mend it; [] where none would pay.

    rows: of timings.jsonl, with sampler/steps and sampler/decode_batches of metrics.jsonl; config: a ConfigDict, or the
    content of config.json; acts(flags): whether a run can start with flags; in_flight: groups that could go on, 0 where
    a decode step costs what its rows do.
    """

    def usual(*names):
        sums = [sum(row[name] for name in names) for row in rows if all(row.get(name) is not None for name in names)]
        return statistics.median(sums) if sums else 0.0

    def tell(before, setting, after):
        flags = f'--branch=DIR --config.collection.{setting}{correction}'
        if acts(flags):
            lines.append(f'{before}: {flags} {after}')

    collection, algorithm, lines = config['collection'], config['algorithm'], []
    corrected = algorithm['correction'] != 'none' or algorithm['ratio_base'] == 'sampler'
    ahead, correction = collection['staleness'], '' if corrected else ' --config.algorithm.correction=truncated'
    if not ahead and not collection['in_flight'] and config['learner']['old_logprobs'] != 'decode':
        steps, fewer = usual('sampler/steps'), usual('sampler/steps_carried')
        at_once = in_flight and usual('sampler/decode_batches') == 1  # else not all rows fit the cache
        if at_once and steps >= FEWER * fewer:
            before = f'the longest completions make a step take {steps:.0f} decode steps'
            tell(before, f'in_flight={in_flight}', f'would take {steps / fewer:.1f} times fewer')
        step, wait = usual(*STAGES), usual('reward/wait_seconds')
        if (hidden := min(wait, step - wait)) > HIDDEN * step:
            before = f'a step waits {wait:.3g} of its {step:.3g} s for rewards'
            tell(before, 'staleness=1', f'would hide {hidden / wait:.0%} of that')
    times = {side: usual(f'{side}/gap_seconds', f'{side}/busy_seconds') for side in ('sampler', 'learner')}
    idle = sorted((usual(f'{side}/gap_seconds') / time, side) for side, time in times.items() if time)
    if idle and idle[-1][0] >= IDLE:
        (least, less), (most, side) = idle
        before = f"the {side}'s devices are idle {most:.0%} of the time, and the {less}'s {least:.0%}"
        if least >= IDLE or not ahead:
            tell(before, f'staleness={ahead + 1}', 'would let both work at once')
        else:
            other = f'{"below" if side == "sampler" else "above"} {config["mesh"]["sampler"]}'
            lines.append(f'{before}: a mesh.sampler {other} would leave less idle')
    return lines
