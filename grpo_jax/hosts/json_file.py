"""JSON files: configs, figures, tables."""

import json
import os
from typing import Any

import numpy as np

from grpo_jax.hosts import files, processes


def write(path: str | os.PathLike, value: Any):
    """Writes value to path, whole or not at all; the first process writes, the others do nothing."""
    if not processes.is_first():
        return
    with files.atomic_write(path) as file:
        json.dump(value, file, indent=2, sort_keys=True, default=_plain)
        file.write('\n')


def read(path: str | os.PathLike) -> Any:
    """The value that write has written."""
    with open(path, encoding='utf8') as file:
        return json.load(file)


def _plain(value):
    return value.item() if isinstance(value, np.generic) else list(value)
