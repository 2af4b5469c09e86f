"""Reads numbers from texts, exactly."""

from fractions import Fraction
import re

from grpo_jax.expressions import ARITHMETIC, value_of

LAYERS = 8  # fractions within fractions that are read
DIGITS = 100  # a power with more digits is not worked out

WHOLE = r'[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|(?=\.[0-9\\])'
DECIMAL = re.compile(
    rf'([-+]?)({WHOLE})(?:\.([0-9]*)(?:\\overline\{{?([0-9]+)\}}?)?)?'
    r'(?:(?:[eE]|(?:\\times|\\cdot|\*)10\^)\{?([-+]?[0-9]{1,3})\}?)?'
)
FRACTION = re.compile(r'([-+]?)(?:([0-9]+)?\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|(?:([0-9]+) )?([0-9]+)/([0-9]+))')
QUOTIENT = re.compile(r'\\frac\{([^{}]*)\}\{([^{}]*)\}')
PRODUCT = re.compile(r'\\(?:times|cdot) ?|\\div ?')
POWER = re.compile(r'(?<![0-9.])([0-9]+)\^(?:([0-9])|\{([0-9]{1,3})\})(?![0-9.^])')


def fraction(text: str) -> Fraction | None:
    """Reads a canonical text as an integer, decimal, mixed number or plain fraction; None for any other text."""
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


def work_out(text: str) -> Fraction | None:
    """The exact value of a canonical text with + - * / and whole powers; None for other texts and very long ones."""
    number = fraction(text)
    if number is not None or len(text) > 2 * DIGITS:
        return number
    for _ in range(LAYERS):
        shorter = QUOTIENT.sub(r'((\1)/(\2))', POWER.sub(_power, text))
        if shorter == text:
            break
        text = shorter
    text = PRODUCT.sub(lambda match: '/' if 'div' in match[0] else '*', text)
    return value_of(text.strip()) if ARITHMETIC.fullmatch(text) else None


def _power(match):
    """The value, in digits, of a power that POWER has matched; its text where the value could have more than DIGITS."""
    base, exponent = match[1], int(match[2] or match[3])
    return str(int(base) ** exponent) if len(base) * exponent <= DIGITS else match[0]
