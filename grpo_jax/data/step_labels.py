"""Solutions with labelled steps, in the forms of MR-GSM8K (arXiv 2312.17080), BIG-Bench Mistake (arXiv 2311.08516),
PRM800K (arXiv 2305.20050), Math-Shepherd (arXiv 2312.08935) and TRL.
"""

import functools
import os
import re
from typing import Annotated
import zlib

import numpy as np

from grpo_jax.data import files, jsonl
from grpo_jax.data.records import convert_rows, get_field, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.ranges import Range, Texts
from grpo_jax.types import Example

# the fields with problem, gold answer and number of the first wrong step, and the number that the first step has
MR_GSM8K = 'question', 'gold', 'first_error_step', 1
BIG_BENCH = 'input', 'target', 'mistake_index', 0
FILES = ''
KINDS = '()', '[]', '{}', '<>'


def examples(
    split: str,
    *,
    folder: str,
    subset: str = '',
    tasks: Texts = (),
    exchanges: Annotated[int, Range(least=0, most=1000)] = 0,
) -> list[Example | BadInput]:
    """Reads a split (see files.rows), whose rows have the form of PRM800K, Math-Shepherd or TRL (see _rated_example).

    With `tasks`, reads folder/<task>.jsonl for each task instead, in the form of MR-GSM8K or BIG-Bench Mistake; a fixed
    fifth of the problems is the test split. meta['steps'] lists a solution's steps. meta['labels'] has a label for each
    step: 1.0 before the first wrong step, 0.0 for this step, None after it. Each training problem of dyck_languages
    gets `exchanges` copies with its kinds of brackets exchanged, which changes no label. Problems that differ only in
    kinds of brackets are in one split.
    """
    if not tasks:
        return convert_rows(_rated_example, files.rows(folder, split, subset=subset))
    labelled, rng = [], np.random.default_rng(0)
    for task in tasks:
        example = functools.partial(_example, task)
        for row in convert_rows(example, jsonl.read(os.path.join(folder, f'{task}.jsonl'))):
            if isinstance(row, BadInput):
                labelled.append(row)
            elif (zlib.crc32(_rename_brackets(row.prompt.rstrip()).encode()) % 5 == 0) == (split == 'test'):
                labelled.append(row._replace(id=len(labelled)))
                if task.endswith('dyck_languages') and split == 'train':
                    for _ in range(exchanges):
                        labelled.append(_exchange(labelled[-1]._replace(id=len(labelled)), rng.permutation(4)))
    return labelled


def _example(task, row, index, where):
    """The Example of a row of MR-GSM8K (one with a question) or BIG-Bench Mistake; BadInput for a malformed row."""
    problem_field, answer_field, error_field, base = MR_GSM8K if 'question' in row else BIG_BENCH
    steps, wrong = row.get('steps'), row.get(error_field)  # wrong: number of the first wrong step
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise BadInput(where, shorten(steps), "field 'steps' must be a list of texts; mend or remove the row")
    if wrong is not None and (type(wrong) is not int or not base <= wrong < len(steps) + base):
        remedy = f'field {error_field!r} must be one of {base} to {len(steps) + base - 1}, or null; mend the row'
        raise BadInput(where, shorten(wrong), remedy)
    labels = label_until(len(steps) if wrong is None else wrong - base, len(steps))
    filled = [i for i, step in enumerate(steps) if step.strip()]  # a blank line is no step
    meta = {'task': task, 'steps': [steps[i] for i in filled], 'labels': [labels[i] for i in filled]}
    return Example(f'{text_field(row, problem_field, where)}\n', text_field(row, answer_field, where), index, meta)


def _rated_example(row, index, where):
    """The Example of a row whose steps are rated; raises BadInput for a malformed row, and for one of another form.

    PRM800K: question.problem, and label.steps, whose completions have text and rating. A step is the chosen completion,
    else human_completion, else the first one; neutral steps count as right. Math-Shepherd: input, a problem with
    `Step 1: ... ки`, and label, the same with + or - for each ки. TRL: prompt, completions and labels. The answer is
    question.ground_truth_answer where there is one.
    """
    prompt, steps, labels = row.get('prompt'), row.get('completions'), row.get('labels')
    if isinstance(rated := get_field(row, 'label.steps'), list):
        prompt, steps = get_field(row, 'question.problem'), []
        labels = []
        for step in (step for step in rated if isinstance(step, dict)):
            chosen, by_person = step.get('chosen_completion'), get_field(step, 'human_completion.text')
            path = 'human_completion' if chosen is None and by_person else f'completions.{chosen or 0}'
            steps.append(get_field(step, f'{path}.text'))
            labels.append(float(get_field(step, f'{path}.rating') != -1))
    elif isinstance(row.get('label'), str):
        prompt, *parts = re.split(r'(?=Step 1:)', text_field(row, 'input', where), maxsplit=1)
        steps = [part.strip() for part in ''.join(parts).split('ки') if part.strip()]
        labels = [float(sign == '+') for sign in re.findall(r'([+-])\s*(?:\n|$)', row['label'])]
    if not (isinstance(steps, list) and steps and isinstance(labels, list) and len(steps) == len(labels)):
        raise BadInput(where, shorten(row), 'has no steps with a label each, in a form that is known; mend the row')
    if not all(isinstance(step, str) for step in steps) or not all(label in (0, 1) for label in labels):
        raise BadInput(where, shorten((steps, labels)), 'must be texts, and labels 0 or 1; mend or remove the row')
    text = text_field({'prompt': prompt}, 'prompt', where).strip()
    answer = get_field(row, 'question.ground_truth_answer')
    return Example(f'{text}\n', str(answer or ''), index, {'steps': steps, 'labels': [*map(float, labels)]})


def _rename_brackets(text):
    """The text with its kinds of brackets renamed in order of appearance: the first becomes KINDS[0], and so on."""
    seen = dict.fromkeys(next(kind for kind in KINDS if mark in kind) for mark in text if mark in ''.join(KINDS))
    return text.translate(str.maketrans(''.join(seen), ''.join(KINDS[: len(seen)])))


def _exchange(example, order):
    """The example with kind i of brackets replaced by kind order[i]."""
    table = str.maketrans(''.join(KINDS), ''.join(KINDS[i] for i in order))
    meta = example.meta | {'steps': [step.translate(table) for step in example.meta['steps']]}
    return example._replace(prompt=example.prompt.translate(table), answer=example.answer.translate(table), meta=meta)


def label_until(first: int, count: int) -> list[float | None]:
    """Labels of `count` steps: 1.0 before the first wrong step, whose index is `first`, 0.0 for it, None after it.

    If all steps are right, first = count.
    """
    return [1.0 if i < first else 0.0 if i == first else None for i in range(count)]
