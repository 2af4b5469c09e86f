r"""MATH (arXiv 2103.03874): competition problems with answers in LaTeX; the answer is the solution's last \boxed{}."""

import itertools
import os
import re

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example

FILES = 'math'
SUBJECTS = (
    *('algebra', 'counting_and_probability', 'geometry', 'intermediate_algebra', 'number_theory', 'prealgebra'),
    'precalculus',
)  # subsets of EleutherAI/hendrycks_math, in the order of their rows here


def examples(split: str, *, folder: str, subset: str = '') -> list[Example | BadInput]:
    """Reads folder/math_<split>.jsonl, or other files that files.rows reads; math500.jsonl is the split math500.

    On the hub: EleutherAI/hendrycks_math (all subjects, or one as `subset`), DigitalLearningGmbH/MATH-lighteval, and
    HuggingFaceH4/MATH-500, which has the test split alone. meta has subject, level (int), each None where the row has
    none, and the solution, if there is one, as demonstration.
    """
    prefix = '' if split == 'math500' else 'math_'
    if not subset and os.path.isdir(os.path.join(folder, SUBJECTS[0])):
        rows = itertools.chain(*(files.rows(os.path.join(folder, subject), split) for subject in SUBJECTS))
    else:
        rows = files.rows(folder, split, prefix, subset)
    return convert_rows(_example, rows)


def _example(row, index, where):
    """The Example of a row of MATH; raises BadInput for a malformed row, and for one without answer or box."""
    level = re.fullmatch(r'(?:Level )?(\d+)', str(row.get('level')))
    meta = {'subject': row.get('subject') or row.get('type') or None, 'level': int(level[1]) if level else None}
    if row.get('solution'):
        meta['demonstration'] = text_field(row, 'solution', where)
    if row.get('answer') is not None or 'demonstration' not in meta:
        answer = text_field(row, 'answer', where)
    else:
        answer = last_boxed(meta['demonstration'])
        if not answer:
            raise BadInput(
                where, shorten(meta['demonstration'][-60:]), r'has no \boxed{} with the answer; mend or remove the row'
            )
    return Example(text_field(row, 'problem', where), answer, index, meta)


def last_boxed(solution: str) -> str | None:
    r"""The content of a solution's last \boxed{} or \fbox{}, without spaces around it.

    None without a box, and for one that is empty or does not close. After \boxed without braces, as in $\boxed 5$, the
    content reaches to the end of the formula or line.
    """
    boxes = list(re.finditer(r'\\(?:boxed|fbox)(?![A-Za-z])\s*', solution))
    tail = solution[boxes[-1].end() :] if boxes else ''
    if not tail.startswith('{'):
        return re.split(r'\$|\\[\])]|\n', tail)[0].strip() or None
    depth = 0
    for match in re.finditer(r'\\.|[{}]', tail, re.DOTALL):
        depth += {'{': 1, '}': -1}.get(match[0], 0)
        if not depth and match[0] == '}':
            return tail[1 : match.start()].strip() or None
    return None
