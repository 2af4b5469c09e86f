"""What is written once and read again as JSON: configs, figures, tables."""

import json
import os

import numpy as np

from grpo_jax.hosts import processes


def write(path, value):
    """Writes value to path, whole or not at all; the first process does."""
    if not processes.is_first():
        return
    temporary = f'{path}.writing'
    with open(temporary, 'w', encoding='utf8') as file:
        json.dump(value, file, indent=2, sort_keys=True, default=_plain)
        file.write('\n')
    os.replace(temporary, path)


def read(path):
    """What write wrote."""
    with open(path, encoding='utf8') as file:
        return json.load(file)


def _plain(value):
    return value.item() if isinstance(value, np.generic) else list(value)
