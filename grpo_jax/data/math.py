"""MATH (arXiv 2103.03874): competition problems with answers in LaTeX."""

from grpo_jax.data import files
from grpo_jax.data.records import checked, text_field
from grpo_jax.types import Example


def examples(split, *, folder):
    """Examples of folder/math_<split>.jsonl, or of what else files.rows finds; math500.jsonl is the split math500.

    meta has subject and level, None where the row does not tell, and its solution, if it has one, as demonstration.
    """
    return checked(_example, files.rows(folder, split, '' if split == 'math500' else 'math_'))


def _example(row, index, where):
    meta = {field: row.get(field) or None for field in ('subject', 'level')}
    if row.get('solution'):
        meta['demonstration'] = text_field(row, 'solution', where)
    return Example(text_field(row, 'problem', where), text_field(row, 'answer', where), index, meta)
