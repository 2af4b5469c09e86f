"""Steps of arithmetic like 48/2=24: a reward for each, and their share as the completion's reward."""

from fractions import Fraction
import itertools
import re

from grpo_jax.example import Example
from grpo_jax.expressions import ARITHMETIC, LONGEST, value_of

# an expression with its value if one follows, or signs alone. The value is optional so that no text is scanned twice
EQUATION = re.compile(r'([-+*/().]*\d[-+*/().\d]*)(?:=([-+]?\d+(?:\.\d+)?|[-+]?\.\d+))?|[-+*/().]+')
GOES_ON = re.compile(r',\d{3}(?!\d)|[*/^]\d')  # what follows a value that is read in part: 24 of 24,000, 2 of 2*5
MOST = 1000  # equations of a completion that are looked at


def reward(completion: str, example: Example) -> float | None:
    """The share, in [0, 1], of the completion's equations that are right (see steps); None without an equation."""
    values = [value for _, value in steps(completion, example)]
    return sum(values) / len(values) if values else None


def steps(completion: str, example: Example) -> list[tuple[int, float]]:
    """A pair (end in characters, 1.0 if right else 0.0) for each of the completion's first MOST equations.

    Values are compared exactly, as fractions. Where example.meta has 'steps', a list of expressions, the i-th equation
    must also have the i-th expression, since otherwise any true equation would pay.
    """
    expressions, rewards = example.meta.get('steps'), []
    equations = (match for match in EQUATION.finditer(completion) if match[2])
    for i, match in enumerate(itertools.islice(equations, MOST)):
        expression, value = match.groups()
        right = len(value) <= LONGEST and value_of(expression) == Fraction(value)
        right = right and not GOES_ON.match(completion, match.end())
        if expressions is not None:
            right = right and i < len(expressions) and expression == expressions[i]
        rewards.append((match.end(), float(right)))
    return rewards


def read_answer(completion: str, alphabet: re.Pattern = ARITHMETIC) -> tuple[str, Fraction | None]:
    """(text, value): the text in the last <answer>...</answer>, else the whole completion, with single spaces.

    The value is None when the text is no expression in the characters of `alphabet`.
    """
    head, closed, _ = completion.rpartition('</answer>')
    text = ' '.join((head.rpartition('<answer>')[2] if closed else completion).split())
    return text, value_of(text) if alphabet.fullmatch(text) else None
