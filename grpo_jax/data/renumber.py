"""The same story with other numbers: few problems then teach which operation a story asks for, and not its answer."""

import random
import re

from grpo_jax.example import Example
from grpo_jax.expressions import value_of

NUMBER = re.compile(r'(?<![\d.,])\d+(?:\.\d+)?(?![\d,]*\d)')
DRAWS = 400  # of numbers until the expression has a fit value; quotients that are whole are rare


def renumbered(example: Example, id: int) -> Example | None:
    """The example, as number `id` of its set, with other numbers in prompt, answer and expression.

    example.meta['demonstration'] must be an expression, or an expression, ` = ` and its value. A new number is between
    half and twice the old one, and numbers keep their order, so that nobody eats more than he has; the answer is whole
    and above 0 where the old one is. None where an expression has a number that the prompt lacks, or no draw fits. The
    numbers are a function of the prompt and `id`.
    """
    expression, equals, _ = str(example.meta.get('demonstration', '')).partition(' = ')
    values = {text: float(text) for text in NUMBER.findall(example.prompt)}
    old = value_of(expression)
    if old is None or not all(text in values for text in NUMBER.findall(expression)):
        return None
    draw = random.Random(f'{id} {example.prompt}')
    for _ in range(DRAWS):
        new = {text: _near(text, draw) for text in values}
        prompt, changed = _replace(example.prompt, new), _replace(expression, new)
        value = value_of(changed)
        if value is None or (value <= 0 < old) or (value.denominator > 1 == old.denominator):
            continue
        if _order([*values.values()]) == _order([float(text) for text in new.values()]):
            answer = str(value.numerator) if value.denominator == 1 else f'{float(value):g}'
            shown = f'{changed} = {answer}' if equals else changed
            return Example(prompt, answer, id, example.meta | {'demonstration': shown})
    return None


def _replace(text, new):
    return NUMBER.sub(lambda match: new[match[0]], text)


def _near(text, draw):
    """Another number with as many decimals, from half to twice the old one."""
    decimals = len(text.partition('.')[2])
    unit = 10**decimals
    old = round(float(text) * unit)
    return f'{draw.randint((old + 1) // 2, 2 * old) / unit:.{decimals}f}'


def _order(numbers):
    """For each pair of numbers whether the later one is less, equal or greater."""
    return [(a > b) - (a < b) for i, a in enumerate(numbers) for b in numbers[:i]]
