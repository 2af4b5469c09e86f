"""MATH (arXiv 2103.03874): competition problems with answers in LaTeX."""

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example


def examples(split: str, *, folder: str) -> list[Example | BadInput]:
    """Examples of folder/math_<split>.jsonl, or of other files that files.rows reads.

    math500.jsonl is the split math500. meta has subject and level, None where the row has none, and the row's
    solution, if it has one, as demonstration.
    """
    return convert_rows(_example, files.rows(folder, split, '' if split == 'math500' else 'math_'))


def _example(row, index, where):
    meta = {field: row.get(field) or None for field in ('subject', 'level')}
    if row.get('solution'):
        meta['demonstration'] = text_field(row, 'solution', where)
    return Example(text_field(row, 'problem', where), text_field(row, 'answer', where), index, meta)
