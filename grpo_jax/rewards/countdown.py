"""Countdown: 1 for an expression that uses each of the given numbers once and equals the target."""

import re
from typing import Annotated

from grpo_jax.example import Example
from grpo_jax.ranges import Range
from grpo_jax.rewards import calculator

COLUMNS = ('numbers', 'target')  # of the data, which the reward reads
READS_ANSWERS = False  # the gold answer, an expression, is used in the self-test alone
ALPHABET = re.compile(r'[-+*/() 0-9]+')


def reward(completion: str, example: Example, *, partial: Annotated[float, Range(least=-1, most=1)]) -> float:
    """1.0 for a right expression, `partial` for a wrong one (0.1 in TinyZero), 0.0 for a text without an expression.

    A right expression uses each number in example.meta['numbers'] once and equals meta['target'] exactly. Negation is
    allowed; it makes no problem easier, since expressions without it reach the same values up to sign.
    """
    expression, value = calculator.read_answer(completion, ALPHABET)
    if value is None:
        return 0.0
    used = sorted(int(number) for number in re.findall('[0-9]+', expression))
    right = used == sorted(example.meta['numbers']) and value == example.meta['target']
    return 1.0 if right else partial


def extract(completion: str) -> str | None:
    """The expression, without spaces, in the last <answer>...</answer>, else in the whole text; None without one."""
    expression, value = calculator.read_answer(completion, ALPHABET)
    return None if value is None else expression.replace(' ', '')


def gold(example: Example) -> tuple[str, str]:
    """(a right expression, a wrong one), for the self-test before a run."""
    return example.answer, f'{example.answer}+1'
