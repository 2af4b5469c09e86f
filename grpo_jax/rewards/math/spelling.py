"""Brings answers into canonical form, in which equal numbers have one spelling.

All functions are linear in the length of a text.
"""

from fractions import Fraction
import functools
import re

from grpo_jax.rewards.math import choice, scripts, words
from grpo_jax.rewards.math.numbers import fraction, work_out
from grpo_jax.rewards.math.units import COMPOUND, PERCENT, SPACE, add_units, sign_of, split_unit

LONGEST = 1000  # characters of an answer; longer text is noise
CACHED = 4096  # texts whose spelling is remembered, since each is looked up several times
LAYERS = 8  # the most brackets around an answer that are removed

CHARACTERS = str.maketrans(
    {chr(code): ' ' for code in (*range(32), 127, 0xA0, 0x2009, 0x202F)}
    | {
        '\b': r'\b',
        '\f': r'\f',  # as '\b': \boxed and \frac whose backslash was read as an escape
        '\u2013': '-',
        '\xd7': r'\times ',
        '·': r'\cdot ',
        '÷': '/',
        'π': r'\pi ',
        '∞': r'\infty ',
        '≤': r'\le ',
        '≥': r'\ge ',
        '≠': r'\ne ',
        '\u222a': r'\cup ',
        '∩': r'\cap ',
        '\u2208': r'\in ',
        '±': r'\pm ',
        '√': r'\sqrt ',
        '∅': r'\emptyset ',
        '≈': r'\approx ',
        '°': r'^\circ ',
    }
)
# (pattern, replacement, whether the pattern can match only in a text with a backslash)
SPELLINGS = [
    (re.compile(pattern), replacement, pattern.startswith(r'\\') and pattern[2] != '?')
    for pattern, replacement in [
        (r'\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|boxed|fbox|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])', ''),
        (r'\\(?:math[a-z]+|boldsymbol|bm)(?=\s*\{\s*[^A-Za-z\s])|\\(?:text)?color\s*\{[^{}]*\}', ''),
        (r'^ ?\](?=[^\[\]]+,[^\[\]]+[\[\]] ?$)|\\langle ?', '('),
        (r'(?<=.)\[ ?$|\\rangle', ')'),
        (r'€ ?([0-9]+),([0-9]{2})(?![0-9,])', r'\1.\2'),
        (r'\^([-0-9])\^([0-9])', r'^{\1\2}'),
        (r'(\\(?:sin|cos|tan)\s*[({]?\s*)([0-9]+)\s*\^\s*\{?\s*\\circ\s*\}?', r'\1\\frac{\2\\pi}{180}'),
        (r'\\[hv]?phantom(?![A-Za-z])\s*(?:\{[^{}]*\})?', ''),
        (r'\\!\s*', ''),
        (r'\{\s*,\s*\}', ','),
        (r'(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~', ' '),
        (r'(?<!\\)\\[()\[\]]', ''),
        # signs of money, percent and degrees: the problem names them
        (r'\\?[$%]|[€£¥]|\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])', ''),
        (r'\\(?:mbox|textnormal|textbf|textrm|textit|mathrm|mathbf|mathit)(?![A-Za-z])', r'\\text'),
        (r'\\text\s*\{([ei])\}', r'\1'),  # the constants
        (r',?\s*(?:\\text\s*\{[\s,]*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![a-z]))\s*', ', '),
        (r'(?<=[0-9])\s*[xX]\s*(?=[0-9])', r'\\times '),
        (r'(?<=[0-9])\s*(?:\\text\s*\{\s*(?:remainder|[rR])\s*\}|remainder(?: of)?|[rR])\s*(?=[0-9])', r'\\text{R}'),
        (r'\\[dtc]frac(?![A-Za-z])', r'\\frac'),
        (r'\\frac\s*([0-9])', r'\\frac{\1}'),
        (r'(\\frac\s*\{[^{}]*\})\s*([0-9])', r'\1{\2}'),
        (r'\\sqrt\s*([0-9])', r'\\sqrt{\1}'),
        (r'\(([0-9]+)\)_', r'\1_'),
        (r'(?<![A-Za-z\\])pi(?![A-Za-z])', r'\\pi '),
        (r'\\varnothing(?![A-Za-z])|\\\{\s*\\\}', r'\\emptyset'),
        (r'\\(l|g|n)eq(?![A-Za-z])', r'\\\1e'),
        (r'_\s*\{?\s*\\text\s*\{\s*([a-z]+)\s*\}\s*\}?', lambda match: f'_{{{words.NUMBERS.get(match[1], match[1])}}}'),
        (r'(?<=[0-9])_\s*\{?\s*([0-9]+)\s*\}?', lambda match: '' if match[1] == '10' else f'_{{{match[1]}}}'),
    ]
]
SIMPLE = re.compile(r'[0-9]{1,15}')
ENDS = ' ,;:*`"\''
COLUMN = re.compile(r'\\begin\{([pb]?matrix)\}([^&]*\\\\[^&]*)\\end\{\1\}')
STRAY = re.compile(r'^[^=]*(?<=\s)\\\$\s*=')  # a formula that ends in an escaped dollar, before an equals sign
COMMAND = re.compile(r'\\[A-Za-z]+')
NAMED = re.compile(r'\\text\s*\{[^{}]*\}|[A-Za-z][a-z]{2,}(?: [A-Za-z]+)*')  # a name in words, as in Area = 5
OPTION = re.compile(r'[\s*$]*(?:\\text\w*\s*\{\s*)?(?:(?i:option|choice)\b|[(\[]?[A-Ja-h][)\].:])')  # an option begins
# 1.234,56 and 1.234.567 and 1 234,5 and 1'234.5
EUROPEAN = re.compile(
    r"(?<![0-9.,'])[0-9]{1,3}(?:(?:\.[0-9]{3})+,[0-9]+|(?:\.[0-9]{3}){2,}|(?: [0-9]{3})+,[0-9]{1,2}|"
    r"(?:'[0-9]{3})+(?:\.[0-9]+)?)(?![0-9.,'])"
)
ROUNDED = re.compile(r'[-+]?[0-9 ,]*\.([0-9]+)')


def canonicalize(text: str) -> str | None:
    """The text in canonical form, with a number as 'p' or 'p/q' in lowest terms and a unit as split_unit spells it.

    None for a text of more than LONGEST characters, and where no letter or digit is left.
    """
    return None if len(text) > LONGEST else _canonicalize(text)


@functools.lru_cache(CACHED)
def _canonicalize(text):
    """canonicalize, cached, for a text of at most LONGEST characters."""
    if SIMPLE.fullmatch(text):
        return str(int(text))
    text = words.read_words(text) or scripts.read_value(scripts.translate(text))
    option = choice.read_option(text, canonicalize) if OPTION.match(text) else None
    if option:
        return option
    spelled = respell(STRAY.sub('=', text))
    if spelled is None:
        return None
    if words.EMPTY.fullmatch(_unwrap(spelled)):
        return r'\emptyset'
    spelled = EUROPEAN.sub(_write_decimal, spelled)
    value, unit = split_unit(_unwrap(_result(spelled, PERCENT.search(text) is not None)))
    column = COLUMN.fullmatch(value)
    if column:
        value = f'({",".join(row.strip() for row in column[2].split(chr(92) * 2) if row.strip())})'
    value = _unwrap(SPACE.sub('', value))
    if value[:1] in ('(', '['):
        value = value.replace(', ', ',')
    number = fraction(value)
    if number is None:
        return value + unit or None
    return str(number) + (sign_of(text, number) or unit)


def _write_decimal(match):
    """A match of EUROPEAN with a point before its decimals, and no other separator."""
    if "'" in match[0]:
        return match[0].replace("'", '')
    return match[0].replace('.', '').replace(' ', '').replace(',', '.')


def respell(text: str) -> str | None:
    """The text with one spelling for each sign and command; None without letters and digits, or if over LONGEST."""
    return None if len(text) > LONGEST else _respell(text)


@functools.lru_cache(CACHED)
def _respell(text):
    """respell, cached, for a text of at most LONGEST characters."""
    text = COMPOUND.sub(add_units, words.write_signs(scripts.translate(text)))
    text = ' '.join(text.translate(CHARACTERS).split())
    if r'\begin' not in text:
        text = re.sub(r'\\\\(?=[A-Za-z,!{}])', r'\\', text)  # escaped twice
    commands = '\\' in text
    for pattern, replacement, is_command in SPELLINGS:
        if commands or not is_command:
            text = pattern.sub(replacement, text)
    text = re.sub(' +', ' ', text).strip(ENDS).rstrip(ENDS + '.\\')
    return text if any(mark.isalnum() for mark in text) else None


def _unwrap(text):
    r"""The text without brackets or \text that enclose all of it; the brackets of a tuple stay."""
    for _ in range(LAYERS):
        enclosed = re.fullmatch(r'\\text\s*\{([^{}]*)\}', text)
        if enclosed:
            text = enclosed[1].strip(' .')
        elif text.startswith(r'\{') and text.endswith(r'\}') and _closing_index(text, 1) == len(text) - 1:
            text = text[2:-2].strip()
        elif (
            text[:1] in ('{', '(')
            and _closing_index(text, 0) == len(text) - 1
            and (text[0] == '{' or len(split_list(text[1:-1])) == 1)
        ):
            text = text[1:-1].strip()
        else:
            break
    return text


def _result(text, percent):
    r"""The last side of an equation, which states its result; any other text, and an untrue equation, unchanged.

    5 for `2 + 3 = 5`, `= 5` and `Area = 5`; 2/3 for `2/3 \approx 0.67`; `x = 5` is unchanged.
    percent: whether the answer has a percent sign.
    """
    before, about, after = text.partition(r'\approx')
    if about and _is_untrue([before.strip(ENDS), after.strip(ENDS)], percent):
        return text
    if about:
        text = before if re.search('[0-9]', before) else f'{before}={after}'
    sides = [side.strip(ENDS) for side in re.split(r'(?<![<>!:])=', text)]
    if len(sides) > 1 and len(split_list(text)) == 1:
        letters = re.search('[A-Za-z]', COMMAND.sub('', sides[0] + split_unit(sides[-1])[0]))
        if not sides[0] or NAMED.fullmatch(sides[0]) or not (letters or _is_untrue(sides, percent)):
            text = sides[-1]
    return text.strip(ENDS)


def _is_untrue(sides, percent):
    """Whether a chain of equations is wrong: the number of a side differs from the last by more than rounding.

    sides: their texts; percent: whether a factor of 100 is no fault, since the answer has a percent sign.
    """
    numbers = [
        (number, ROUNDED.fullmatch(side))
        for side in sides
        if (number := work_out(SPACE.sub('', split_unit(side)[0]))) is not None
    ]
    for number, rounded in numbers[:-1]:
        last, last_rounded = numbers[-1]
        places = [len(match[1]) for match in (rounded, last_rounded) if match]
        near = places and abs(number - last) < Fraction(1, 10 ** min(places))
        if number != last and not near and not (percent and number in (100 * last, last / 100)):
            return True
    return False


def split_list(text: str) -> list[str]:
    """The text, split at each comma and semicolon that stands outside all brackets."""
    items, start, depth = [], 0, 0
    for i, mark in enumerate(text):
        depth += (mark in '([{') - (mark in ')]}')
        if mark in ',;' and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    return [*items, text[start:].strip()]


def _closing_index(text, start):
    """The index of the bracket that closes the bracket at `start`; None if nothing closes it.

    The two may be of different kinds: in '(0, 1]', the ']' closes the '('.
    """
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in '([{') - (text[i] in ')]}')
        if depth == 0:
            return i
    return None
