"""Answers as text: where a completion states one, and one spelling for those that are the same number.

All functions are linear in the length of a completion, and read a bounded number of its characters.
"""

from fractions import Fraction
import re

TAIL = 20_000  # characters at the end of a completion that are looked at
LONGEST = 1000  # characters of an answer; longer text is noise
LAYERS = 8  # of brackets around an answer that are taken off

BRACES = re.compile(r'(\\{1,4}(?:boxed|fbox)\s*)?\{|\\.|\}', re.DOTALL)
DECORATION = re.compile(r'\\(?:q?quad|text)(?![A-Za-z])|\\[()\[\],;: ]|[${}]')
# what may stand between boxes that are one list
JOINED = re.compile(r'(?:[^.\n]*(?:,|;|\band\b|\bor\b)\s*)? *(?:[A-Za-z]\w* *=)? *|[^A-Za-z0-9\n]{0,9}')
MARK = re.compile(r'(?i:\banswers?[\s*]*(?:\b(?:is|are)\b|:)[\s*:]*)')
SENTENCE = re.compile(r'\n|[.!?](?=\s|$)|<\|')
# an end of a formula, or a number with the digits and signs written together with it
PIECE = re.compile(r'(?<!\\)(?:\$\$?|\\[()\[\]])|((?<![\w.,/^{\\)])[-+]?\.?[0-9][0-9.,/]*)')
BETWEEN = re.compile(r'\s*,?\s*(?:and|or)?\s*')
WORD = re.compile(
    r'(?<![A-Za-z])(?!and(?![a-z]))'
    r'(?:[A-Za-z][a-z]{2,}|(?i:is|of|to|in|at|on|by|so|we|he|it)(?![a-z])|a (?=[a-z]))'
)
NO_WORD = re.compile(r'\\(?:text\w*|mbox|mathrm|begin|end)\s*\{[^{}]*\}(?:\{[lcr]*\})?|[\\\b\f][A-Za-z]+')

CHARACTERS = str.maketrans(
    {chr(code): ' ' for code in (*range(32), 127, 0xA0, 0x2009, 0x202F, 0x3000)}
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | {
        '\b': r'\b',
        '\f': r'\f',  # of \boxed and \frac whose backslash was read as an escape
        '\u2212': '-',
        '\u2013': '-',
        '\uff0c': ',',
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
        '²': '^2',
        '³': '^3',
        '½': r'\frac{1}{2}',
        '¼': r'\frac{1}{4}',
        '¾': r'\frac{3}{4}',
        '°': '',
        '€': '',
        '£': '',
        '¥': '',
    }
)
BASES = {
    name: base
    for base, name in enumerate(
        'two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen'.split(), 2
    )
}
SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r'\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|boxed|fbox)(?![A-Za-z])', ''),
        (r'\\[hv]?phantom(?![A-Za-z])\s*(?:\{[^{}]*\})?', ''),
        (r'\\!\s*', ''),
        (r'\{\s*,\s*\}', ','),
        (r'(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~', ' '),
        (r'(?<!\\)\\[()\[\]]', ''),
        # signs of money, percent and degrees, which the problem names
        (r'\\?[$%]|\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])', ''),
        (r'\\(?:mbox|textnormal|textbf|textrm|textit|mathrm|mathbf|mathit)(?![A-Za-z])', r'\\text'),
        (r'\\text\s*\{([ei])\}', r'\1'),  # the constants
        (r',?\s*(?:\\text\s*\{[\s,]*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![a-z]))\s*', ', '),
        (r'\\[dtc]frac(?![A-Za-z])', r'\\frac'),
        (r'\\frac\s*([0-9])', r'\\frac{\1}'),
        (r'(\\frac\s*\{[^{}]*\})\s*([0-9])', r'\1{\2}'),
        (r'\\sqrt\s*([0-9])', r'\\sqrt{\1}'),
        (r'(?<![A-Za-z\\])pi(?![A-Za-z])', r'\\pi '),
        (r'\\varnothing(?![A-Za-z])', r'\\emptyset'),
        (r'\\(l|g|n)eq(?![A-Za-z])', r'\\\1e'),
        (r'_\s*\{?\s*\\text\s*\{\s*([a-z]+)\s*\}\s*\}?', lambda match: f'_{{{BASES.get(match[1], match[1])}}}'),
        (r'(?<=[0-9])_\s*\{?\s*([0-9]+)\s*\}?', lambda match: '' if match[1] == '10' else f'_{{{match[1]}}}'),
    ]
]
# spaces but those within words or numbers, and after commas of a list, where 1, 234 is not 1,234
SPACE = re.compile(r'(?<![0-9A-Za-z,]) | (?![0-9A-Za-z.\\(-])|(?<=[A-Za-z]) (?=[^A-Za-z])|(?<=[0-9]) (?=[^0-9])')
ENDS = ' ,;:*`"\''
COLUMN = re.compile(r'\\begin\{([pb]?matrix)\}([^&]*\\\\[^&]*)\\end\{\1\}')

WHOLE = r'[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|(?=\.[0-9\\])'
DECIMAL = re.compile(
    rf'([-+]?)({WHOLE})(?:\.([0-9]*)(?:\\overline\{{?([0-9]+)\}}?)?)?'
    r'(?:(?:[eE]|(?:\\times|\\cdot|\*)10\^)\{?([-+]?[0-9]{1,3})\}?)?'
)
FRACTION = re.compile(r'([-+]?)(?:([0-9]+)?\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|(?:([0-9]+) )?([0-9]+)/([0-9]+))')

# spelling without the plural's s -> ours, or '' where the problem names the unit
UNITS = {
    spelling: spellings.split()[0]
    for spellings in (
        'mm millimeter millimetre',
        'cm centimeter centimetre',
        'm meter metre',
        'km kilometer kilometre',
        'in inch inche',
        'ft foot feet',
        'yd yard',
        'mi mile',
        'mg milligram',
        'g gm gram',
        'kg kilogram',
        'lb pound',
        'oz ounce',
        's sec second',
        'min minute',
        'h hr hour',
        'day',
        'week',
        'month',
        'yr year',
        'ml milliliter millilitre',
        'l liter litre',
        'gal gallon',
        'acre',
        'am',
        'pm',
        'cent',
        'dollar usd',
        'euro',
    )
    for spelling in spellings.split()
}
UNITS |= {'mph': 'mi h', 'kmh': 'km h', 'kph': 'km h'}
UNITS |= dict.fromkeys(['unit', 'percent', 'percentage', 'pct', 'degree'], '')
FUNCTIONS = ('sqrt', 'infinity')
POWERS = {'square': '2', 'sq': '2', 'squared': '2', 'cubic': '3', 'cu': '3', 'cubed': '3'}
UNIT = re.compile(r'(\s*)(?:\\text\s*\{([^{}]*)\}|(?<![A-Za-z\\])([A-Za-z][A-Za-z. ]+))\s*(?:\^\s*\{?([0-9])\}?)?$')


def strict(completion: str) -> str | None:
    """The canonical text of the last boxed answer, else of the answer after the last ####; None without."""
    return _first(completion, (_boxed, _after_hashes))


def lenient(completion: str) -> str | None:
    """strict, else of what is in <answer> tags, follows 'the answer is', or is the last number or formula."""
    return _first(completion, (_boxed, _after_hashes, _tagged, _marked, _last))


def gold(answer: str) -> str | None:
    """The canonical text of a data set's answer, which may be a whole solution; None without."""
    return _first(answer, (_boxed, _after_hashes, _tagged, _marked)) or canonical(answer) or lenient(answer)


def _first(completion, places):
    tail = completion[-TAIL:]
    return next(filter(None, (canonical(place(tail)) for place in places)), None)


def _boxed(text):
    """What the last box holds, or the last boxes that are one list; ''."""
    opened, boxes = [], []
    for match in BRACES.finditer(text):
        if match[0].endswith('{') and match[0] != r'\{':
            opened.append(match)
        elif match[0] == '}' and opened:
            start = opened.pop()
            if start[1]:
                while boxes and boxes[-1][0] > start.start():
                    boxes.pop()  # inside of this one
                boxes.append((start.start(), match.end(), text[start.end() : match.start()].strip()))
    joined = boxes[-1:]
    for box in reversed(boxes[:-1]):
        between = text[box[1] : joined[0][0]]
        if len(between) > 40 or not JOINED.fullmatch(DECORATION.sub('', between)):
            break
        joined.insert(0, box)
    values = [value for _, _, value in joined]
    # the boxes may be one answer in two spellings
    return ', '.join(dict.fromkeys(canonical(value) or '' for value in values) if len(values) > 1 else values)


def _after_hashes(text):
    """The line after the last ####, or the number it begins with; '' for a heading, which other lines follow."""
    _, mark, rest = text.rpartition('####')
    line, _, more = rest.strip().partition('\n') if mark else ('', '', '')
    if more:
        return '' if _word(line) else line
    number = PIECE.match(line.lstrip('$* '))
    return line if _bare(line) else (number and number[1]) or ''


def _tagged(text):
    """The answer in the last <answer> tags; ''."""
    head, close, _ = text.rpartition('</answer>')
    _, opening, inner = head.rpartition('<answer>')
    return _last(inner) if opening and close else ''


def _marked(text):
    """The answer in the sentence, or the formula, after the last 'answer is' or 'answer:'; ''."""
    marks = list(MARK.finditer(text))
    if not marks:
        return ''
    text = text[marks[-1].end() :]
    if text.startswith(('$', r'\(', r'\[')):
        return next(iter(_values(text)), '')
    return _last(SENTENCE.split(text, maxsplit=1)[0])


def _last(text):
    """The last line if it is nothing but an answer, else the last formula or number, with a digit if any has; ''."""
    line = text.rstrip().rpartition('\n')[2].strip(' *#>')
    if _bare(line):
        return line
    values = _values(text)
    return next((value for value in reversed(values) if re.search('[0-9]', value)), values[-1] if values else '')


def _bare(line):
    """Whether a line is an answer without prose: no word, or one at its end (a unit, or all there is)."""
    if len(line) > LONGEST or not re.search('[0-9A-Za-z]', line):
        return False
    word = _word(line)
    return not word or line.rstrip(' .*$').endswith(word)


def _word(text):
    """The first word of prose in a text; None without one."""
    match = WORD.search(NO_WORD.sub(' ', text))
    return match and match[0]


def _values(text):
    """The formulas of a text, and the numbers outside them, in their order; neighbouring formulas as one list."""
    pieces, opened = [], None  # pieces: (start, end, value, whether it is a formula)
    for match in PIECE.finditer(text):
        if match[1]:
            pieces.append((match.start(), match.end(), match[1].rstrip('.,/'), False))
            continue
        value = text[opened.end() : match.start()] if opened else ''
        if opened is None or not 0 < len(value.strip()) <= LONGEST or _word(value):
            opened = match  # the last sign opened no formula: it may be one of money
            continue
        start, opened = opened.start(), None
        while pieces and pieces[-1][0] >= start:
            pieces.pop()  # inside of it
        if pieces and pieces[-1][3] and start - pieces[-1][1] < 10 and BETWEEN.fullmatch(text, pieces[-1][1], start):
            start, _, before, _ = pieces.pop()
            value = f'{before}, {value}'
        pieces.append((start, match.end(), value, True))
    return [value for _, _, value, _ in pieces]


def canonical(text: str) -> str | None:
    """The text in one spelling, numbers as 'p' or 'p/q' in lowest terms; None if nothing or too much is left of it."""
    if len(text) > LONGEST:
        return None
    text = ' '.join(text.translate(CHARACTERS).split())
    if r'\begin' not in text:
        text = re.sub(r'\\\\(?=[A-Za-z,!{}])', r'\\', text)  # escaped twice
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    text = re.sub(' +', ' ', text).strip(ENDS).rstrip(ENDS + '.')
    if not any(mark.isalnum() for mark in text):
        return None
    value, unit = split_unit(_unwrapped(_result(text)))
    column = COLUMN.fullmatch(value)
    if column:
        value = f'({",".join(row.strip() for row in column[2].split(chr(92) * 2) if row.strip())})'
    value = _unwrapped(SPACE.sub('', value))
    if value[:1] in ('(', '['):
        value = value.replace(', ', ',')
    number = fraction(value)
    return (value if number is None else str(number)) + unit or None


def _unwrapped(text):
    r"""The text without brackets or \text around all of it; brackets of a tuple stay."""
    for _ in range(LAYERS):
        whole = re.fullmatch(r'\\text\s*\{([^{}]*)\}', text)
        if whole:
            text = whole[1].strip(' .')
        elif text.startswith(r'\{') and text.endswith(r'\}') and _closing(text, 1) == len(text) - 1:
            text = text[2:-2].strip()
        elif (
            text[:1] in ('{', '(')
            and _closing(text, 0) == len(text) - 1
            and (text[0] == '{' or len(split_list(text[1:-1])) == 1)
        ):
            text = text[1:-1].strip()
        else:
            break
    return text


def _result(text):
    r"""5 of 2 + 3 = 5 and of = 5, and 2/3 of 2/3 \approx 0.67; equations with letters stay."""
    before, about, after = text.partition(r'\approx')
    if about:
        text = before if re.search('[0-9]', before) else f'{before}={after}'
    sides = re.split(r'(?<![<>!:])=', text)
    letters = re.search('[A-Za-z]', re.sub(r'\\[A-Za-z]+', '', sides[0] + sides[-1]))
    if len(sides) > 1 and len(split_list(text)) == 1 and not (sides[0].strip() and letters):
        text = sides[-1]
    return text.strip(ENDS)


def split_unit(text: str) -> tuple[str, str]:
    r"""(value, unit) of an answer; the unit in one spelling like \text{cm}^2, or ''."""
    match = UNIT.search(text)
    value = text[: match.start()] if match else ''
    if match is None or not re.search(r'[0-9A-Za-z)\]}]$', value):
        return text, ''
    space, in_text, plain, power = match.groups()
    words = re.findall('[a-z]+', (in_text or plain or '').lower().replace('.', ''))
    words = [word.removesuffix('s') if len(word) > 2 else word for word in words]
    known = [UNITS[word] for word in words if word in UNITS]
    if in_text is None:
        number = fraction(SPACE.sub('', value)) is not None
        accepted = (known or (space and number and len(plain) > 3 and plain not in FUNCTIONS)) and (space or number)
    else:
        accepted = words and (known or re.search('[0-9]', value))
    if not accepted:  # letters of a formula
        return text, ''
    unit = ' '.join(filter(None, known or words[-1:]))
    power = power or next((POWERS[word] for word in words if word in POWERS), '')
    return value, unit and f'\\text{{{unit}}}' + (power and f'^{power}')


def fraction(text: str) -> Fraction | None:
    """The Fraction that a canonical text spells: an integer, decimal, mixed or plain fraction; None for other text."""
    match = DECIMAL.fullmatch(text)
    if match:
        sign, whole, decimals, period, power = match.groups()
        whole, decimals = re.sub('[, ]', '', whole), decimals or ''
        value = Fraction(int(whole + decimals or 0), 10 ** len(decimals))
        if period:
            value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
        value *= Fraction(10) ** int(power or 0)
    else:
        match = FRACTION.fullmatch(text)
        if not match:
            return None
        sign, whole, above, below = match[1], match[2] or match[5], match[3] or match[6], match[4] or match[7]
        if not int(below) or (whole and not 0 <= int(above) < int(below)):
            return None
        value = int(whole or 0) + Fraction(int(above), int(below))
    return -value if sign == '-' else value


def split_list(text: str) -> list[str]:
    """The text split at the commas and semicolons outside all brackets."""
    items, start, depth = [], 0, 0
    for i, mark in enumerate(text):
        depth += (mark in '([{') - (mark in ')]}')
        if mark in ',;' and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    return [*items, text[start:].strip()]


def _closing(text, start):
    """The index of the bracket that closes the one at start, whatever their kinds; None without one."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in '([{') - (text[i] in ')]}')
        if depth == 0:
            return i
    return None
