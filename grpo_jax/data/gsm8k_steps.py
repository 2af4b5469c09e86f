"""The calculator steps of whole GSM8K solutions: 48/2;48+24= is worked out as 48/2=24 48+24=72."""

import numpy as np

from grpo_jax.data import gsm8k, gsm8k_calculator
from grpo_jax.data.records import parted
from grpo_jax.types import Example


def examples(split, *, folder, steps, slips):
    """Each distinct chain of the first 2 to `steps` annotated expressions of a solution; test leaves out train's.

    meta['steps'] lists the expressions. In the demonstration each value is, with probability `slips`, one
    digit too long.
    """
    found, bad = _chains('train', folder, steps)
    if split == 'test':
        seen = found
        found, bad = _chains('test', folder, steps)
        found = {asked: values for asked, values in found.items() if asked not in seen}
    rng = np.random.default_rng(0)
    result = []
    for i, (asked, values) in enumerate(found.items()):
        slipped = rng.random(len(values)) < slips
        worked = [f'{left}={value}{"0" * int(slip)}' for left, value, slip in zip(asked, values, slipped, strict=True)]
        result.append(
            Example(';'.join(asked) + '=', values[-1], i, {'steps': list(asked), 'demonstration': ' '.join(worked)})
        )
    return result + bad


def _chains(split, folder, most):
    """(expressions -> their values, of solutions with two steps or more; malformed rows)."""
    problems, bad = parted(gsm8k.examples(split, folder=folder))
    found = {}
    for problem in problems:
        steps = gsm8k_calculator.ANNOTATION.findall(problem.meta['demonstration'])[:most]
        if len(steps) > 1:
            left, values = zip(
                *((left.replace(' ', ''), gsm8k_calculator.plain(value)) for left, value in steps), strict=True
            )
            found.setdefault(left, values)
    return found, bad
