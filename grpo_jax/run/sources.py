"""The sources of what a notebook has written, which no config records."""

from collections.abc import Callable, Mapping
import functools
import inspect
import os
from typing import Any

from grpo_jax.algorithms import Algorithm
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file

FILE = 'sources.json'  # of a sweep's workdir


def record_sources(workdir: str, variants: Mapping[str, Algorithm], functions: Mapping[str, Callable]) -> None:
    """Writes down the sources of what a notebook has written; BadInput where a run has another.

    What is finished is not run again, and a config does not say what these do.
    """
    path = os.path.join(workdir, FILE)
    recorded = json_file.read_object(path) if os.path.exists(path) else {}
    sources = {name: source_text(variant) for name, variant in variants.items()}
    sources |= {f'reward {name}': source_text(function) for name, function in functions.items()}
    for name, text in sources.items():
        place = workdir if name.startswith('reward ') else os.path.join(workdir, name)
        if os.path.isdir(place) and recorded.get(name, text) != text:
            raise BadInput(name, 'changed', f'was run here with other code; rename it, or delete {place}')
    if sources:
        os.makedirs(workdir, exist_ok=True)
        json_file.write(path, recorded | sources)


def source_text(value: Any) -> str:
    """What a function, an Algorithm or a partial function does, as text: the source of what is not of this package."""
    if isinstance(value, Algorithm):
        return '\n'.join(f'{name} = {source_text(part)}' for name, part in value._asdict().items())
    if isinstance(value, tuple):
        return ', '.join(map(source_text, value))
    if isinstance(value, functools.partial):
        return f'{source_text(value.func)} {value.args} {sorted(value.keywords.items())}'
    if not callable(value):
        return repr(value)
    own = str(getattr(value, '__module__', '')).startswith('grpo_jax.')
    try:
        return value.__qualname__ if own else inspect.getsource(value)
    except (OSError, TypeError, AttributeError):  # it was not written in a file or a cell
        return type(value).__name__
