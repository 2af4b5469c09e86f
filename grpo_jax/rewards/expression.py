"""Expressions: 1 for one whose value is the gold number, as solvers of word problems that write equations are judged.

Nothing has to be worked out in the completion: a small model learns which operations a problem asks for.
"""

from grpo_jax.example import Example
from grpo_jax.rewards import calculator, numeric

gold = numeric.gold


def reward(completion: str, example: Example) -> float | None:
    """1.0 if the expression's value is example.answer, exactly, else 0.0; None without one plain gold number."""
    number = numeric.plain(example.answer)
    return None if number is None else float(extract(completion) == number)


def extract(completion: str) -> str | None:
    """The value of the expression that is the last <answer>...</answer>, or the whole text; None without one."""
    value = calculator.read_answer(completion)[1]
    return None if value is None else str(value)
