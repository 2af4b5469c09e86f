"""Solutions whose first wrong step is marked: MR-GSM8K (arXiv 2312.17080) and BIG-Bench Mistake (arXiv 2311.08516)."""

import functools
import os
import zlib

import numpy as np

from grpo_jax.data import jsonl
from grpo_jax.data.records import checked, short, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example

# names of problem, gold answer and first wrong step, and what the first step counts as
MR_GSM8K = 'question', 'gold', 'first_error_step', 1
BIG_BENCH = 'input', 'target', 'mistake_index', 0
KINDS = '()', '[]', '{}', '<>'


def examples(split, *, folder, tasks, exchanges):
    """Examples of folder/<task>.jsonl for each task; a fixed fifth of the problems is the test split.

    meta['steps'] lists the steps of a solution; meta['labels'] says of each whether it is right: 1.0 before the first
    wrong one, 0.0 for that, None behind it. A training problem of dyck_languages comes `exchanges` times more, with
    its kinds of brackets exchanged, which changes no label; problems that differ in them alone are in one split.
    """
    found, rng = [], np.random.default_rng(0)
    for task in tasks:
        example = functools.partial(_example, task)
        for made in checked(example, jsonl.read(os.path.join(folder, f'{task}.jsonl'))):
            if isinstance(made, BadInput):
                found.append(made)
            elif (zlib.crc32(_canonical(made.prompt.rstrip()).encode()) % 5 == 0) == (split == 'test'):
                found.append(made._replace(id=len(found)))
                if task.endswith('dyck_languages') and split == 'train':
                    for _ in range(exchanges):
                        found.append(_exchanged(found[-1]._replace(id=len(found)), rng.permutation(4)))
    return found


def _example(task, row, index, where):
    problem, answer, marked, base = MR_GSM8K if 'question' in row else BIG_BENCH
    steps = row.get('steps')
    labels = _labels(steps, row.get(marked), base, where)
    said = [i for i, step in enumerate(steps) if step.strip()]  # a blank line is no step
    meta = {'task': task, 'steps': [steps[i] for i in said], 'labels': [labels[i] for i in said]}
    return Example(f'{text_field(row, problem, where)}\n', text_field(row, answer, where), index, meta)


def _canonical(text):
    """The text with its kinds of brackets put in the order of KINDS, as they appear."""
    seen = dict.fromkeys(next(kind for kind in KINDS if mark in kind) for mark in text if mark in ''.join(KINDS))
    return text.translate(str.maketrans(''.join(seen), ''.join(KINDS[: len(seen)])))


def _exchanged(example, order):
    """The example with its kinds of brackets in another order."""
    table = str.maketrans(''.join(KINDS), ''.join(KINDS[i] for i in order))
    meta = example.meta | {'steps': [step.translate(table) for step in example.meta['steps']]}
    return example._replace(prompt=example.prompt.translate(table), answer=example.answer.translate(table), meta=meta)


def _labels(steps, marked, base, where):
    """Labels of steps of which the marked one, counted from base, is the first wrong one; None: none is."""
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise BadInput(where, short(steps), "field 'steps' must be a list of texts")
    if marked is None:
        return until(len(steps), len(steps))
    if not isinstance(marked, int) or not base <= marked < len(steps) + base:
        raise BadInput(
            where, short(marked), f'the first wrong step must be one of {base} to {len(steps) + base - 1}, or null'
        )
    return until(marked - base, len(steps))


def until(first, count):
    """Labels of `count` steps of which that of index `first` is the first wrong one; count: none is."""
    return [1.0 if i < first else 0.0 if i == first else None for i in range(count)]
