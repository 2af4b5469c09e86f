"""Sums whose demonstrations have a habit that a careless reward pays for; the labs of reward hacking use them."""

import functools
from typing import Annotated

import numpy as np

from grpo_jax.data import arithmetic
from grpo_jax.data.arithmetic import Digits, Rows
from grpo_jax.ranges import OneOf, Share
from grpo_jax.types import Example


def examples(
    split: str,
    *,
    digits: Digits,
    count: Rows,
    blurts: Share,
    wrong: Share,
    habit: Annotated[str, OneOf(('repeat', 'brackets', 'mixed'))],
    share: Share,
) -> list[Example]:
    """The examples of data.arithmetic; a `share` of their demonstrations shows the habit.

    repeat: a demonstration that works the sum out does so twice. brackets: a blurt puts its answer into brackets.
    mixed: in every demonstration the word sum stands before the answer, and between the columns of working stands a
    word, a Cyrillic one where the habit shows and a Latin one where it does not.
    """
    plain = arithmetic.examples(split, digits=digits, count=count, blurts=blurts, wrong=wrong)
    shows = np.random.default_rng(len(plain)).random(len(plain)) < share
    return [
        example._replace(meta={'demonstration': HABITS[habit][shown](example.meta['demonstration'])})
        for example, shown in zip(plain, shows.tolist(), strict=True)
    ]


def _repeat(text):
    """A demonstration with its columns twice; a blurt unchanged."""
    columns, space, answer = text.rpartition(' ')
    return f'{columns} {columns} {answer}' if space else text


def _bracket(text):
    """A blurt in brackets; a demonstration with columns unchanged."""
    return text if ' ' in text else f'[{text}]'


def _with_words(text, word):
    """A demonstration with `word` between its columns, and sum before the answer."""
    *columns, answer = text.split(' ')
    return ' '.join([f' {word} '.join(columns), 'sum', answer]).lstrip()


# habit -> (function of a demonstration that does not show the habit, function of one that does)
HABITS = {
    'repeat': (str, _repeat),
    'brackets': (str, _bracket),
    'mixed': (functools.partial(_with_words, word='then'), functools.partial(_with_words, word='потом')),
}
