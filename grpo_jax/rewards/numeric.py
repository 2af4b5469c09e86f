"""Correct number: 1 if the completion's answer equals the gold one, else 0; the gold is one plain number."""

from fractions import Fraction
import re

from grpo_jax.example import Example

# a minus after a digit or a bracket is subtraction
NUMBER = re.compile(r'(?:(?<![\d)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)')


AROUND = re.compile(r'[\s$\u20ac£¥%.*]*')  # signs of money and marks of style, which are no part of a number


def reward(completion: str, example: Example) -> float | None:
    """1.0 if the extracted number equals example.answer as a fraction, else 0.0; None where that is no plain number.

    1/2 and 1e-05 are none: the last number in them is another one. A solution with its number after #### is one.
    """
    tail = example.answer.rpartition('####')[2]
    gold = extract(example.answer) if len(tail) < 200 and AROUND.fullmatch(NUMBER.sub('', tail, count=1)) else None
    if gold is None:
        return None
    return float(extract(completion) == gold)


def extract(completion: str) -> str | None:
    """The answer in canonical form: the first number after the last ####, else the last number; None without one."""
    _, mark, tail = completion.rpartition('####')
    numbers = NUMBER.findall(tail)
    if not numbers:
        return None
    text = numbers[0 if mark else -1].replace(',', '')
    # a numeral of thousands of digits is noise, and exact arithmetic on it is slow
    return None if len(text) > 100 else str(Fraction(text))
