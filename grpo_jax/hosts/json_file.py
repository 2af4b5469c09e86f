"""Reads and writes JSON files: configs, figures, tables."""

import json
import os
from typing import Any

import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, processes


def write(path: str | os.PathLike, value: Any):
    """Writes value to path, whole or not at all; raises CannotWrite. Only the first process writes."""
    if not processes.is_first():
        return
    with files.atomic_write(path) as file:
        json.dump(value, file, indent=2, sort_keys=True, default=_to_json)
        file.write('\n')


def read(path: str | os.PathLike, remedy: str = 'bring it back from a copy') -> Any:
    """The value in a JSON file. Raises BadInput, with the remedy, for a file that cannot be read or is no JSON."""
    try:
        with open(path, encoding='utf8') as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: malformed JSON, or no UTF-8
        raise BadInput('file', os.fspath(path), f'cannot be read: {error}; {remedy}') from None


def read_object(path: str | os.PathLike, remedy: str = 'bring it back from a copy') -> dict[str, Any]:
    """The object in a JSON file, as a dict. Raises BadInput as read does, and for a value that is no object."""
    value = read(path, remedy)
    if not isinstance(value, dict):
        raise BadInput('file', os.fspath(path), f'must hold an object with named fields; {remedy}')
    return value


def _to_json(value):
    """What json.dump writes for a value that it does not know: a numpy scalar's number, else a list of its elements."""
    return value.item() if isinstance(value, np.generic) else list(value)
