"""The calculator annotations of GSM8K, <<48/2=24>>: the expression is the prompt, its value the answer."""
import re

import numpy as np

from grpo_jax.data import gsm8k
from grpo_jax.types import Example

ANNOTATION = re.compile(r'<<([^<>=]*[-+*/][^<>=]*)=([-+.\d]+)>>')


def examples(split, *, folder, slips):
    """Each distinct annotated expression of a split once; the test split leaves out those of the train split.

    The demonstration is the annotated value, with probability `slips` one digit too long: a policy that
    imitates them mostly says ten times what it has worked out.
    """
    found = _annotations('train', folder)
    if split == 'test':
        found = {left: value for left, value in _annotations('test', folder).items() if left not in found}
    slipped = np.random.default_rng(0).random(len(found)) < slips
    return [Example(f'{left}=', value, i, {'demonstration': value + '0' * slip})
            for i, ((left, value), slip) in enumerate(zip(found.items(), slipped.tolist(), strict=True))]


def _annotations(split, folder):
    """Expression -> value, by first occurrence."""
    found = {}
    for row in gsm8k.rows(split, folder):
        for left, value in ANNOTATION.findall(row['answer']):
            found.setdefault(left.replace(' ', ''), plain(value))
    return found


def plain(value):
    """The numeral without trailing zeros of its decimals."""
    return re.sub(r'\.0*$|(\.\d*?)0+$', r'\1', value)
