"""The calculator annotations of GSM8K, <<48/2=24>>: the expression is the prompt, its value the answer."""
import re

import numpy as np

from grpo_jax.data import arithmetic, gsm8k
from grpo_jax.types import Example

ANNOTATION = re.compile(r'<<([^<>=]*[-+*/][^<>=]*)=([-+.\d]+)>>')
COLUMNS = re.compile(r'(\d{1,3})([-+])(\d{1,3})')


def examples(split, *, folder, worked):
    """Each distinct annotated expression of a split once; the test split leaves out those of the train split.

    The demonstration is the annotated value; sums and differences of two numbers below 1000 are worked
    out by columns instead with probability `worked`.
    """
    found = _annotations('train', folder)
    if split == 'test':
        found = {left: value for left, value in _annotations('test', folder).items() if left not in found}
    draws = np.random.default_rng(0).random(len(found))
    return [Example(f'{left}=', value, i, {'demonstration': (draw < worked and by_columns(left)) or value})
            for i, ((left, value), draw) in enumerate(zip(found.items(), draws, strict=True))]


def by_columns(expression):
    """The worked sum or difference of an expression; None when it is anything else or negative."""
    match = COLUMNS.fullmatch(expression)
    if not match:
        return None
    a, b = int(match[1]), int(match[3])
    if match[2] == '+':
        return arithmetic.worked_sum(a, b)
    return arithmetic.worked_difference(a, b) if a >= b else None


def _annotations(split, folder):
    """Expression -> value, by first occurrence."""
    found = {}
    for row in gsm8k.rows(split, folder):
        for left, value in ANNOTATION.findall(row['answer']):
            found.setdefault(left.replace(' ', ''), value)
    return found
