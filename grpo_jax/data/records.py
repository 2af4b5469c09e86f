"""Rows of data files on their way to Examples.

A row is a dict. In place of a malformed row stands the BadInput that names its file and line and says what is wrong, so
that the caller decides what becomes of it.
"""

from collections.abc import Callable, Iterable, Mapping
import logging
import math
from typing import Any

from grpo_jax.errors import BadInput

logger = logging.getLogger('grpo_jax')
MOST_MALFORMED = 0.5  # share of rows; above it, the file is something else


def convert_rows(convert: Callable, rows: Iterable[tuple[str, Any]]) -> list:
    """convert(row, index, where) of each (where, row), or the BadInput that it raises, or that the row is."""
    converted = []
    for index, (where, row) in enumerate(rows):
        if not isinstance(row, BadInput):
            try:
                row = convert(row, index, where)
            except BadInput as error:
                row = error.with_traceback(None)  # a traceback would keep the frame alive
        converted.append(row)
    return converted


def split_malformed(rows: Iterable) -> tuple[list, list[BadInput]]:
    """(the sound rows, the BadInputs in place of the malformed ones)."""
    rows = list(rows)
    return [row for row in rows if not isinstance(row, BadInput)], [row for row in rows if isinstance(row, BadInput)]


def drop_malformed(rows: Iterable, strict: bool, split: str) -> list:
    """The sound rows of a split; a warning counts the malformed ones.

    BadInput for the first malformed row when strict, and when more than the share MOST_MALFORMED are malformed.
    """
    sound, malformed = split_malformed(rows)
    count = len(sound) + len(malformed)
    if malformed and strict:
        raise malformed[0]
    if len(malformed) > MOST_MALFORMED * count:
        raise BadInput(
            f'{split} split', f'{len(malformed)} of {count} rows', f'are malformed; the first is {malformed[0]}'
        )
    if malformed:
        logger.warning(
            '%d of %d rows of the %s split are malformed and left out; the first are: %s',
            len(malformed),
            count,
            split,
            '; '.join(map(str, malformed[:3])),
        )
    return sound


def get_field(row: Mapping, field: str) -> Any:
    """row[field], where 'a.b' is field b of the dict in field a; None when it is missing."""
    if field in row:
        return row[field]
    value = row
    for key in field.split('.'):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def text_field(row: Mapping, field: str, where: str) -> str:
    """The field's text or number as text; BadInput when it is missing, empty, not finite or of another type."""
    return _text(get_field(row, field), row, field, where)


def prompt_text(row: Mapping, field: str, where: str) -> str:
    """As text_field; of a chat, a list of messages with role and content, the last message of the user."""
    value = get_field(row, field)
    if isinstance(value, list):
        contents = [
            get_field(message, 'content')
            for message in value
            if isinstance(message, dict) and get_field(message, 'role') == 'user'
        ]
        value = contents[-1] if contents else value
    return _text(value, row, field, where)


def _text(value, row, field, where):
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadInput(where, shorten(value), f'field {field!r} must be text or a number; the row has {sorted(row)}')
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(where, value, f'field {field!r} is no finite number; mend or remove the row')
    text = str(value)
    if not text.strip():
        raise BadInput(where, shorten(text), f'field {field!r} is empty; mend or remove the row')
    return text


def shorten(value: Any) -> Any:
    """The value, or the beginning of its text when that is long."""
    text = str(value)
    return value if len(text) <= 80 else f'{text[:80]}...'
