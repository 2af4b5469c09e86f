"""The settings of other frameworks, and the keys of this package that they correspond to: the table coming_from.csv.

Messages that refuse a setting name its key here. The tables of docs/coming_from.md are made of the same file.
"""

import csv
import functools
import itertools
import os
import re
from typing import NamedTuple

FILE = os.path.join(os.path.dirname(__file__), 'coming_from.csv')
MOST = 2  # a name with more meanings is not explained
SECTIONS = ('actor_rollout_ref', 'critic', 'custom_reward_function', 'trainer', 'val_kwargs')  # of verl, and none here


class Setting(NamedTuple):
    """A setting of another framework, and the key of this package that it corresponds to."""

    framework: str
    name: str  # as it is written there; NAME=VALUE where the value decides
    here: str  # the key, KEY=value, or several; '' where there is none
    differs: str

    def __str__(self):
        is_here = f'is {self.here} here' if self.here else f'is no key here: {self.differs}'
        return f"{self.framework}'s {self.name} {is_here}"


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Every Setting of the table."""
    with open(FILE, encoding='utf8', newline='') as file:
        return tuple(Setting(**row) for row in csv.DictReader(file, delimiter='|'))


def explain(name: str, value: str | None = None) -> str:
    """Says which keys of this package other frameworks' settings of this name are, as a sentence; '' if none has it.

    name: as a user gave it, dotted or not; value: the text that it was set to, if known. Of a dotted name the last
    parts are compared: `rollout.n` means verl's actor_rollout_ref.rollout.n.
    """
    parts = name.lstrip('+-').replace('-', '_').split('.')
    shared = {row: _count_shared(parts, row.name.partition('=')[0].split('.')) for row in settings()}
    most = max(shared.values())
    rows = [row for row, count in shared.items() if count == most > 0]
    exact = [row for row in rows if value is not None and row.name.partition('=')[2] == value.strip('\'"').lower()]
    rows = exact or [row for row in rows if '=' not in row.name]
    meanings = {row.here: row for row in reversed(rows)}  # of several frameworks with the same meaning, the first
    if meanings:
        text = ', '.join(map(str, reversed(meanings.values())))
        (row, *others) = meanings.values()
        if not others and row.here and row.differs:  # a value that is copied may mean something else
            text += f' ({row.differs.replace("**", "").replace("`", "")})'
        return f'{text}; docs/coming_from.md has more' if len(meanings) <= MOST else ''
    section = next((part for part in parts if part in SECTIONS), '')
    return f'{section} is a section of verl; docs/coming_from.md has its keys' if section else ''


def explain_targets(text: str) -> str:
    """Says what PEFT's names of matrices (target_modules) in a text are here, as a sentence; '' if it has none."""
    words = re.findall(r'[\w-]+', text)
    return ', '.join(str(row) for row in settings() if row.name in [f'target_modules={word}' for word in words])


def explain_value(key: str, value: str) -> str:
    """Says which value of the key `key` here another framework's value of that setting is; '' where none is known."""
    own = [row for row in settings() if row.name.partition('=')[2] == value and row.here.startswith(f'{key}=')]
    words = [str(row) for row in own]
    words += [f'{r} ({r.differs.replace("`", "")})' for r in settings() if r.here == key and f'`{value}`' in r.differs]
    return f'{words[0]}; docs/coming_from.md has more' if words else ''


def _count_shared(parts, names):
    """How many parts two dotted names share, counted from their ends."""
    pairs = zip(reversed(parts), reversed(names), strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
