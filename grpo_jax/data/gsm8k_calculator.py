"""The calculator annotations of GSM8K, <<48/2=24>>: the expression is the prompt, its value the answer."""
import re

import numpy as np

from grpo_jax.data import arithmetic, gsm8k
from grpo_jax.types import Example

ANNOTATION = re.compile(r'<<([^<>=]*[-+*/][^<>=]*)=([-+.\d]+)>>')
CHAIN = re.compile(r'\d{1,4}([-+]\d{1,4})+')


def examples(split, *, folder, worked):
    """Each distinct annotated expression of a split once; the test split leaves out those of the train split.

    The demonstration is the annotated value; sums and differences of whole numbers are worked out by
    columns instead with probability `worked`.
    """
    found = _annotations('train', folder)
    if split == 'test':
        found = {left: value for left, value in _annotations('test', folder).items() if left not in found}
    draws = np.random.default_rng(0).random(len(found))
    return [Example(f'{left}=', value, i, {'demonstration': (draw < worked and by_columns(left)) or value})
            for i, ((left, value), draw) in enumerate(zip(found.items(), draws, strict=True))]


def by_columns(expression):
    """A chain of sums and differences worked out from the left: 7+5-9 -> '7+5=12 12 12-9=3 1-0-1=0 3'.

    None for any other expression, and where a step is negative.
    """
    if not CHAIN.fullmatch(expression):
        return None
    total, *rest = re.findall(r'[-+]?\d+', expression)
    total, steps = int(total), []
    for term in map(int, rest):
        if total + term < 0:
            return None
        steps.append(arithmetic.worked_sum(total, term) if term > 0 else arithmetic.worked_difference(total, -term))
        total += term
    return ' '.join(steps)


def _annotations(split, folder):
    """Expression -> value, by first occurrence."""
    found = {}
    for row in gsm8k.rows(split, folder):
        for left, value in ANNOTATION.findall(row['answer']):
            found.setdefault(left.replace(' ', ''), value)
    return found
