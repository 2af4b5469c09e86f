"""The same story with other numbers: few problems then teach which operation a story asks for, and not its answer."""

from collections.abc import Sequence
import decimal
from fractions import Fraction
import random
import re

from grpo_jax.data.records import number_text
from grpo_jax.example import Example
from grpo_jax.expressions import value_of

# a number that stands alone: no part of 1,000 or 1.2.3, of 2nd or B12, of 5:30 or 1e5
NUMBER = re.compile(r'(?<![\w.,:])[0-9]+(?:\.[0-9]+)?(?![\w:]|[.,][0-9])')
LONGEST, MOST = 12, 12  # characters of a number, and numbers of a story; nobody writes longer ones
DRAWS = 400  # of numbers until the expression has a fit value; quotients that are whole are rare
PLACES = 10**6  # parts of one that an answer may be told in


def renumbered(example: Example, number: int) -> Example | None:
    """The example, as that number of its set, with other numbers in prompt, answer and expression.

    example.meta['demonstration'] must be an expression, or an expression, ` = ` and its value. A new number is between
    half and twice the old one, and numbers keep their order, so that who gives 15 of 40 away has enough of them; the
    answer is whole and above 0 where the old one is, and exact. None where the expression has a number that the prompt
    lacks or another value than the answer, or where no draw fits. The numbers are a function of the example and
    `number`.
    """
    expression, equals, _ = str(example.meta.get('demonstration', '')).partition(' = ')
    texts = list(dict.fromkeys(NUMBER.findall(example.prompt)))
    old = value_of(expression)
    if old is None or not set(NUMBER.findall(expression)) <= set(texts):
        return None
    if not NUMBER.fullmatch(example.answer.removeprefix('-')) or Fraction(example.answer) != old:
        return None
    if len(texts) > MOST or max(map(len, texts), default=0) > LONGEST:
        return None
    ranks, draw = _ranks(texts), random.Random(f'{number} {example.prompt}')
    for _ in range(DRAWS):
        new = {text: _near(text, draw) for text in texts}
        changed = _replace(expression, new)
        value = value_of(changed)
        if value is None or value > 10**LONGEST or (value <= 0 < old) or (value.denominator > 1 == old.denominator):
            continue
        if PLACES % value.denominator == 0 and _ranks([*new.values()]) == ranks and [*new] != [*new.values()]:
            answer = number_text(decimal.Decimal(value.numerator) / value.denominator)
            shown = f'{changed} = {answer}' if equals else changed
            return Example(_replace(example.prompt, new), answer, number, example.meta | {'demonstration': shown})
    return None


def _replace(text, new):
    return NUMBER.sub(lambda match: new[match[0]], text)


def _near(text, draw):
    """Another number with as many decimals, from half to twice the old one."""
    decimals = len(text.partition('.')[2])
    unit = 10**decimals
    old = round(float(text) * unit)
    return f'{draw.randint((old + 1) // 2, 2 * old) / unit:.{decimals}f}'


def _ranks(texts: Sequence[str]) -> list[int]:
    """Of each number its place among all, from the least on."""
    places = {value: place for place, value in enumerate(sorted(set(map(Fraction, texts))))}
    return [places[Fraction(text)] for text in texts]
