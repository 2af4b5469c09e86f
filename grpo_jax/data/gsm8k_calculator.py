"""The calculator annotations of GSM8K, <<48/2=24>>: the expression is the prompt, its value the answer."""
import re

from grpo_jax.data import gsm8k
from grpo_jax.types import Example

ANNOTATION = re.compile(r'<<([^<>=]*[-+*/][^<>=]*)=([-+.\d]+)>>')


def examples(split, *, folder):
    """Each distinct annotated expression of a split once; the test split leaves out those of the train split.

    The demonstration is the annotated value.
    """
    found = _annotations('train', folder)
    if split == 'test':
        found = {left: value for left, value in _annotations('test', folder).items() if left not in found}
    return [Example(f'{left}=', value, i, {'demonstration': value}) for i, (left, value) in enumerate(found.items())]


def _annotations(split, folder):
    """Expression -> value, by first occurrence."""
    found = {}
    for row in gsm8k.rows(split, folder):
        for left, value in ANNOTATION.findall(row['answer']):
            found.setdefault(left.replace(' ', ''), value)
    return found
