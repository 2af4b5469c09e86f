"""Rows of data files on their way to Examples.

A row is a dict. In place of one that is malformed stands the BadInput that names its file and line and says what
is wrong, so that whoever loads the data decides what becomes of it.
"""

import logging
import math

from grpo_jax.errors import BadInput

MOST_MALFORMED = 0.5  # share of rows; above it, the file is something else


def checked(make, rows):
    """make(row, index, where) of each (where, row), or the BadInput that it raises, or that the row is."""
    found = []
    for index, (where, row) in enumerate(rows):
        if not isinstance(row, BadInput):
            try:
                row = make(row, index, where)
            except BadInput as error:
                row = error.with_traceback(None)  # which would keep the frame alive
        found.append(row)
    return found


def parted(found):
    """(those that are sound, the BadInputs among them)."""
    return ([x for x in found if not isinstance(x, BadInput)], [x for x in found if isinstance(x, BadInput)])


def sound(found, strict, split):
    """The sound ones of what was found of a split; a warning counts the others.

    BadInput for the first malformed one when strict, and when more than MOST_MALFORMED are.
    """
    kept, bad = parted(found)
    if bad and strict:
        raise bad[0]
    if len(bad) > MOST_MALFORMED * len(found):
        raise BadInput(f'{split} split', f'{len(bad)} of {len(found)} rows', f'are malformed; the first is {bad[0]}')
    if bad:
        logging.warning(
            '%d of %d rows of the %s split are malformed and left out; the first are: %s',
            len(bad),
            len(found),
            split,
            '; '.join(map(str, bad[:3])),
        )
    return kept


def lookup(row, field):
    """row[field], where 'a.b' is field b of the dict in field a; None when it is missing."""
    if field in row:
        return row[field]
    value = row
    for key in field.split('.'):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def text_field(row, field, where):
    """The field's text or number as text; BadInput when it is missing, empty, not finite or of another type."""
    return _text(lookup(row, field), row, field, where)


def prompt_text(row, field, where):
    """As text_field; of a chat, a list of messages with role and content, what the user said last."""
    value = lookup(row, field)
    if isinstance(value, list):
        said = [
            lookup(message, 'content')
            for message in value
            if isinstance(message, dict) and lookup(message, 'role') == 'user'
        ]
        value = said[-1] if said else value
    return _text(value, row, field, where)


def _text(value, row, field, where):
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadInput(where, short(value), f'field {field!r} must be text or a number; the row has {sorted(row)}')
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(where, value, f'field {field!r} is no finite number; mend or remove the row')
    text = str(value)
    if not text.strip():
        raise BadInput(where, short(text), f'field {field!r} is empty; mend or remove the row')
    return text


def short(value):
    """The value, or the beginning of its text when that is long."""
    text = str(value)
    return value if len(text) <= 80 else f'{text[:80]}...'
