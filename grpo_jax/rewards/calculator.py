"""Steps of arithmetic like 48/2=24: a reward for each, and their share as the completion's reward."""

import ast
from fractions import Fraction
import itertools
import re

# an expression, and its value if one follows, or signs alone: optional, so that no run is tried in other cuts
EQUATION = re.compile(r'([-+*/().]*\d[-+*/().\d]*)(?:=([-+]?\d+(?:\.\d+)?|[-+]?\.\d+))?|[-+*/().]+')
LONGEST = 100  # characters of an expression or value: more is nothing that a person would write, and slow to work out
MOST = 1000  # equations of a completion that are looked at
OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def reward(completion, example):
    """Share of the completion's equations that are right (see steps); None without one."""
    found = steps(completion, example)
    return sum(value for _, value in found) / len(found) if found else None


def steps(completion, example):
    """(end in characters, 1.0 if right else 0.0) of each equation, exactly as fractions.

    Where example.meta has 'steps', a list of expressions, the i-th equation must also be of the i-th expression:
    else writing down any true equation would pay.
    """
    asked, found = example.meta.get('steps'), []
    equations = (match for match in EQUATION.finditer(completion) if match[2])
    for i, match in enumerate(itertools.islice(equations, MOST)):
        expression, value = match.groups()
        right = len(value) <= LONGEST and value_of(expression) == Fraction(value)
        if asked is not None:
            right = right and i < len(asked) and expression == asked[i]
        found.append((match.end(), float(right)))
    return found


def value_of(expression):
    """Fraction of an expression of numbers, + - * / and brackets; None when it has none, or is too long to trust."""
    if len(expression) > LONGEST:
        return None
    try:
        # numbers like 007 are no Python, and mean 7
        return _value(ast.parse(re.sub(r'(?<![\d.])0+(?=\d)', '', expression), mode='eval').body)
    except (SyntaxError, ZeroDivisionError, RecursionError, KeyError, ValueError):
        return None


def _value(node):
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    raise ValueError(node)
