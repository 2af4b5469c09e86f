"""The worked additions of grpo_jax.data.arithmetic, some with a wrong step, and a label for each step."""

import numpy as np

from grpo_jax.data import arithmetic, step_labels
from grpo_jax.data.arithmetic import Digits, Rows
from grpo_jax.ranges import Share
from grpo_jax.types import Example


def examples(split: str, *, digits: Digits, count: Rows, blurts: Share, wrong: Share, slips: Share) -> list[Example]:
    """The Examples of arithmetic.examples, with steps and their labels in place of demonstrations.

    meta['steps'] lists the columns and the answer of a demonstration, or a blurt's bare answer; one digit of a worked
    demonstration is changed with probability `slips`. meta['labels'] has a label for each step: 1.0 before the first
    wrong step, 0.0 for this step, None after it.
    """
    rng = np.random.default_rng((digits, split == 'test', 1))
    labelled = []
    for example in arithmetic.examples(split, digits=digits, count=count, blurts=blurts, wrong=wrong):
        text = example.meta['demonstration']
        right = arithmetic.work_out(*map(int, example.prompt[:-1].split('+'))).split(' ')
        if ' ' in text and rng.random() < slips:
            places = [i for i, mark in enumerate(text) if mark.isdigit()]
            place = places[rng.integers(len(places))]
            digit = (int(text[place]) + rng.integers(1, 10)) % 10
            text = text[:place] + str(digit) + text[place + 1 :]
        steps = text.split(' ')
        same = [a == b for a, b in zip(steps, right[-len(steps) :], strict=True)]
        labels = step_labels.label_until(same.index(False) if False in same else len(same), len(same))
        labelled.append(example._replace(meta={'steps': steps, 'labels': labels}))
    return labelled
