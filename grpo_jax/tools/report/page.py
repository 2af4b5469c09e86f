"""The page of a report: one file with its styles, scripts and data, which opens without any request."""

import base64
from collections.abc import Iterable, Mapping
import functools
import hashlib
import itertools
import json
import os
import re
from typing import Any

from grpo_jax.hosts.files import atomic_write
from grpo_jax.text import escape

FOLDER = os.path.join(os.path.dirname(__file__), 'assets')
SCRIPTS = ('uPlot.iife.min.js', 'text.js', 'charts.js', 'tokens.js', 'rollouts.js', 'main.js')  # in this order
LONGEST = 4000  # characters of a setting, or of a field of an event
STYLES = ('uPlot.min.css', 'report.css')
# what HTML, or a script, could take for its own; and what no UTF-8 has
UNSAFE = re.compile('[<>&\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]')


def as_json(value: Any) -> str:
    r"""JSON that can stand in a page or a script whatever texts it holds: \u escapes stand for all that is UNSAFE."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
    return UNSAFE.sub(lambda match: f'\\u{ord(match[0]):04x}', text)


def as_script(step_key: str, text: str) -> str:
    """A script that hands a step's JSON over to the page, which parses it: a literal could set a prototype."""
    return f'reportRollouts({as_json(step_key)},{as_json(text)});\n'


def write_page(
    path: str, header: Mapping[str, Any], data: Mapping[str, Any], inline: Iterable[tuple[str, str]]
) -> None:
    """Writes the page, whole or not at all.

    header is what the template shows; data, what the scripts read; inline, (id, JSON) of more data in the page, which
    come one at a time. CannotWrite when the disk refuses it.
    """
    before, marked, after = _render(header, bool(data['beside'])).partition('<!-- data -->')
    assert marked, 'the template has a place for the data'
    with atomic_write(path) as file:
        file.write(before)
        for name, text in itertools.chain([('report-data', as_json(data))], inline):
            file.write(f'<script type="application/json" id="{escape(name)}">{text}</script>\n')
        file.write(after)


def _render(header, beside):
    import jinja2  # a tenth of a second

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.finalize = lambda value: _shown(value) if type(value) is str else value
    scripts = [_read(name) for name in SCRIPTS]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    sources = ' '.join(f"'sha256-{digest}'" for digest in digests) + " 'self' file:" * beside
    styles = [_read(name) for name in STYLES]
    # texts of this package, and no data: they must stand as they are
    own = {'scripts': [_Own(text) for text in scripts], 'styles': [_Own(text) for text in styles], 'sources': sources}
    return environment.get_template('report.html').render(**header, **own)


def _shown(text):
    """A text of a run as the template shows it: in one line, and not endless."""
    return escape(text if len(text) <= LONGEST else f'{text[:LONGEST]}...')


class _Own(str):
    """A text of this package, which a template shows as it is."""

    def __html__(self):
        return self


@functools.cache
def _read(name):
    with open(os.path.join(FOLDER, name), encoding='utf8') as file:
        return file.read()
