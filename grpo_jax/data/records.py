"""Converts rows of data files to Examples.

A row is a dict. A malformed row is replaced by a BadInput that names its file and line and the fault, so that the
caller decides whether to stop or to leave the row out.
"""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import decimal
import json
import logging
import re
from typing import Any

import numpy as np

from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.example import Example

logger = logging.getLogger('grpo_jax')
MOST_MALFORMED = 0.5  # share of rows; above it, the file is taken for something else
ROLES = 'system', 'developer', 'user', 'assistant', 'tool'  # of a chat's messages


class MissingSplit(BadInput):
    """Raised where a data set does not have the split that is asked for."""


class Unanswered(BadInput):
    """Stands in place of a row that lacks only its gold answer; `example` is its Example, if no answer is needed."""

    example: Example


def check_made(split: str) -> None:
    """Raises MissingSplit unless split is train or test, the splits of data sets that a program makes."""
    if split not in ('train', 'test'):
        remedy = 'is no split of data that a program makes; use train and test'
        raise MissingSplit('data.train_split, data.test_split', split, remedy)


def convert_rows(convert: Callable, rows: Iterable[tuple[str, Any]]) -> list:
    """A list of convert(row, index, where) for each (where, row) of `rows`.

    A BadInput that convert raises, or that stands in place of the row, becomes the item.
    """
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
    """(the sound rows, the BadInputs in place of malformed rows)."""
    rows = list(rows)
    return [row for row in rows if not isinstance(row, BadInput)], [row for row in rows if isinstance(row, BadInput)]


def drop_malformed(rows: Iterable, strict: bool, split: str) -> list:
    """The sound rows of a split; a warning counts the malformed ones.

    Raises the first malformed row's BadInput if strict, and BadInput when the malformed share exceeds MOST_MALFORMED.
    """
    sound, malformed = split_malformed(rows)
    count = len(sound) + len(malformed)
    if malformed and strict:
        raise malformed[0]
    if len(malformed) > MOST_MALFORMED * count:
        rows = f'{len(malformed)} of {count} rows of the {split} split'
        remedy = 'mend the file, or name its columns in data.options'
        raise BadInput(rows, NO_VALUE, f'are malformed; {remedy}; the first of them so: {malformed[0]}')
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
    """The value at a path: the column `field`, or else names and list indices joined by dots, like answers.0.text.

    A text inside the path is read as JSON. None when there is no such value.
    """
    if field in row:
        return row[field]
    value: Any = row
    for key in field.split('.'):
        value = parse_json(value) if isinstance(value, str) else value
        if isinstance(value, list) and re.fullmatch(r'-?\d{1,9}', key):
            value = value[int(key)] if -len(value) <= int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def parse_json(text: str) -> Any:
    """The list or dict that a text in JSON holds; None for any other text."""
    if text.lstrip()[:1] not in ('[', '{'):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def text_field(row: Mapping, field: str, where: str) -> str:
    """A field's text, or its number as text; raises BadInput, which names `where`, for anything else."""
    value = get_field(row, field)
    if value is None:
        remedy = f'has nothing in field {field!r}; mend the row, which has {", ".join(map(str, row)) or "no field"}'
        raise BadInput(where, NO_VALUE, remedy)
    if isinstance(value, bool) or not isinstance(value, (str, int, float, decimal.Decimal)):
        raise BadInput(
            where, shorten(value), f'field {field!r} must be text or a number; mend the row, which has {sorted(row)}'
        )
    if not isinstance(value, str):
        if not isinstance(value, int) and not np.isfinite(float(value)):
            raise BadInput(where, value, f'field {field!r} is no finite number; mend or remove the row')
        value = number_text(value)
    if not value.strip():
        raise BadInput(where, shorten(value), f'field {field!r} is empty; mend or remove the row')
    return value


def read_answer(row: Mapping, field: str, where: str) -> str:
    """A gold answer, as text_field gives it; a list of one value counts as this value, and so does a text like `["4"]`.

    Raises BadInput for several values and for a struct; its remedy proposes the path of the first value inside.
    """
    value = get_field(row, field)
    if isinstance(value, str) and value.startswith('["'):  # other texts in brackets are intervals
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list) and len(value) == 1:
        return text_field({field: value[0]}, field, where)
    if value and isinstance(value, (list, dict)):
        inside = f'{field}.{0 if isinstance(value, list) else next(iter(value))}'
        remedy = f'field {field!r} must be text or a number, and has {len(value)} values; name one, like {inside}'
        raise BadInput(where, shorten(value), remedy)
    return text_field(row, field, where)


def number_text(value: int | float | decimal.Decimal) -> str:
    """The text of a finite number: plain decimals, no more than identify it. 18.0 is 18, and 1e-05 is 0.00001."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, decimal.Decimal):
        text = f'{value:f}'
        text = text.rstrip('0').rstrip('.') if '.' in text else text
    else:
        text = np.format_float_positional(value, trim='-')
    return '0' if text == '-0' else text


def read_prompt(row: Mapping, field: str, where: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """(prompt, messages) of an Example, from a field with a text or a chat; raises BadInput for anything else.

    The prompt is the text, or the user's last message in the chat.
    """
    if not isinstance(get_chat(row, field), list):
        return text_field(row, field, where), ()
    return chat_prompt(read_messages(row, field, where), field, where)


def get_chat(row: Mapping, field: str) -> Any:
    """The value that get_field returns; a text with a JSON list of messages becomes that list."""
    value = get_field(row, field)
    parsed = parse_json(value) if isinstance(value, str) else None
    is_chat = (
        isinstance(parsed, list) and parsed and all(isinstance(m, dict) and {'role', 'from'} & {*m} for m in parsed)
    )
    return parsed if is_chat else value


def chat_prompt(messages: tuple[dict[str, Any], ...], field: str, where: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """(prompt, messages) of an Example, from a chat's messages; raises BadInput without a message of the user.

    messages is () where the chat is the prompt alone. field, where: what BadInput names.
    """
    prompts = [message['content'] for message in messages if message['role'] == 'user']
    if not prompts or not prompts[-1].strip():
        raise BadInput(
            where, shorten(messages), f'field {field!r} must be text, or have words of the user; mend or remove the row'
        )
    return prompts[-1], () if messages == ({'role': 'user', 'content': prompts[-1]},) else messages


def read_messages(row: Mapping, field: str, where: str) -> tuple[dict[str, Any], ...]:
    """The messages of the chat in a field, each content as one text; raises BadInput for anything but that."""
    messages = get_chat(row, field)
    if not isinstance(messages, list) or not all(isinstance(m, dict) and m.get('role') in ROLES for m in messages):
        raise BadInput(
            where,
            shorten(messages),
            f'field {field!r} must be text or a number, or messages with role ({", ".join(ROLES)}) and content; '
            'mend or remove the row',
        )
    return tuple(
        # Parquet gives every message each field that any message has, as None
        {key: value for key, value in message.items() if value is not None} | {'content': _content(message, where)}
        for message in messages
    )


def read_completion(row: Mapping, field: str, where: str) -> tuple[tuple[dict[str, Any], ...], str]:
    """(the messages before a completion, the completion's text) from a field with a text or a chat.

    The messages are () where the field has a text. Raises BadInput for a field with anything else, and for a chat whose
    last message is not the assistant's.
    """
    if not isinstance(get_chat(row, field), list):
        return (), text_field(row, field, where)
    messages = read_messages(row, field, where)
    if not messages or messages[-1]['role'] != 'assistant':
        raise BadInput(where, shorten(messages), f"field {field!r} must end with the assistant's words; mend the row")
    return messages[:-1], text_field(messages[-1], 'content', where)


def _content(message, where):
    """A message's content as one text: parts are joined; '' where a message has only tool calls.

    Raises BadInput where the content is no text.
    """
    content = message.get('content')
    if content is None and message.get('tool_calls'):
        return ''
    parts = content if isinstance(content, list) else [{'type': 'text', 'text': content}]
    for part in parts:
        if not isinstance(part, dict) or part.get('type') != 'text' or not isinstance(part.get('text'), str):
            raise BadInput(where, shorten(part), 'the content of a message must be text; mend or remove the row')
    return ''.join(part['text'] for part in parts)


def shorten(value: Any) -> Any:
    """The value, or where its text is longer than 80 characters, the beginning of this text."""
    text = str(value)
    return value if len(text) <= 80 else f'{text[:80]}...'
