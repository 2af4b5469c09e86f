"""Writes docs/coming_from.md: tables of grpo_jax/coming_from.csv, around the text of coming_from_notes.md.

python docs/make_coming_from.py
"""

import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, 'docs'))

from make_algorithms import table  # noqa: E402

from grpo_jax import coming_from  # noqa: E402

TARGET = os.path.join(ROOT, 'docs', 'coming_from.md')
NOTES = os.path.join(ROOT, 'docs', 'coming_from_notes.md')


def text():
    """The whole page."""
    with open(NOTES, encoding='utf8') as file:
        page = file.read()
    for framework in dict.fromkeys(row.framework for row in coming_from.settings()):
        page = page.replace(f'<!-- {framework} -->', settings_of(framework))
    origin = 'docs/make_coming_from.py, from grpo_jax/coming_from.csv and coming_from_notes.md'
    return f'<!-- Written by {origin}. -->\n\n{page}'


def settings_of(framework):
    """The table of a framework's settings."""
    rows = [
        (f'`{row.name}`', re.sub(r"[\w.]+(=('.*?'|\(.*?\)))?", quote, row.here) or 'none', row.differs)
        for row in coming_from.settings()
        if row.framework == framework
    ]
    return table('there | here | what differs', rows)


def quote(match):
    """A key, and its value, as code; other words as they are."""
    return match[0] if match[0] == 'and' else f'`{match[0]}`'


if __name__ == '__main__':
    with open(TARGET, 'w', encoding='utf8') as target:
        target.write(text())
