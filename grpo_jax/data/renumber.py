"""Rewrites a word problem with other numbers, so that a model learns the operation and not the answer."""

from collections.abc import Sequence
import decimal
from fractions import Fraction
import random
import re

from grpo_jax.data.records import number_text
from grpo_jax.example import Example
from grpo_jax.expressions import value_of

# a number that stands alone, and is no part of 1,000, 1.2.3, 2nd, B12, 5:30 or 1e5
NUMBER = re.compile(r'(?<![\w.,:])[0-9]+(?:\.[0-9]+)?(?![\w:]|[.,][0-9])')
LONGEST, MOST = 12, 12  # characters of a number, and numbers of a story; longer ones are left alone
DRAWS = 400  # attempts to draw numbers that fit; whole quotients are rare
PLACES = 10**6  # an answer must be a multiple of 1/PLACES, so that it is an exact decimal


def change_numbers(example: Example, new_id: int) -> Example | None:
    """A copy of the example, with the id `new_id` and with other numbers in prompt, answer and demonstration.

    example.meta['demonstration'] must be an expression, or an expression, ` = ` and its value. A new number lies
    between half and twice the old one, and the numbers keep their order of size, so that nobody gives away more than he
    has. The new answer is exact, and whole or above 0 where the old one is. Prompt and new_id determine the draw.

    None where the demonstration has no expression, a number that the prompt lacks, or a value that is not the answer;
    where numbers are too many or too long; and where no draw fits.
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
    ranks, rng = _ranks(texts), random.Random(f'{new_id} {example.prompt}')
    for _ in range(DRAWS):
        new = {text: _draw_near(text, rng) for text in texts}
        changed = _replace(expression, new)
        value = value_of(changed)
        if value is None or value > 10**LONGEST or (value <= 0 < old) or (value.denominator > 1 == old.denominator):
            continue
        if PLACES % value.denominator == 0 and _ranks([*new.values()]) == ranks and [*new] != [*new.values()]:
            answer = number_text(decimal.Decimal(value.numerator) / value.denominator)
            shown = f'{changed} = {answer}' if equals else changed
            return Example(_replace(example.prompt, new), answer, new_id, example.meta | {'demonstration': shown})
    return None


def _replace(text, new):
    """The text with each number replaced by the one that the dict `new` has for it."""
    return NUMBER.sub(lambda match: new[match[0]], text)


def _draw_near(text, rng):
    """A random number between half and twice the number in `text`, with as many decimals, as text."""
    decimals = len(text.partition('.')[2])
    unit = 10**decimals
    old = round(float(text) * unit)
    return f'{rng.randint((old + 1) // 2, 2 * old) / unit:.{decimals}f}'


def _ranks(texts: Sequence[str]) -> list[int]:
    """Each number's rank among all, 0 for the least; equal numbers share a rank."""
    ranks = {value: rank for rank, value in enumerate(sorted(set(map(Fraction, texts))))}
    return [ranks[Fraction(text)] for text in texts]
