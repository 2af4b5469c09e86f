"""SVAMP (arXiv 2103.07191): short word problems, each a change of a simpler one; the answer is a number."""

import os
import re

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example

FILES = 'svamp'


def examples(split: str, *, folder: str) -> list[Example | BadInput]:
    """Examples of folder/svamp_<split>.jsonl, or of other files that files.rows reads; ChilleD/SVAMP on the hub.

    folder/svamp.jsonl is the whole challenge set, which its authors do not split: it is the split test. A row has Body,
    Question, Answer and Type, or problem, answer and type; meta has the type as subject.
    """
    whole = split == 'test' and os.path.isfile(os.path.join(folder, 'svamp.jsonl'))
    return convert_rows(_example, files.rows(folder, 'svamp' if whole else split, '' if whole else 'svamp_'))


def _example(row, index, where):
    if 'Body' in row:
        body = text_field(row, 'Body', where).strip()
        prompt = f'{body}{"" if body[-1] in ".!?" else "."} {text_field(row, "Question", where).strip()}'
    else:
        prompt = text_field(row, 'problem', where)
    answer = text_field(row, 'Answer' if 'Answer' in row else 'answer', where).strip()
    if not re.fullmatch(r'-?\d+(\.\d+)?', answer):
        raise BadInput(where, shorten(answer), 'the answer must be a number; mend or remove the row')
    answer = re.sub(r'\.0+$', '', answer)
    subject = str(row.get('Type') or row.get('type') or '').replace('Divison', 'Division')  # as some rows have it
    return Example(prompt, answer, index, {'subject': subject or None})
