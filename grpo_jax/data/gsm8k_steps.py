"""The calculator steps of whole GSM8K solutions: 48/2;48+24= is worked out as 48/2=24 48+24=72."""

from typing import Annotated

import numpy as np

from grpo_jax.data import gsm8k, gsm8k_calculator
from grpo_jax.data.records import split_malformed
from grpo_jax.errors import BadInput
from grpo_jax.ranges import Range, Share
from grpo_jax.types import Example

FILES = gsm8k.FILES


def examples(
    split: str, *, folder: str, steps: Annotated[int, Range(least=2)], slips: Share
) -> list[Example | BadInput]:
    """An Example for each distinct chain of annotated expressions; test has no chain of the train split.

    A chain has the first `steps` expressions of a solution, or all if there are fewer, but at least two. meta['steps']
    lists them. In the demonstration each value has a 0 appended with probability `slips`.
    """
    chains, malformed = _chains('train', folder, steps)
    if split == 'test':
        seen = chains
        chains, malformed = _chains('test', folder, steps)
        chains = {expressions: values for expressions, values in chains.items() if expressions not in seen}
    rng = np.random.default_rng(0)
    result = []
    for i, (expressions, values) in enumerate(chains.items()):
        slipped = rng.random(len(values)) < slips
        worked = [
            f'{left}={value}{"0" * int(slip)}' for left, value, slip in zip(expressions, values, slipped, strict=True)
        ]
        result.append(
            Example(
                ';'.join(expressions) + '=',
                values[-1],
                i,
                {'steps': list(expressions), 'demonstration': ' '.join(worked)},
            )
        )
    return result + malformed


def _chains(split, folder, most):
    """({expressions: values} of each solution's first 2 to `most` steps, as tuples of texts; the malformed rows)."""
    problems, malformed = split_malformed(gsm8k.examples(split, folder=folder))
    chains = {}
    for problem in problems:
        steps = gsm8k_calculator.ANNOTATION.findall(problem.meta['demonstration'])[:most]
        if len(steps) > 1:
            left, values = zip(
                *((left.replace(' ', ''), gsm8k_calculator.strip_zeros(value)) for left, value in steps), strict=True
            )
            chains.setdefault(left, values)
    return chains, malformed
