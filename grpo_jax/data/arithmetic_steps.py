"""Worked additions of grpo_jax.data.arithmetic, some with a wrong step, and a label for each step."""

import numpy as np

from grpo_jax.data import arithmetic, step_labels


def examples(split, *, digits, count, blurts, wrong, slips):
    """The sums of arithmetic.examples; with probability `slips` one digit of a worked demonstration is changed.

    meta['steps'] lists the columns and the answer, or the bare answer of a blurt; meta['labels'] says of each whether
    it is as it should be: 1.0 before the first wrong one, 0.0 for that, None behind it.
    """
    rng = np.random.default_rng((digits, split == 'test', 1))
    found = []
    for example in arithmetic.examples(split, digits=digits, count=count, blurts=blurts, wrong=wrong):
        text = example.meta['demonstration']
        should = arithmetic.worked(*map(int, example.prompt[:-1].split('+'))).split(' ')
        if ' ' in text and rng.random() < slips:
            text = _slipped(rng, text)
        steps = text.split(' ')
        same = [a == b for a, b in zip(steps, should[-len(steps) :], strict=True)]
        labels = step_labels.until(same.index(False) if False in same else len(same), len(same))
        found.append(example._replace(meta={'steps': steps, 'labels': labels}))
    return found


def _slipped(rng, text):
    """The text with one digit changed."""
    places = [i for i, mark in enumerate(text) if mark.isdigit()]
    place = places[rng.integers(len(places))]
    return text[:place] + str((int(text[place]) + rng.integers(1, 10)) % 10) + text[place + 1 :]
