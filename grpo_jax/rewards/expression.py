"""Expressions: 1 if the completion's expression has the gold number as its value, else 0.

Solvers of word problems that write equations are judged like this. The completion need not work the value out, so a
small model learns which operations a problem asks for.
"""

from grpo_jax.example import Example
from grpo_jax.rewards import calculator, numeric

gold = numeric.gold


def reward(completion: str, example: Example) -> float | None:
    """1.0 if the expression's value is exactly example.answer, else 0.0; None where the answer is not one number."""
    number = numeric.plain_number(example.answer)
    return None if number is None else float(extract(completion) == number)


def extract(completion: str) -> str | None:
    """The value, like '7/2', of the expression in the last <answer>...</answer>, else in the text; None without one."""
    value = calculator.read_answer(completion)[1]
    return None if value is None else str(value)
