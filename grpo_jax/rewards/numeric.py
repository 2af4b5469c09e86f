"""Correct number: 1 if the completion's answer equals the gold number, else 0."""

from fractions import Fraction
import re

from grpo_jax.example import Example

# a minus after a digit or a bracket is subtraction
NUMBER = re.compile(r'(?:(?<![\d)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)')


def reward(completion: str, example: Example) -> float | None:
    """1.0 if the extracted number equals example.answer as a fraction, else 0.0; None without a gold number."""
    gold = extract(example.answer)
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
