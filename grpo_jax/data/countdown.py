"""Countdown: write an expression of given numbers that equals a target. Every problem has a solution."""

from collections.abc import Sequence
import random
from typing import Annotated, NamedTuple
import zlib

from grpo_jax.data.records import check_made
from grpo_jax.errors import BadInput
from grpo_jax.ranges import Length, Range, Share, Text
from grpo_jax.types import Example

PROMPT = (
    'Write an expression that equals {target} and uses each of the numbers {numbers} exactly once, no other '
    'number, and only {operations} and brackets. Think inside <think> </think>, then give the expression inside '
    '<answer> </answer>, for example <answer>(1 + 2) / 3</answer>.'
)
OPERATIONS = {
    '+': lambda a, b: a + b,
    '-': lambda a, b: a - b,
    '*': lambda a, b: a * b,
    '/': lambda a, b: 0 if a % b else a // b,
}
PATIENCE = 3000  # after this many draws without a new problem, no more are sought
SUM, PRODUCT, NUMBER = range(3)  # how tightly an expression binds


class Term(NamedTuple):
    """Part of an expression: its value, its text, and how tightly it binds (SUM, PRODUCT or NUMBER)."""

    value: int
    text: str
    binds: int


def examples(
    split: str,
    *,
    count: Annotated[int, Range(least=1, most=10**6)],
    numbers: Annotated[Sequence[Annotated[int, Range(least=2, most=100)]], Length(2, 2)],
    largest: Annotated[int, Range(least=1, most=10**9)],
    highest: Annotated[int, Range(least=1, most=10**18)],
    operations: Text,
    short: bool,
    wrong: Share,
) -> list[Example]:
    """Makes Examples of up to `count` distinct problems.

    A problem has numbers[0] to numbers[1] numbers in 1..largest and a target in 1..highest. operations is a text like
    '+-*/'; all intermediate values are whole and above 0. The test split shares no set of numbers with the train split.
    The answer is a right expression. meta has numbers, target and demonstration; a demonstration has a wrong expression
    with probability `wrong`. A `short` prompt is `3,5,7=22:` and asks for the bare expression; others are a sentence
    and ask for <think> and <answer>. Raises BadInput for numbers in the wrong order, for another operation, and for
    another split than train and test.
    """
    check_made(split)
    if numbers[0] > numbers[1]:
        raise BadInput('data.options.numbers', numbers, 'must be (least, most) numbers; swap the two')
    if not set(operations) <= OPERATIONS.keys():
        raise BadInput('data.options.operations', operations, f'has others than {"".join(OPERATIONS)}; leave them out')
    # demonstrations draw from another stream: the problems do not depend on `wrong`
    problem_rng, slip_rng = random.Random(f'{tuple(numbers)} {largest} {split}'), random.Random(split)
    examples, misses = {}, 0
    while len(examples) < count and misses < PATIENCE:
        misses += 1
        given = [problem_rng.randint(1, largest) for _ in range(problem_rng.randint(*numbers))]
        # a fixed tenth of all sets of numbers is held out, whatever the counts
        if (zlib.crc32(str(sorted(given)).encode()) % 10 == 0) != (split == 'test'):
            continue
        steps, solution = _expression(problem_rng, given, operations)
        problem = (*sorted(given), solution.value)
        if not 1 <= solution.value <= highest or problem in examples:
            continue
        misses = 0
        shown = solution
        if slip_rng.random() < wrong:
            steps, shown = _wrong_expression(slip_rng, given, operations, solution.value) or (steps, solution)
        if short:
            prompt, demonstration = f'{",".join(map(str, given))}={solution.value}:', shown.text
        else:
            prompt = PROMPT.format(
                target=solution.value, numbers=', '.join(map(str, given)), operations=' '.join(operations)
            )
            demonstration = f'<think>{", ".join(steps)}</think>\n<answer>{shown.text}</answer>'
        examples[problem] = Example(
            prompt,
            solution.text,
            len(examples),
            {'numbers': given, 'target': solution.value, 'demonstration': demonstration},
        )
    return list(examples.values())


def _expression(rng, numbers, operations):
    """Draws an expression of all numbers; returns (its steps, like '3*5=15', and its Term).

    If the value of a step is not whole or not above 0, the Term's value is 0.
    """
    terms, steps = [Term(number, str(number), NUMBER) for number in numbers], []
    while len(terms) > 1:
        left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        sign = rng.choice(operations)
        value = OPERATIONS[sign](left.value, right.value)
        if value < 1:
            return steps, Term(0, '', NUMBER)
        steps.append(f'{left.value}{sign}{right.value}={value}')
        terms.append(Term(value, _text(left, sign, right), SUM if sign in '+-' else PRODUCT))
    return steps, terms[0]


def _text(left, sign, right):
    """The text of the expression `left sign right` of two Terms, with brackets where they are needed."""
    binds = SUM if sign in '+-' else PRODUCT
    first = f'({left.text})' if left.binds < binds else left.text
    loose = right.binds < binds or (right.binds == binds and sign in '-/')
    return f'{first}{sign}({right.text})' if loose else f'{first}{sign}{right.text}'


def _wrong_expression(rng, numbers, operations, target):
    """Draws an expression that misses the target; returns its (steps, Term), or None when 100 draws give none."""
    drawn = (_expression(rng, numbers, operations) for _ in range(100))
    return next((result for result in drawn if result[1].value not in (0, target)), None)
