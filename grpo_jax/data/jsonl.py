"""Examples from a JSONL file with named fields."""
import json
import os

from grpo_jax.errors import BadInput
from grpo_jax.types import Example


def read(path):
    """The rows of a JSONL file as dicts; BadInput names the file and line of a malformed one."""
    if not os.path.isfile(path):
        raise BadInput('data file', path, 'no such file; set GRPO_JAX_DATA or data.options')
    rows = []
    with open(path, 'rb') as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line.decode('utf8'))
            except ValueError as error:  # of the JSON or of its encoding
                raise BadInput(f'{path}, line {number}', line[:80], f'not JSON ({error}); mend the row') from None
            if not isinstance(row, dict):
                raise BadInput(f'{path}, line {number}', line[:80], 'must be an object with named fields')
            rows.append(row)
    return rows


def text_field(row, field, where):
    """row[field], a string or number, as text; BadInput when it is missing or of another type."""
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadInput(where, value, f'field {field!r} must be text or a number; the row has {sorted(row)}')
    return str(value)


def examples(split, *, folder, prompt_field, answer_field):
    """Examples of folder/<split>.jsonl; ids are line numbers, other fields go into meta."""
    path = os.path.join(folder, f'{split}.jsonl')
    return [Example(text_field(row, prompt_field, f'{path}, line {i + 1}'),
                    text_field(row, answer_field, f'{path}, line {i + 1}'), i, row)
            for i, row in enumerate(read(path))]
