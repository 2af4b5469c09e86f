"""Reads JSONL files, with an object in each line, and JSON files, with one list of objects."""

from collections.abc import Iterator
import json
import os
from typing import Any

from grpo_jax.data.records import shorten
from grpo_jax.errors import BadInput

LONGEST = 2**24  # bytes of a line; a longer one is not read into memory
LARGEST = 2**30  # bytes of a list, which is read into memory as a whole


def read(path: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) for each line of a JSONL file: the line's place in words, and a dict.

    In place of a malformed row there is a BadInput. Malformed are also an empty line, one of more than LONGEST bytes, a
    key that comes twice, NaN, infinities, and half a surrogate pair. Raises BadInput when there is no file.
    """
    if not os.path.isfile(path):
        raise BadInput('data file', path, 'no such file; set GRPO_JAX_DATA or data.options.folder')
    with open(path, 'rb') as file:
        for number, line in enumerate(_lines(file), 1):
            where = f'{path}, line {number}'
            try:
                if len(line) > LONGEST:
                    raise ValueError(f'the line is longer than {LONGEST} bytes')
                text = line.decode('utf-8-sig' if number == 1 else 'utf8').strip()
                if not text:
                    raise ValueError('the line is empty')
                row = _check_row(json.loads(text, object_pairs_hook=_make_dict, parse_constant=_refuse_constant), text)
            except (ValueError, RecursionError) as error:  # ValueError: also of the encoding
                row = BadInput(where, line[:80], f'{error}; mend or remove the row')
            yield where, row


def read_list(path: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) as `read` does, for a .json file with one list of objects, or with JSON Lines.

    Raises BadInput for a list that is no JSON as a whole, and for one of more than LARGEST bytes.
    """
    with open(path, 'rb') as file:
        if not file.read(80).lstrip(b'\xef\xbb\xbf \t\r\n').startswith(b'['):
            yield from read(path)
            return
        if file.seek(0, os.SEEK_END) > LARGEST:
            raise BadInput('data file', path, f'is a list of more than {LARGEST} bytes; make it JSONL or Parquet')
        file.seek(0)
        try:
            text = file.read().decode('utf-8-sig')
            rows = json.loads(text, object_pairs_hook=_make_dict, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise BadInput('data file', path, f'{error}; fetch it again, or mend it') from None
    for index, row in enumerate(rows):
        where = f'{path}, row {index}'
        try:
            row = _check_row(row, text)
        except ValueError as error:
            row = BadInput(where, shorten(row), f'{error}; mend or remove the row')
        yield where, row


def _lines(file):
    """Yields each line of a binary file; of a line longer than LONGEST, the first LONGEST + 1 bytes."""
    while line := file.readline(LONGEST + 1):
        piece = line
        while len(piece) > LONGEST and not piece.endswith(b'\n'):
            piece = file.readline(LONGEST + 1)
        yield line


def _check_row(row, text):
    """The row, parsed from `text`; raises ValueError unless it is an object whose texts UTF-8 can write."""
    if not isinstance(row, dict):
        raise ValueError('must be an object with named fields')
    if '\\u' in text:
        json.dumps(row, ensure_ascii=False).encode('utf8')  # raises on half a surrogate pair
    return row


def _make_dict(pairs):
    """The pairs as a dict; raises ValueError for a key that comes twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f'a key comes twice in {[key for key, _ in pairs]}')
    return row


def _refuse_constant(constant):
    """Raises ValueError for NaN or an infinity, which json.loads hands over."""
    raise ValueError(f'{constant} is not JSON')
