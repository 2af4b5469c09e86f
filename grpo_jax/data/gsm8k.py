"""GSM8K (arXiv 2110.14168): grade-school word problems; the gold number follows ####."""

import re

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example

FILES = 'gsm8k_'


def examples(split: str, *, folder: str, subset: str = 'main') -> list[Example | BadInput]:
    """Reads folder/gsm8k_<split>.jsonl, or other files that files.rows reads, as from openai/gsm8k on the hub.

    subset: main, or socratic, whose solutions have a question before each step. meta has the solution as demonstration.
    """
    return convert_rows(_example, files.rows(folder, split, FILES, subset))


def _example(row, index, where):
    """The Example of a row of GSM8K; raises BadInput for a malformed row, and for one without ####."""
    solution = text_field(row, 'answer', where)
    return Example(text_field(row, 'question', where), gold(solution, where), index, {'demonstration': solution})


def gold(solution: str, where: str) -> str:
    """The text of the number after the last ####, without thousands separators; raises BadInput(where) without one."""
    number = solution.rpartition('####')[2].strip().replace(',', '')
    if '####' not in solution or not re.fullmatch(r'-?\d*\.?\d+', number):
        raise BadInput(where, shorten(solution[-60:]), 'has no #### line with the gold number; mend or remove the row')
    return number
