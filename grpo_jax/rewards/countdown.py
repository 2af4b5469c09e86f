"""Countdown: 1 for an expression that uses each of the given numbers once and equals the target."""

import re

from grpo_jax.rewards import calculator

ALPHABET = re.compile(r'[-+*/() 0-9]+')


def reward(completion, example, *, partial):
    """1.0 for a right expression, `partial` for another one (0.1 in TinyZero), 0.0 where there is none.

    Right is one of all of example.meta['numbers'], each once, that equals meta['target'] exactly. Negation is allowed,
    and no help: what it reaches is, up to sign, reached without.
    """
    expression, value = _read(completion)
    if value is None:
        return 0.0
    used = sorted(int(number) for number in re.findall('[0-9]+', expression))
    right = used == sorted(example.meta['numbers']) and value == example.meta['target']
    return 1.0 if right else partial


def extract(completion):
    """The expression without spaces in the last <answer>...</answer>, or of the whole text; None without one."""
    expression, value = _read(completion)
    return None if value is None else expression.replace(' ', '')


def _read(completion):
    """(the answer's text, its value as Fraction or None)."""
    head, closed, _ = completion.rpartition('</answer>')
    text = ' '.join((head.rpartition('<answer>')[2] if closed else completion).split())
    return text, calculator.value_of(text) if ALPHABET.fullmatch(text) else None
