"""Replaces English words for numbers by digits and signs: `negative 3`, `two and a half`, `no solution`."""

from fractions import Fraction
import re

SMALL = (
    'zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen '
    'eighteen nineteen'
).split()
TENS = 'twenty thirty forty fifty sixty seventy eighty ninety'.split()
NUMBERS: dict[str, int] = {**{w: i for i, w in enumerate(SMALL)}, **{w: 10 * i for i, w in enumerate(TENS, 2)}}
POWERS = {'hundred': 10**2, 'thousand': 10**3, 'million': 10**6, 'billion': 10**9, 'dozen': 12}
PARTS = {
    name + plural: below
    for below, name in enumerate('half third quarter fifth sixth seventh eighth ninth tenth'.split(), 2)
    for plural in ('', 's')
} | {'halves': 2, 'fourth': 4, 'fourths': 4}

NEGATIVE = re.compile(
    r'(?<![0-9)}$] )(?<!\b[A-Za-z] )'
    r'(?:\\text\s*\{\s*(?:negative|minus)\s*\}\s*|\b(?:negative|minus)\s+)(?=\\?\$?\\?[0-9.]|\\d?frac)'
)
HALF = re.compile(rf'\b([0-9]+)(?:\\text\{{)? and (?:an? |one[ -])({"|".join(PARTS)})\b\}}?')
BASE = re.compile(
    rf'(?<=[0-9])\)?\s*(?:\\text\w*\s*\{{)?\s*[,(]*\s*(?:in )?base[- ]([0-9]+|{"|".join(SMALL[2:17])})\b\)?\}}?'
)
POINT = re.compile(r'\\dot\s*([0-9])')
POINTED = re.compile(r'\\dot\s*\{([0-9])\}(?:([0-9]*)\\dot\s*\{([0-9])\})?|\\bar\s*\{([0-9]+)\}')
BRACKETED = re.compile(r'([-+]?[0-9]*\.[0-9]*)\(([0-9]+)\)')  # the period in brackets
# a decimal that ends in dots after the same digits, twice or more
ENDLESS = re.compile(
    r'([0-9]*\.[0-9]{0,6}?)(([0-9]{1,6}?)\3+)\s?(?:\.{3}|\u2026|\\l?dots(?![A-Za-z])|\\cdots)[0-9]?(?![0-9])'
)
EMPTY = re.compile(
    r'(?i:(?:there (?:is|are|exists?) )?no (?:(?:real|integer|such|valid|possible) )*'
    r'(?:solutions?|roots?|values?)(?: of [a-z])?(?: exists?)?|(?:the )?(?:empty|null) set)'
)
# words that take an answer back; the answer is what follows them
CORRECTION = re.compile(
    r'(?i:\b(?:no|nope|oops|sorry|scratch that|actually|correction)[,:!.;]|'
    r"(?<!nothing )\b(?:that|this|it|which|answer|i)(?:'s| is| was| am|'m)? (?:\w+ )?"
    r'(?:wrong|incorrect|mistaken|not (?:right|correct|true))\b|\bi (?:have |had )?made an? (?:mistake|error)|'
    '不[对對]|[错錯]了|違いま|間違[えいっ]|아니[,다요]|틀[렸린]|неверно|ошиб|нет[,.:!]|गलत|خطأ)'
)
NO_SOLUTION = re.compile(rf'\b{EMPTY.pattern}$')  # at the end of a line
LEADING = re.compile(r'[\s$*.]*(?:\\text\w*\s*\{)?\s*([A-Za-z][A-Za-z -]*?)[\s.}$*!]*')
STATING = re.compile(r'.*\b(?:is|are|was|were|has|have|gets?|makes?|needs?|gives?|equals) (?:exactly |only |now )?')
FIRST = {*NUMBERS, *POWERS, *PARTS, 'a', 'negative', 'minus'}
LONGEST_LINE = 300  # characters of a line in which a number in words is looked for
NO_UNITS = frozenset('and of or to in on at is are was more less than half plus minus times way thing'.split())


def write_signs(text: str) -> str:
    """The text with signs for words around numbers: -3 for `negative 3`, a bar for `0.333...`; number words stay."""
    if 'negative' in text or 'minus' in text:
        text = NEGATIVE.sub('-', text)
    if ' and ' in text:
        text = HALF.sub(lambda match: f'{match[1]} 1/{PARTS[match[2]]}', text)
    if r'\dot' in text or r'\bar' in text:
        text = POINTED.sub(_write_bar, POINT.sub(r'\\dot{\1}', text))
    if '..' in text or 'dots' in text or '\u2026' in text:
        text = ENDLESS.sub(_write_period, text)
    bracketed = BRACKETED.fullmatch(text)
    return f'{bracketed[1]}\\overline{{{bracketed[2]}}}' if bracketed else text


def write_bases(text: str) -> str:
    """The text with bases as subscripts: 1011_{2} for `1011 in base 2`."""
    if 'base' not in text:
        return text
    return BASE.sub(lambda match: f'_{{{match[1] if match[1].isdigit() else NUMBERS[match[1]]}}}', text)


def _write_bar(match):
    """The digits that a match of POINTED marks as a period, under one bar."""
    first, between, last, bar = match.groups()
    return f'\\overline{{{bar or first + (between or "") + (last or "")}}}'


def _write_period(match):
    """A match of ENDLESS with a bar over its period; unchanged where fewer digits repeat than stand before them."""
    before, repeated, period = match.groups()
    short = len(repeated) < len(before.partition('.')[2])
    return match[0] if short else f'{before}\\overline{{{period}}}'


def read_words(text: str) -> str | None:
    """A text of number words, and perhaps a unit, with the number in digits; None for any other text."""
    match = LEADING.fullmatch(text)
    words = match[1].lower().replace('-', ' ').split() if match and len(match[1]) < LONGEST_LINE else []
    if not words or words[0] not in FIRST:
        return None
    sign = '-' if words[0] in ('negative', 'minus') else ''
    unit = words.pop() if words[-1] not in FIRST | NO_UNITS else ''
    number = _number(' '.join(words[bool(sign) :]))
    return None if number is None else f'{sign}{number} {unit}'.strip()


def _number(text):
    """The number of words like `one hundred and five`, `two and a half` and `three quarters`; None for others."""
    head, _, last = text.rpartition(' ')
    if last not in PARTS:
        return _cardinal(text)
    whole, joined, above = head.rpartition(' and ')
    parts = Fraction(1 if above in ('', 'a', 'an') else _cardinal(above) or 0, PARTS[last])
    whole = _cardinal(whole) if joined else 0
    return None if whole is None or not parts else whole + parts


def _cardinal(text):
    """The whole number of words like `two hundred and five`; None for others."""
    total = part = 0
    tens = True  # whether a word below a hundred may follow
    for word in text.removeprefix('a ').replace(' and ', ' ').split():
        if word in POWERS:
            total, part = (total, part or 1) if word == 'hundred' else (total + (part or 1) * POWERS[word], 0)
            part, tens = part * 100 if word == 'hundred' else part, True
        elif word in NUMBERS and (tens or (part % 100 in range(20, 100, 10) and 0 < NUMBERS[word] < 10)):
            part, tens = part + NUMBERS[word], False
        else:
            return None
    return total + part if text and text != 'a' else None


def read_statement(line: str) -> str | None:
    r"""The number, in digits, of a line that is number words or ends with them after a verb; None for other lines.

    line: without digits. A line which says that there is no solution gives \emptyset.
    """
    line = line.strip(' \t*_.!$')
    if len(line) > LONGEST_LINE:
        return None
    stating = STATING.match(line)
    behind = line[stating.end() :] if stating else line
    if NO_SOLUTION.search(line):
        return r'\emptyset'
    number = read_words(line)
    if number is None and behind != line and not behind.lower().startswith(('one', 'a ')):
        number = read_words(behind)
    return number
