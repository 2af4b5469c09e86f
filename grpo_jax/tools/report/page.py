"""Writes the page of a report: one HTML file with styles, scripts and data, which needs no network."""

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
LONGEST = 4000  # characters that are shown of a text
STYLES = ('uPlot.min.css', 'report.css')
# characters that HTML or a script could interpret, and surrogates, which UTF-8 cannot encode
UNSAFE = re.compile('[<>&\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]')


def as_json(value: Any) -> str:
    r"""Returns a value as JSON that is safe inside a page or a script: characters of UNSAFE are \u escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
    return UNSAFE.sub(lambda match: f'\\u{ord(match[0]):04x}', text)


def as_script(step_key: str, text: str) -> str:
    """Returns a script that passes a step's JSON to the page as a text, since an object could set a prototype."""
    return f'reportRollouts({as_json(step_key)},{as_json(text)});\n'


def write_page(
    path: str, header: Mapping[str, Any], data: Mapping[str, Any], inline: Iterable[tuple[str, str]]
) -> None:
    """Writes the page, whole or not at all.

    header: the template's values; data: the scripts' values; inline: (id, JSON) of each further data element in the
    page, read one at a time. Raises CannotWrite when the disk refuses the file.
    """
    before, marked, after = _render(header, bool(data['split'] or data['stamp'])).partition('<!-- data -->')
    assert marked, 'the template has a place for the data'
    with atomic_write(path) as file:
        file.write(before)
        for name, text in itertools.chain([('report-data', as_json(data))], inline):
            file.write(f'<script type="application/json" id="{escape(name)}">{text}</script>\n')
        file.write(after)


def _render(header, beside):
    """The page's HTML without data. header: the template's values; beside: whether scripts beside the page may load."""
    import jinja2  # a tenth of a second

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.finalize = lambda value: _shorten(value) if type(value) is str else value
    scripts = [_read_asset(name) for name in SCRIPTS]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    sources = ' '.join(f"'sha256-{digest}'" for digest in digests) + " 'self' file:" * beside
    styles = [_read_asset(name) for name in STYLES]
    # the template does not escape an _Asset
    assets = {'scripts': [_Asset(text) for text in scripts], 'styles': [_Asset(text) for text in styles]}
    return environment.get_template('report.html').render(**header, **assets, sources=sources)


def _shorten(text):
    """A text, cut to LONGEST characters, with control characters escaped."""
    return escape(text if len(text) <= LONGEST else f'{text[:LONGEST]}...')


class _Asset(str):
    """A script or style of this package, which the template does not escape."""

    def __html__(self):
        return self


@functools.cache
def _read_asset(name):
    """The text of a file in FOLDER."""
    with open(os.path.join(FOLDER, name), encoding='utf8') as file:
        return file.read()
