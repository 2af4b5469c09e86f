"""Compares a completion's mathematical answer with the gold answer: 1 if they are equal, else 0."""

from fractions import Fraction
import functools
import logging
import re
from string import ascii_lowercase

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from grpo_jax.example import Example
from grpo_jax.rewards.math import choice, echo, extraction, words
from grpo_jax.rewards.math.numbers import fraction, work_out
from grpo_jax.rewards.math.spelling import canonicalize, split_list
from grpo_jax.rewards.math.units import PERCENT, measured, minutes, same_units, split_unit, statement
from grpo_jax.workers import Pool

NO_ANSWER = re.compile(r'\W*(?:(?i:(?:see )?(?:the )?(?:proof|solution)|(?:answer )?not found|n/?a))\W*')
SIGNIFICANT = 6  # digits that a decimal needs to stand for a number with endless decimals
PRECISION = 100  # digits to which irrational numbers are compared
PARTS = 32  # a list with more entries, or a text with more brackets, is not compared part by part
CACHED = 20_000  # texts that are read once and remembered
BASE = re.compile(r'(?<=[0-9])_\{?([0-9]+)')
COMMA = re.compile(r'([-+]?[0-9]+),([0-9]{2,})')  # 2,74 with a decimal comma; 2,6 may be a list
LETTER = re.compile(r'[A-Z]{2,3}|[A-Za-z](?:_(?:\w|\{\w+\}))?')
PLAIN_FUNCTION = re.compile(r'(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan)|cot|sec|csc|ln|log|exp)(?![a-z])')
FUNCTIONS = {*'sqrt root pi e i log ln sin cos tan cot sec csc exp min max gcd lcm mod abs floor ceil'.split()}
SPAN = re.compile(r'[(\[][^()\[\]]+,[^()\[\]]+[)\]]')
ASSIGNED = re.compile(r'([a-z])=([^=]+)')
OPTIONS = re.compile(r'[A-J]{2,9}|[A-J](?:, [A-J])+')  # the letters of several right options
CLOCK = re.compile(r'[0-9]{1,2}(?::[0-9]{2})+')
INEQUALITY = re.compile(r'(?:([^<>]+?)\s*(<|>|\\[lg]e)\s*)?([A-Za-z]|[^<>]+?)\s*(<|>|\\[lg]e)\s*([^<>]+)')
SET_OF = re.compile(r'[A-Za-z] ?(?:\\mid|\||:) ?')  # before the inequality of a set
MIXED = re.compile(r'([0-9]+) and ([0-9]+/[0-9]+)')
SAYING = r'(?:(?:so|thus|hence|therefore),? )?(?:(?:the|it|this|that|he|she)\b(?:(?! is )[^,.])* is )?'
TRUTHS = {'yes', 'no', 'true', 'false'}
NAME = re.compile(r"(?=.{4}|[^A-Z]*[A-Z]|.$)[A-Za-z][A-Za-z' -]*")  # a name, not a product of letters


def reward(completion: str, example: Example, *, pool: Pool, percent: bool = False) -> float | None:
    """1.0 if the completion's answer equals example.answer, else 0.0; None without a gold answer.

    percent: whether 25 % equals 0.25. Where only algebra can decide, a worker of the pool does (see are_equivalent).
    Raises workers.Expired or workers.Died when that worker was killed.
    """
    return _judge(completion, example, pool, boxed=False, percent=percent)


def strict(completion: str, example: Example, *, pool: Pool, percent: bool = False) -> float | None:
    r"""As reward, but a completion without an answer in \boxed{} or after #### gets 0.0."""
    return _judge(completion, example, pool, boxed=True, percent=percent)


def same(answer: str, other: str) -> bool:
    """Whether two extracted answers are the same without doubt; no algebra is tried. See decide."""
    return decide(answer, other) is True


@functools.lru_cache(CACHED)
def _gold(text):
    """The gold answer in canonical form, cached; None for a text without one, and for a placeholder (NO_ANSWER)."""
    return None if NO_ANSWER.fullmatch(text) else extraction.gold_answer(words.write_bases(text))


def _judge(completion, example, pool, boxed, percent):
    """1.0 if a completion's answer is right, else 0.0; None without a gold answer.

    An answer that repeats a formula or a quantity of the problem, instead of its value, is wrong (see echo). boxed: as
    in extraction.answer; percent: as in reward.
    """
    gold = _gold(example.answer)
    if gold is None:
        return None
    letter, content = choice.split_option(gold)
    number = fraction(split_unit(content)[0])
    if '_' in gold:
        completion = words.write_bases(completion[-extraction.TAIL :])
    text = extraction.answer(completion, boxed=boxed, words=number is None, options=bool(letter))
    if ' or ' in text and OPTIONS.fullmatch(gold):
        return 0.0
    if number is not None:
        text = _as_written(text, example.answer)
    answer = canonicalize(text)
    if number is None and not boxed and 'boxed' not in completion and _says(completion, example.answer):
        return 1.0
    if answer is None:
        return 0.0
    verdict = decide(gold, answer)
    if percent and verdict is False:
        verdict = _is_share(gold, answer, PERCENT.search(example.answer), PERCENT.search(text))
    if verdict is not False and (
        echo.is_echo(text, example.prompt, example.answer) or echo.is_quantity(gold, answer, example.prompt)
    ):
        return 0.0
    return float(pool.call_cached(are_equivalent, gold, answer) if verdict is None else verdict)


def _says(completion, gold):
    """Whether a completion ends with the gold answer in words: `Paris`, `It is Paris`, `Yes, because ...`."""
    stated, gold = (
        choice.TEXT.sub(r'\1', choice.stated(text)).strip(' .!*_$`"').casefold() for text in (completion, gold)
    )
    reason = '(?:[,;:.] .*)?' if gold in TRUTHS else ''
    return re.fullmatch(SAYING + re.escape(gold) + reason, stated) is not None


def _is_share(gold, answer, gold_sign, sign):
    """Whether two canonical texts are one number, in one of them as a percentage.

    gold_sign, sign: the match of a percent sign in each text as it was written, or None.
    """
    a, b = _number(split_unit(gold)[0]), _number(split_unit(answer)[0])
    if a is None or b is None or (gold_sign is None) == (sign is None):
        return False
    return a == 100 * b if gold_sign else b == 100 * a


def _as_written(text, gold):
    """The answer `text` to a gold number, respelled: `2 and 3/4` as 2 3/4, and 2,5 as 2.5 if `gold` has a point."""
    text = MIXED.sub(r'\1 \2', text) if ' and ' in text else text
    return re.sub(r'(?<![0-9,.])([0-9]+),([0-9])(?![0-9,.])', r'\1.\2', text) if ',' in text and '.' in gold else text


def decide(gold: str, answer: str) -> bool | None:
    """Whether two canonical texts are the same answer; None where only algebra can tell.

    A unit may be missing on one side, but two units must be equal. Order counts in brackets, and not in a list without
    brackets. A decimal of SIGNIFICANT digits or more equals a number with endless decimals that rounds or truncates to
    it. The answer 2,74 equals a gold 2.74, while a gold 10,20 is a list.
    """
    if gold == answer:
        return True
    if (',' in gold) != (',' in answer) and OPTIONS.fullmatch(gold) and OPTIONS.fullmatch(answer):
        one, other = re.findall('[A-J]', gold), re.findall('[A-J]', answer)
        return sorted(one) == sorted(other) == (other if ',' in gold else one)
    (letter, gold), (other, answer) = choice.split_option(gold), choice.split_option(answer)
    if letter or other:
        return _decide_options(letter, gold, other, answer)
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    if ':' in gold or ':' in answer or (gold_unit + answer_unit).endswith('m}'):
        times = minutes(gold, gold_unit), minutes(answer, answer_unit)
        if None not in times:
            return _same_time(*times)
    if gold_unit != answer_unit:
        quantities = [_quantity(*pair) for pair in ((gold, gold_unit), (answer, answer_unit))]
        if None not in quantities:
            return quantities[0] == quantities[1]
    if not same_units(gold_unit, answer_unit) or BASE.findall(gold) != BASE.findall(answer):
        return False
    if gold == answer:
        return True
    a, b = _number(gold), _number(answer)
    if a is not None and b is not None:
        return _same_fraction(a, b)
    if a is not None and COMMA.fullmatch(answer):
        return not answer.endswith('0') and a == Fraction(answer.replace(',', '.'))
    if b is not None and COMMA.fullmatch(gold):
        return gold.startswith(('0,0', '0,1')) and len(gold) > 4 and b == Fraction(gold.replace(',', '.'))
    if CLOCK.fullmatch(gold) and CLOCK.fullmatch(answer):
        return gold.lstrip('0') == answer.lstrip('0')
    if all(number is not None or NAME.fullmatch(text) for number, text in ((a, gold), (b, answer))):
        return gold.casefold() == answer.casefold()
    infinite = r'\infty' in gold and r'\infty' in answer
    if r'\emptyset' in (gold, answer) or (infinite and r'\infty' in (gold.strip('+-'), answer.strip('+-'))):
        return gold.removeprefix('+') == answer.removeprefix('+')
    gold, answer = (
        _bracketed(one) if other[:1] in ('(', '[') else one for one, other in ((gold, answer), (answer, gold))
    )
    verdict = _decide_parts(gold, answer)
    return _decide_forms(gold, answer, a, b) if verdict is None else verdict


def _quantity(value, unit):
    """units.measured of a value and its unit; the unit may be a letter at the end of the value. None without a unit."""
    if not unit and value[-1:].isalpha():
        value, unit = value[:-1], f'\\text{{{value[-1]}}}'
    return measured(_number(value), unit) if unit else None


def _decide_options(letter, gold, other, answer):
    """As decide, where a text is an option. letter, gold: the gold option, split; other, answer: the answer, split."""
    if letter and other:
        return letter == other and (
            not (gold and answer) or choice.LETTER.fullmatch(gold) is not None or decide(gold, answer)
        )
    if not (gold if letter else answer):
        return (letter or gold).casefold() == (other or answer).casefold()
    return decide(gold, answer)


def _same_time(time, other):
    """Whether two clock times, from units.minutes, are the same; one may lack am or pm."""
    (one, known), (two, other_known) = time, other
    return one == two or (known != other_known and (two if known else one) < 13 * 60 and one % 720 == two % 720)


def _decide_forms(gold, answer, a, b):
    """As decide, where one text is a number and the other is not, and where their statements differ; else None.

    a, b: the numbers of gold and answer; None for a text that is no number.
    """
    for number, text in ((a, answer), (b, gold)):
        if number is None:
            continue
        letter, equals, value = text.partition('=')
        if equals and LETTER.fullmatch(letter) and '=' not in value:
            return decide(str(number), value)
        chain = equals or r'\approx' in text
        if len(split_list(text)) > 1 or (chain and not re.search('[A-Za-z]', re.sub(r'\\[A-Za-z]+', '', text))):
            return False
        free = [name for name in re.findall('[A-Za-z]+', text) if name not in FUNCTIONS]
        if not equals and '\\' not in text and (free or not re.search('[0-9]', text)):
            return False
    return False if statement(gold) != statement(answer) else None


_number = functools.lru_cache(CACHED)(work_out)


def _decide_parts(gold, answer):
    """As decide, for two lists and for two texts in brackets, part by part; None for other texts."""
    if len(re.findall(r'[(\[]', gold)) > PARTS:
        return None
    golds, answers = split_list(gold), split_list(answer)
    bracketed = gold[:1] in ('(', '[') and gold[0] + gold[-1] == answer[:1] + answer[-1:]
    if not bracketed and SPAN.fullmatch(gold) and SPAN.fullmatch(answer):
        return False
    if len(golds) == len(answers) == 1 and bracketed:
        golds, answers = split_list(gold[1:-1]), split_list(answer[1:-1])
        if len(golds) == len(answers) > 1:
            verdicts = [decide(*pair) for pair in zip(golds, answers, strict=True)]
            return False if False in verdicts else None if None in verdicts else True
    elif 1 < len(golds) == len(answers) <= PARTS:
        verdicts = [[decide(part, other) for other in answers] for part in golds]
        sure, possible = (
            [[verdict in accepted for verdict in row] for row in verdicts] for accepted in ((True,), (True, None))
        )
        return True if _pair_up(sure) else None if _pair_up(possible) else False
    return None


def _bracketed(text):
    r"""A text in brackets: (1,3] for `1 < x \le 3`, joined by unions for several; (4,3) for `y = 3, x = 4`.

    The letters of such a point must follow each other in the alphabet. Any other text is unchanged.
    """
    assigned = sorted(match.groups() for part in split_list(text) if (match := ASSIGNED.fullmatch(part)))
    letters = ''.join(letter for letter, _ in assigned)
    if 1 < len(letters) == len(split_list(text)) and letters in ascii_lowercase:
        return f'({",".join(value for _, value in assigned)})'
    intervals = []
    inequalities = SET_OF.sub('', text, count=1) if SET_OF.match(text) else text
    for part in split_list(inequalities):
        match = INEQUALITY.fullmatch(part)
        if not match:
            return text
        first, sign, middle, behind, last = (group or '' for group in match.groups())
        if not first and LETTER.fullmatch(last):  # 3 > x
            first, sign, middle, behind, last = middle, behind, last, '', ''
        lower, upper = r'(-\infty', r'\infty)'
        for end, mark, is_left in ((first, sign, True), (last, behind, False)):
            rising, closed = '<' in mark or 'l' in mark, 'e' in mark
            if mark and rising == is_left:
                lower = ('[' if closed else '(') + end
            elif mark:
                upper = end + (']' if closed else ')')
        one_way = not (sign and behind) or ('<' in sign or 'l' in sign) == ('<' in behind or 'l' in behind)
        if not LETTER.fullmatch(middle) or not one_way:
            return text
        intervals.append(f'{lower},{upper}')
    return r'\cup'.join(intervals)


def _pair_up(allowed):
    """Whether each row can have a column of its own. allowed[row][column]: bool, whether the two may be paired."""
    return -1 not in maximum_bipartite_matching(csr_array(np.array(allowed, np.int8)))


def _same_fraction(a, b):
    """Whether two Fractions are equal, or one has endless decimals and the other is its rounded value (see _rounds)."""
    return a == b or ((_places(a) is None or _places(b) is None) and (_rounds(a, b) or _rounds(b, a)))


def _rounds(decimal, number):
    """Whether the Fraction `decimal` has SIGNIFICANT digits or more and is `number`, rounded or truncated."""
    places = _places(decimal)
    if not places or abs(decimal) * 10**places < 10 ** (SIGNIFICANT - 1):
        return False
    error = (number - decimal) * 10**places * (1 if decimal > 0 else -1)  # in units of the last decimal
    return Fraction(-1, 2) <= error < 1


def _places(number):
    """How many decimals a Fraction has; None if they are endless."""
    factor, fives = number.denominator, 0
    twos = (factor & -factor).bit_length() - 1
    factor >>= twos
    while factor % 5 == 0:
        factor, fives = factor // 5, fives + 1
    return max(twos, fives) if factor == 1 else None


def are_equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify finds two canonical texts equal, with exact numbers. Call it in a worker: it may hang.

    y = 5 equals 5, since the problem names the letter; x = 5 does not equal y = 5. A text that math-verify cannot read
    equals nothing.
    """
    math_verify, reading = _math_verify()
    parsed = [
        math_verify.parse(
            f'${_write_fractions(split_unit(text)[0])}$', reading, fallback_mode='no_fallback', parsing_timeout=None
        )
        for text in (gold, answer)
    ]
    return math_verify.verify(
        *([_with_imaginary_unit(item) for item in items] for items in parsed), timeout_seconds=None
    )


def _with_imaginary_unit(item):
    """A number or matrix of sympy with the imaginary unit in place of the letter i; any other item unchanged."""
    import sympy

    if not isinstance(item, (sympy.Expr, sympy.MatrixBase)):
        return item
    return item.subs({letter: sympy.I for letter in item.free_symbols if str(letter) == 'i'})


@functools.cache
def _math_verify():
    """(the module math_verify, its configs for reading a text). Only workers import it, once each.

    The import takes a second. Options are those of math-verify's authors, but units are off, since decide compares
    units. math_verify has no option for exact numbers, so its function that compares numbers is replaced;
    pyproject.toml limits the version for that.
    """
    from latex2sympy2_extended import NormalizationConfig
    import math_verify
    from math_verify import grader

    logging.getLogger('math_verify').setLevel(logging.ERROR)  # no warning that its timeouts are off: the pool has one
    grader.sympy_numeric_eq = _same_number
    reading = NormalizationConfig(units=False, malformed_operators=True, nits=False, boxed='none')
    return math_verify, [math_verify.LatexExtractionConfig(boxed_match_priority=-1, normalization_config=reading)]


def _write_fractions(text):
    """The text with each decimal as a fraction, since math-verify would round decimals, and \\sin for sin."""

    def spelled(match):
        above, below = Fraction(match[0]).as_integer_ratio()
        return f'\\frac{{{above}}}{{{below}}}'

    return re.sub(r'[0-9]*\.[0-9]+', spelled, PLAIN_FUNCTION.sub(r'\\\1', text))


def _same_number(a, b, *_):
    """Whether two sympy values are the same number: exactly, or for irrational ones to PRECISION - 10 digits.

    Replaces math-verify's comparison, which rounds to a number of decimals and takes both 1/2**99 and 1/2**98 for 0.
    """
    import sympy

    a, b = a.doit(), b.doit()
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(_same_number(x, y) for x, y in zip(a.flat(), b.flat(), strict=True))
    if a == b:
        return True
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) and a.is_number and b.is_number):
        return False
    if a.is_Rational and b.is_Rational:
        return _same_fraction(_fraction(a), _fraction(b))
    x, y = sympy.N(a, PRECISION), sympy.N(b, PRECISION)
    if abs(x - y) < max(abs(x), abs(y)) * sympy.Rational(10) ** (10 - PRECISION):
        return True
    return any(
        decimal.is_Rational and number.is_Float and _rounds(_fraction(decimal), _fraction(number))
        for decimal, number in ((a, y), (b, x))
    )


def _fraction(number):
    """A sympy Rational or Float as a Fraction."""
    import sympy

    return Fraction(*map(int, sympy.Rational(number).as_numer_denom()))
