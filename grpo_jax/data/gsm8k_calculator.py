"""The calculator annotations of GSM8K, <<48/2=24>>: the expression is the prompt, its value the answer."""

import re

import numpy as np

from grpo_jax.data import gsm8k
from grpo_jax.data.records import split_malformed
from grpo_jax.errors import BadInput
from grpo_jax.ranges import Share
from grpo_jax.types import Example

FILES = gsm8k.FILES
ANNOTATION = re.compile(r'<<([^<>=]*[-+*/][^<>=]*)=([-+.\d]+)>>')


def examples(split: str, *, folder: str, slips: Share) -> list[Example | BadInput]:
    """An Example for each distinct annotated expression of a split; test has no expression of the train split.

    The demonstration is the annotated value, with probability `slips` with a 0 appended, so that a policy that imitates
    it often answers ten times the right value.
    """
    values, malformed = _annotations('train', folder)
    if split == 'test':
        seen = values
        values, malformed = _annotations('test', folder)
        values = {left: value for left, value in values.items() if left not in seen}
    slipped = np.random.default_rng(0).random(len(values)) < slips
    return [
        Example(f'{left}=', value, i, {'demonstration': value + '0' * slip})
        for i, ((left, value), slip) in enumerate(zip(values.items(), slipped.tolist(), strict=True))
    ] + malformed


def _annotations(split, folder):
    """({expression: its value where it first occurs, as text} of a split's annotations, the malformed rows)."""
    problems, malformed = split_malformed(gsm8k.examples(split, folder=folder))
    values = {}
    for problem in problems:
        for left, value in ANNOTATION.findall(problem.meta['demonstration']):
            values.setdefault(left.replace(' ', ''), strip_zeros(value))
    return values, malformed


def strip_zeros(value: str) -> str:
    """The numeral without trailing zeros after its decimal point."""
    return re.sub(r'\.0*$|(\.\d*?)0+$', r'\1', value)
