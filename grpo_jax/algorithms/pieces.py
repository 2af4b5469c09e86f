"""Pieces: plain functions whose positional parameters name the data they read.

A surrogate that reads ratio and advantages is `def mine(ratio, advantages): ...`; the caller passes what is
named, and computes nothing that no piece names. Keyword-only parameters are numbers, bound once from the
config section's keys of the same names.
"""

import functools
import inspect

from grpo_jax.errors import BadInput


def choose(module, key, name, section):
    """The function of `module` that the config names, with its numbers bound; BadInput for an unknown one."""
    choices = named(module)
    if name not in choices:
        raise BadInput(f'algorithm.{key}', name, 'choose one of ' + ', '.join(sorted(choices)))
    numbers = [n for n, p in inspect.signature(choices[name]).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return functools.partial(choices[name], **{n: section[n] for n in numbers}) if numbers else choices[name]


def named(module):
    """The pieces of a module by name."""
    return {
        name: f
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and not name.startswith('_')
    }


def reads(piece):
    """The names of the data that a piece reads, in order."""
    return [n for n, p in inspect.signature(piece).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


def name_of(piece):
    """The piece's own name, whether numbers are bound to it or not."""
    return getattr(piece, 'func', piece).__name__


def call(piece, data):
    """piece of the data that it names; data maps names to values, or to functions without arguments.

    TypeError when it names something that data lacks.
    """
    missing = [name for name in reads(piece) if name not in data]
    if missing:
        raise TypeError(f'{name_of(piece)} reads {missing[0]}, and there is only {", ".join(sorted(data))}')
    return piece(*(value() if callable(value := data[name]) else value for name in reads(piece)))
