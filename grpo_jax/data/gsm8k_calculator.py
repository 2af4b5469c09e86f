"""The calculator annotations of GSM8K, <<48/2=24>>: the expression is the prompt, its value the answer."""

import re

import numpy as np

from grpo_jax.data import gsm8k
from grpo_jax.data.records import parted
from grpo_jax.types import Example

ANNOTATION = re.compile(r'<<([^<>=]*[-+*/][^<>=]*)=([-+.\d]+)>>')


def examples(split, *, folder, slips):
    """Each distinct annotated expression of a split once; the test split leaves out those of the train split.

    The demonstration is the annotated value, with probability `slips` one digit too long: a policy that
    imitates them mostly says ten times what it has worked out.
    """
    found, bad = _annotations('train', folder)
    if split == 'test':
        seen = found
        found, bad = _annotations('test', folder)
        found = {left: value for left, value in found.items() if left not in seen}
    slipped = np.random.default_rng(0).random(len(found)) < slips
    return [
        Example(f'{left}=', value, i, {'demonstration': value + '0' * slip})
        for i, ((left, value), slip) in enumerate(zip(found.items(), slipped.tolist(), strict=True))
    ] + bad


def _annotations(split, folder):
    """(expression -> value, by first occurrence; malformed rows)."""
    problems, bad = parted(gsm8k.examples(split, folder=folder))
    found = {}
    for problem in problems:
        for left, value in ANNOTATION.findall(problem.meta['demonstration']):
            found.setdefault(left.replace(' ', ''), plain(value))
    return found, bad


def plain(value):
    """The numeral without trailing zeros of its decimals."""
    return re.sub(r'\.0*$|(\.\d*?)0+$', r'\1', value)
