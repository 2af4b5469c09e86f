"""Detects answers that repeat a formula of the problem instead of its value."""

import functools
import re

from grpo_jax.rewards.math import extraction
from grpo_jax.rewards.math.numbers import fraction
from grpo_jax.rewards.math.spelling import canonicalize, respell
from grpo_jax.rewards.math.units import split_unit

LONGEST = 20_000  # characters of a problem that are read
FORMULA = re.compile(
    r'\$\$(.{1,1000}?)\$\$|(?<!\\)\$(.{1,1000}?)(?<!\\)\$|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]', re.DOTALL
)
# arithmetic outside of formulas: a sign between numbers
ARITHMETIC = re.compile(r'[-+(0-9][-+*/^().,0-9 \u00d7÷x]{0,200}[0-9)!]')
SIGNS = re.compile(r'[0-9)!] ?[-+*/^\u00d7÷x] ?[-+(0-9]')
QUANTITY = re.compile(r'[0-9][0-9.,/]* ?[A-Za-z]+')
SKIPPED = re.compile(r'[\s{}]|\\(?:limits|mathrm|text)(?![A-Za-z])')
SAME = ((r'\cdot', '*'), (r'\times', '*'), ('\u00d7', '*'), ('÷', '/'), (r'\div', '/'))


def is_echo(answer: str, problem: str, gold: str) -> bool:
    """Whether an answer is spelled like a formula of the problem, or like one side of it, and unlike the gold answer.

    A plain number is never an echo.
    """
    if is_plain(answer):
        return False
    spelled = _bare_spelling(answer)
    if not any(side in _formulas(problem) for side in (spelled, spelled.rpartition('=')[2])):
        return False
    return spelled not in (_bare_spelling(gold), _bare_spelling(extraction.answer(gold)))


def is_quantity(gold: str, answer: str, problem: str) -> bool:
    """Whether an answer repeats a quantity of the problem in another unit than the gold answer's.

    The answer 90 minutes is one where a problem asks how many hours 90 minutes are. gold, answer: in canonical form.
    """
    wanted, unit = split_unit(gold)[1], split_unit(answer)[1]
    if not wanted or not unit or wanted == unit:
        return False
    return any(canonicalize(quantity) == answer for quantity in QUANTITY.findall(problem[:LONGEST]))


@functools.lru_cache(4096)
def _formulas(problem):
    """The problem's formulas and their sides, each in one spelling (frozenset of str)."""
    problem = problem[:LONGEST]
    pieces = [next(filter(None, match)) for match in FORMULA.findall(problem)]
    pieces += [text for text in ARITHMETIC.findall(FORMULA.sub(' ', problem)) if SIGNS.search(text)]
    spelled = {_bare_spelling(piece) for piece in pieces if not is_plain(piece)}
    return frozenset(spelled | {side for text in spelled for side in text.split('=') if not is_plain(side)}) - {''}


def _bare_spelling(text):
    """The text with one spelling for each sign, without spaces, braces and outer brackets."""
    text = respell(text) or ''
    for sign, other in SAME:
        text = text.replace(sign, other)
    text = SKIPPED.sub('', text)
    return text[1:-1] if text.startswith('(') and text.find(')') == len(text) - 1 and ',' not in text else text


def is_plain(text):
    """Whether a text needs no working out: a name, a whole or decimal number, or a fraction in lowest terms."""
    spelled = respell(text) or ''
    if not re.search(r'[-+*/^=\\!]', spelled.lstrip('-+ ')):
        return True
    number = fraction(re.sub(r'\s', '', spelled))
    below = re.search(r'/([0-9]+)$|\\frac\s*\{-?[0-9]+\}\s*\{([0-9]+)\}$', spelled)
    return number is not None and below is not None and number.denominator == int(below[1] or below[2])
