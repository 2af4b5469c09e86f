"""Exact values of arithmetic expressions like 48/2."""

import ast
from fractions import Fraction
import re

LONGEST = 100  # characters of an expression or value; nobody writes longer ones, and they are slow to compute
ARITHMETIC = re.compile(r'[-+*/().0-9 ]+')  # the characters of a whole expression
OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def value_of(expression: str) -> Fraction | None:
    """The exact value of an expression with numbers, + - * / and brackets.

    None if it is no such expression, divides by 0, or has more than LONGEST characters.
    """
    if len(expression) > LONGEST:
        return None
    try:
        # numbers like 007 mean 7, and are a syntax error in Python
        return _value(ast.parse(re.sub(r'(?<![\d.])0+(?=\d)', '', expression), mode='eval').body)
    except (SyntaxError, ZeroDivisionError, RecursionError, KeyError, ValueError):
        return None


def _value(node):
    """The Fraction of a node of Python's syntax tree; raises KeyError or ValueError for any other syntax."""
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    raise ValueError(node)
