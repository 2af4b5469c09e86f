"""The settings of other frameworks and the keys that they are here, by which a run refuses them: coming_from.csv.

docs/coming_from.md has its tables from the same file, which is read at its first use.
"""

import csv
import functools
import itertools
import os
import re
from typing import NamedTuple

FILE = os.path.join(os.path.dirname(__file__), 'coming_from.csv')
MOST = 2  # meanings of an ambiguous name that are said
SECTIONS = ('actor_rollout_ref', 'critic', 'custom_reward_function', 'trainer', 'val_kwargs')  # of verl, and none here


class Setting(NamedTuple):
    """A setting of another framework."""

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
    """What the settings of other frameworks with this name are here, as a sentence; '' where there is none.

    name: as a user gave it, dotted or not; value: the text that it was set to, if known. Of a dotted name, the last
    parts count: `rollout.n` means verl's actor_rollout_ref.rollout.n.
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
    """What PEFT's names of matrices in a text are here, as a sentence; '' where there are none."""
    words = re.findall(r'[\w-]+', text)
    return ', '.join(str(row) for row in settings() if row.name in [f'target_modules={word}' for word in words])


def explain_value(key: str, value: str) -> str:
    """What another framework's value of a setting is here, where the setting is `key`; '' where there is none."""
    own = [row for row in settings() if row.name.partition('=')[2] == value and row.here.startswith(f'{key}=')]
    words = [str(row) for row in own]
    words += [f'{r} ({r.differs.replace("`", "")})' for r in settings() if r.here == key and f'`{value}`' in r.differs]
    return f'{words[0]}; docs/coming_from.md has more' if words else ''


def _count_shared(parts, names):
    """How many of the last parts of two dotted names are the same."""
    pairs = zip(reversed(parts), reversed(names), strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
