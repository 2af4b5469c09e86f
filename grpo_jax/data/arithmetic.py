"""Addition of whole numbers, with imperfect demonstrations: most state a wrong answer, some work the sum out.

A policy that imitates these demonstrations can add but seldom does: its most likely completion is a bare answer, and
only some samples go through the columns. Reinforcement learning closes that gap.
"""

from typing import Annotated
import zlib

import numpy as np

from grpo_jax.data.records import check_made
from grpo_jax.ranges import Range, Share
from grpo_jax.types import Example

Digits = Annotated[int, Range(least=1, most=18)]  # what int64 holds
Rows = Annotated[int, Range(least=1, most=10**6)]  # rows are made one by one


def examples(
    split: str, *, digits: Digits, count: Rows, blurts: Share, wrong: Share, tags: bool = False
) -> list[Example]:
    """Makes Examples of up to `count` distinct sums like `47+85=`, of numbers with `digits` digits.

    Train and test share no sum. A demonstration is a blurt, the bare answer, with probability `blurts`; a blurt has one
    digit changed with probability `wrong`. Other demonstrations add column by column, from the right, and then state
    the answer. With tags the columns stand inside <think> </think>, and the answer inside <answer> </answer>. Raises
    MissingSplit for another split than train and test.
    """
    check_made(split)
    rng = np.random.default_rng((digits, split == 'test'))
    low, high = 10 ** (digits - 1), 10**digits
    demonstrations = {}

    def is_of_split(a, b):  # a fixed tenth of all sums is held out, whatever the counts
        return (zlib.crc32(f'{a}+{b}'.encode()) % 10 == 0) == (split == 'test')

    numbers = range(low, high) if digits <= 2 else ()  # of more digits there are many more sums than are asked for
    most = min(count, sum(is_of_split(a, b) for a in numbers for b in numbers) or count)
    for _ in range(50 * count):  # bounded: a few sums may never be drawn
        if len(demonstrations) == most:
            break
        a, b = int(rng.integers(low, high)), int(rng.integers(low, high))  # twice as fast as two at once
        if is_of_split(a, b):
            text = _demonstration(rng, a, b, blurts, wrong)
            if tags:
                columns, _, answer = text.rpartition(' ')
                text = f'<think>{columns}</think><answer>{answer}</answer>'
            demonstrations.setdefault((a, b), text)
    return [
        Example(f'{a}+{b}=', str(a + b), i, {'demonstration': text})
        for i, ((a, b), text) in enumerate(demonstrations.items())
    ]


def work_out(a: int, b: int) -> str:
    """The text of a + b by columns, from the right, then the answer, like '7+5=12 4+8+1=13 132' for 47 + 85."""
    columns, carry, left, right = [], 0, a, b
    while left or right:
        column = left % 10 + right % 10 + carry
        columns.append(f'{left % 10}+{right % 10}{"+1" if carry else ""}={column}')
        carry, left, right = column // 10, left // 10, right // 10
    return ' '.join([*columns, str(a + b)])


def _demonstration(rng, a, b, blurts, wrong):
    """Draws the text of a demonstration of a + b; blurts, wrong: probabilities, as in examples."""
    if rng.random() >= blurts:
        return work_out(a, b)
    answer = list(str(a + b))
    if rng.random() < wrong:
        place = rng.integers(len(answer))
        answer[place] = str((int(answer[place]) + rng.integers(1, 10)) % 10)
    return ''.join(answer)
