"""SVAMP (arXiv 2103.07191): short word problems, each a change of a simpler one; the answer is a number."""

import functools
import os
import re
from typing import Annotated
import zlib

from grpo_jax.data import files, renumber
from grpo_jax.data.records import convert_rows, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.ranges import PositiveShare, Range
from grpo_jax.types import Example

FILES = 'svamp'
Variants = Annotated[int, Range(least=0, most=1000)]


def examples(
    split: str, *, folder: str, held_out: PositiveShare = 1.0, results: bool = True, variants: Variants = 0
) -> list[Example | BadInput]:
    """Reads folder/svamp_<split>.jsonl, or other files that files.rows reads, as from ChilleD/SVAMP on the hub.

    folder/svamp.jsonl is the whole challenge set, which its authors do not split. The share `held_out` of its stories,
    by default all, is the test split; problems whose first sentences differ only in numbers are one story. A row has
    Body, Question, Answer, Type and Equation, or problem, answer, type and equation. meta has the type as subject and
    the equation as demonstration: `43 - 21 = 22`, or without `results` its left side. In the train split, up to
    `variants` copies of each row with other numbers (data/renumber.py) follow the rows.
    """
    whole = os.path.isfile(os.path.join(folder, 'svamp.jsonl')) and (split == 'test' or held_out < 1)
    examples = convert_rows(
        functools.partial(_example, results=results),
        files.rows(folder, 'svamp' if whole else split, '' if whole else 'svamp_'),
    )
    rows = len(examples)
    if whole:
        in_test = split == 'test'
        examples = [e for e in examples if not isinstance(e, Example) or (_story_hash(e.prompt) < held_out) == in_test]
    if split != 'train' or not variants:
        return examples
    sound = [e for e in examples if isinstance(e, Example)]
    copies = (renumber.change_numbers(e, e.id + rows * (i + 1)) for i in range(variants) for e in sound)
    return examples + [e for e in copies if e is not None]


def _story_hash(problem):
    """A hash in [0, 1) of the problem's first sentence without its numbers."""
    story = re.sub(r'\d+', '', re.split(r'(?<=[.?!])\s', problem)[0])
    return zlib.crc32(story.encode()) / 2**32


def _example(row, index, where, results):
    """The Example of a row of SVAMP; results: as in examples. Raises BadInput for a malformed row."""
    if 'Body' in row:
        body = text_field(row, 'Body', where).strip()
        prompt = f'{body}{"" if body[-1] in ".!?" else "."} {text_field(row, "Question", where).strip()}'
    else:
        prompt = text_field(row, 'problem', where)
    answer = text_field(row, 'Answer' if 'Answer' in row else 'answer', where).strip()
    if not re.fullmatch(r'-?\d+(\.\d+)?', answer):
        raise BadInput(where, shorten(answer), 'the answer must be a number; mend or remove the row')
    answer = re.sub(r'\.0+$', '', answer)
    subject = str(row.get('Type') or row.get('type') or '').replace('Divison', 'Division')  # some rows misspell it
    equation = re.sub(r'\.0\b', '', str(row.get('Equation') or row.get('equation') or ''))
    expression = equation.removeprefix('( ').removesuffix(' )')
    demonstration = {'demonstration': f'{expression} = {answer}' if results else expression} if equation else {}
    return Example(prompt, answer, index, {'subject': subject or None} | demonstration)
