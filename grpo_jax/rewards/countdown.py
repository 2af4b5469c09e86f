"""Countdown: 1 for an expression that uses each of the given numbers once and equals the target."""

from fractions import Fraction
import re
from typing import Annotated

from grpo_jax.example import Example
from grpo_jax.ranges import Range
from grpo_jax.rewards import calculator

ALPHABET = re.compile(r'[-+*/() 0-9]+')


def reward(completion: str, example: Example, *, partial: Annotated[float, Range(least=-1, most=1)]) -> float:
    """1.0 for a right expression, `partial` for another one (0.1 in TinyZero), 0.0 where there is none.

    A right expression has all of example.meta['numbers'], each once, and equals meta['target'] exactly. Negation is
    allowed, and no help: other expressions reach the same values up to sign.
    """
    expression, value = _read(completion)
    if value is None:
        return 0.0
    used = sorted(int(number) for number in re.findall('[0-9]+', expression))
    right = used == sorted(example.meta['numbers']) and value == example.meta['target']
    return 1.0 if right else partial


def extract(completion: str) -> str | None:
    """The expression without spaces in the last <answer>...</answer>, or of the whole text; None without one."""
    expression, value = _read(completion)
    return None if value is None else expression.replace(' ', '')


def _read(completion: str) -> tuple[str, Fraction | None]:
    """(the answer's text, its value as Fraction or None)."""
    head, closed, _ = completion.rpartition('</answer>')
    text = ' '.join((head.rpartition('<answer>')[2] if closed else completion).split())
    return text, calculator.value_of(text) if ALPHABET.fullmatch(text) else None
