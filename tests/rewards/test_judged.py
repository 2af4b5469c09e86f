"""Endings of completions as models write them, judged by hand, and how many the mathematics verifier misjudges.

`judged.jsonl` has a row each: its kind (`choice`: multiple choice; `script`: Chinese, Japanese, Korean, Russian, Hindi,
Arabic; `rest`: signs in words, sentences, separators, clock times, units, intervals, ...), the gold answer, the ending,
and whether the ending is right.
"""

import json
import pathlib

import pytest

from grpo_jax.rewards import math
from grpo_jax.types import Example
from grpo_jax.workers import Pool


@pytest.fixture(scope='module')
def pool():
    pool = Pool(1, deadline=60.0, memory_gib=2.0)
    yield pool
    pool.close()


def misjudged(name, kind, pool):
    """The rows of a kind that are paid and wrong, and those that are right and refused, each as (gold, ending)."""
    lines = pathlib.Path(__file__).with_name(name).read_text(encoding='utf8').splitlines()
    rows = [row for row in map(json.loads, lines) if row['kind'] == kind]
    paid, refused = [], []
    for row in rows:
        reward = math.reward(row['ending'], Example('How much?', row['gold'], 0, {}), pool=pool)
        if reward != row['right']:
            (refused if row['right'] else paid).append((row['gold'], row['ending']))
    return rows, paid, refused


@pytest.mark.parametrize('kind, most_paid, most_refused', [('choice', 0, 18), ('script', 0, 36), ('rest', 6, 24)])
def test_endings_judged_by_hand(kind, most_paid, most_refused, pool):
    rows, paid, refused = misjudged('judged.jsonl', kind, pool)
    assert len(rows) == 2 * sum(row['right'] for row in rows)
    print(f'{kind}: {len(rows)} endings, {len(paid)} paid wrongly {paid}, {len(refused)} refused wrongly {refused}')
    assert len(paid) <= most_paid, paid
    assert len(refused) <= most_refused, refused
