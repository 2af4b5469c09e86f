"""Separates an answer from its unit, its scale, and its sign of money or percent."""

from fractions import Fraction
import re

from grpo_jax.rewards.math.numbers import work_out
from grpo_jax.rewards.math.scripts import is_foreign

# spelling without the plural's s -> one spelling, or '' for units that the problem names
UNITS = {
    spelling: spellings.split()[0]
    for spellings in (
        'mm millimeter millimetre мм 毫米',
        'cm centimeter centimetre см 厘米 सेमी سم',
        'm meter metre м 米 मीटर متر',
        'km kilometer kilometre км 千米 公里 किमी كم',
        'in inch inche',
        'ft foot feet',
        'yd yard',
        'mi mile',
        'mg milligram',
        'g gm gram \u0433 克 ग्राम غرام',
        'kg kilogram кг 千克 公斤 किलोग्राम كغ',
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
        'l liter litre л 升',
        'gal gallon',
        'acre',
        'am',
        'pm',
        'cent',
        'dollar usd',
        'euro eur',
        'yen jpy',
    )
    for spelling in spellings.split()
}
UNITS |= {'mph': 'mi h', 'kmh': 'km h', 'kph': 'km h'}
# unit -> (what it measures, its size)
SIZES = {
    unit: (measure, Fraction(size))
    for measure, sizes in (
        ('length', 'mm 1 cm 10 m 1000 km 1000000 in 25.4 ft 304.8 yd 914.4 mi 1609344'),
        ('mass', 'mg 0.001 g 1 kg 1000 oz 28.349523125 lb 453.59237'),
        ('time', 's 1 min 60 h 3600 day 86400 week 604800'),
        ('volume', 'ml 1 l 1000'),
        ('dollars', 'cent 1 dollar 100'),
    )
    for unit, size in zip(sizes.split()[::2], sizes.split()[1::2], strict=True)
}
UNITS |= dict.fromkeys(['unit', 'percent', 'percentage', 'pct', 'degree'], '')
MONEY = {'$': 'dollar', '€': 'euro', '£': 'sterling', '¥': 'yen'}
CURRENCIES = {*MONEY.values(), 'cent'}
PERCENT = re.compile(r'%|(?<![a-z])(?:percent(?:age)?|pct)(?![a-z])')
SIGN = re.compile(r'\\(\$)|([€£¥])|(?<![^ -])(\$)(?=\s*[0-9.])')
FUNCTIONS = ('sqrt', 'infinity')
POWERS = {'square': '2', 'sq': '2', 'squared': '2', 'cubic': '3', 'cu': '3', 'cubed': '3'}
SCALES = {
    name: Fraction(10) ** power
    for power, name in ((2, 'hundred'), (3, 'thousand'), (6, 'million'), (9, 'billion'), (12, 'trillion'), (3, 'k'))
}
SCALES |= {f'{name}th': 1 / scale for name, scale in SCALES.items() if name != 'k'}
SCALES |= {
    name: Fraction(1, below)
    for below, names in enumerate(
        ('half halve', 'third', 'fourth', 'fifth', 'sixth', 'seventh', 'eighth', 'ninth', 'tenth'), 2
    )
    for name in names.split()
}
SCALES |= {'dozen': Fraction(12), 'gross': Fraction(144)}
# words with which the text after a number is a statement and no unit
STATING = frozenset(
    'is are was were be been isn not no nor never wrong incorrect false unknown maybe perhaps or and but than at over '
    'under above below between plus minus divided multiplied mod modulo base choose factorial if when where because '
    'since so thus hence therefore then should would could can cannot zero two three four five six seven eight nine '
    'ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety'.split()
)
# 1 hour and 30 minutes
COMPOUND = re.compile(
    r'(?<![0-9.,/])([0-9]{1,9}(?:/[1-9][0-9]{0,9})?)\s*(?:\\text\w*\s*\{\s*)?([A-Za-z]{1,9}?)s?[.,]?\s*\}?[.,]?\s*'
    r'(?:(?:and|\\text\s*\{\s*and\s*\})\s*)?([0-9]{1,9})(\s*(?:\\text\w*\s*\{\s*)?)([A-Za-z]{1,9}?)s?(?![A-Za-z])'
)
UNIT = re.compile(r'(\s*)(?:\\text\s*\{([^{}]*)\}|(?<![A-Za-z\\])([A-Za-z][A-Za-z. /]+))\s*(?:\^\s*\{?([0-9])\}?)?$')
TEXT = re.compile(r'(?<=[0-9A-Za-z)\]}])\s*\\text\s*\{([^{}]*)\}')
PLAIN = re.compile(r'(?<![A-Za-z\\])[A-Za-z]+')
# spaces, except within words or numbers, and after a list's commas: 1, 234 is not 1,234
SPACE = re.compile(r'(?<![0-9A-Za-z,]) | (?![0-9A-Za-z.\\(-])|(?<=[A-Za-z]) (?=[^A-Za-z])|(?<=[0-9]) (?=[^0-9])')


def split_unit(text: str) -> tuple[str, str]:
    r"""Splits an answer into (value, unit); the unit has one spelling, like \text{cm}^2, or is ''.

    Scales are multiplied in: 5 million is 5000000. Words that state something, as in `5 is wrong`, are no unit, and the
    text stays whole.
    """
    match = UNIT.search(text)
    value = text[: match.start()] if match else ''
    if match is None or not re.search(r'[0-9A-Za-z)\]}]$', value):
        return text, ''
    space, in_text, plain, power = match.groups()
    spelled = (in_text or plain or '').lower().replace('.', '')
    inner = re.search(r'(?<=[a-z])\^?\{?\$?([23])\$?$', spelled.strip())
    if inner:
        spelled, power = spelled.strip()[: inner.start()], power or inner[1]
    if is_foreign(spelled):
        return value, f'\\text{{{UNITS.get(spelled.strip(), spelled.strip())}}}'
    words = re.findall('[a-z]+', spelled)
    if not STATING.isdisjoint(words) or re.search(r'[0-9,;=<>+]', spelled):
        return text, ''
    words = [word.removesuffix('s') if len(word) > 2 and word not in SCALES else word for word in words]
    head, equals, side = value.rpartition('=')
    number = work_out(SPACE.sub('', side))
    scale = Fraction(1)
    while words and words[0] in SCALES and (in_text is not None or len(words[0]) > 1):
        scale *= SCALES[words.pop(0)]
    if scale != 1:
        if number is None:
            return text, ''
        value = f'{head}{equals}{number * scale}'
        if not words:
            return value, ''
    units = [UNITS[word] for word in words if word in UNITS]
    if in_text is None:
        long = space and number is not None and len(plain) > 3 and not {plain, '/'} & {*FUNCTIONS, *plain}
        accepted = scale != 1 or ((units or long) and (space or number is not None))
    else:
        accepted = units or (words and max(map(len, words)) > 1 and re.search('[0-9]', value))
    if not accepted or all(word in POWERS for word in words):  # letters of a formula; 5 squared
        return text, ''
    if units and units[0] in CURRENCIES:
        units = units[:1]  # 5 dollars a day
    unit = ' '.join(filter(None, units or words[-1:]))
    power = power or next((POWERS[word] for word in words if word in POWERS), '')
    return value, unit and f'\\text{{{unit}}}' + (power and f'^{power}')


def add_units(match: re.Match) -> str:
    """One quantity for a match of COMPOUND: `3/2 hour` for `1 hour 30 minutes`; unchanged where units do not fit."""
    one, other = (measured(Fraction(1), f'\\text{{{UNITS.get(match[i].lower())}}}') for i in (2, 5))
    if not one or not other or one[0] != other[0] or one[2] <= other[2]:
        return match[0]
    return f'{Fraction(match[1]) + int(match[3]) * other[2] / one[2]}{match[4]}{match[2]}'


def sign_of(text: str, number: Fraction) -> str:
    r"""The unit that a number's text gives as a sign, \$ or %, in split_unit's spelling; '' without a sign.

    A percent sign counts only below 1: the problem says that a number is a percentage, but .05 is not .05 %.
    """
    sign = SIGN.search(text)
    if sign and (not sign[3] or text.count('$') == 1):
        return f'\\text{{{MONEY[sign[1] or sign[2] or sign[3]]}}}'
    return r'\text{%}' if PERCENT.search(text) and 0 < abs(number) < 1 else ''


def same_units(unit: str, other: str) -> bool:
    """Whether two units from split_unit are compatible: equal, or one is missing and the other is not percent."""
    if unit and other and not (unit + other).isascii():  # such words are equal up to their endings
        same = next((i for i, (a, b) in enumerate(zip(unit, other, strict=False)) if a != b), len(unit))
        return unit == other or same - len(r'\text{') >= max(3, len(max(unit, other, key=len)) - len(r'\text{}') - 3)
    return unit == other or (not (unit and other) and '%' not in unit + other)


def measured(number: Fraction | None, unit: str) -> tuple[str, str, Fraction] | None:
    """(what a unit measures, its power, the number converted to size 1); None where SIZES lacks the unit."""
    match = re.fullmatch(r'\\text\{([a-z]+)\}(?:\^([23]))?', unit)
    if number is None or not match or match[1] not in SIZES:
        return None
    measure, size = SIZES[match[1]]
    return measure, match[2] or '1', number * size ** int(match[2] or 1)


def minutes(value: str, unit: str) -> tuple[int, bool] | None:
    """(minutes since midnight, whether am or pm is given) of a clock time like 3:45; None for other texts."""
    clock = re.fullmatch('([0-9]{1,2})(?::([0-5][0-9]))?', value)
    half = {r'\text{am}': 0, r'\text{pm}': 12}.get(unit)
    if not clock or (half is None and (unit or not clock[2])) or int(clock[1]) > (24 if half is None else 12):
        return None
    hour = int(clock[1]) if half is None else int(clock[1]) % 12 + half
    return 60 * hour + int(clock[2] or 0), half is not None


def statement(text: str) -> frozenset[str]:
    r"""The words of a canonical text that state something: words in \text{} after a value, and words in STATING."""
    side = text.rpartition('=')[2]
    words = {word for inner in TEXT.findall(side) for word in re.findall('[a-z]+', inner.lower())}
    return frozenset(words | {word for word in map(str.lower, PLAIN.findall(side)) if word in STATING})
