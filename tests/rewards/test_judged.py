"""Endings of completions as models write them, judged by hand, and how many the mathematics verifier misjudges.

A row has its kind (`choice`: multiple choice; `script`: Chinese, Japanese, Korean, Russian, Hindi, Arabic; `rest`:
signs in words, sentences, separators, clock times, units, intervals, ...), the gold answer, the ending, and whether the
ending is right. `judged.jsonl` was written before the verifier read any of this, the others afterwards.
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


# of each 100 right endings of a kind at most 5 are refused, and of the wrong ones none is paid, but two of judged_more
@pytest.mark.parametrize('name, most_paid', [('judged.jsonl', 0), ('judged_after.jsonl', 0), ('judged_more.jsonl', 2)])
@pytest.mark.parametrize('kind', ['choice', 'script', 'rest'])
def test_endings_judged_by_hand(name, most_paid, kind, pool):
    rows, paid, refused = misjudged(name, kind, pool)
    assert len(rows) >= 20
    assert len(paid) <= most_paid, paid
    assert len(refused) <= 0.05 * sum(row['right'] for row in rows), refused
    assert (len(paid) + len(refused)) <= 0.05 * len(rows)


def example(gold, problem='How much?'):
    return Example(problem, gold, 0, {})


def test_a_percentage_answers_a_decimal_only_where_the_option_says_so(pool):
    for gold, text in [('0.25', r'25\%'), (r'25\%', '0.25'), (r'\frac{1}{4}', '25 percent')]:
        for percent in (False, True):
            assert math.reward(f'\\boxed{{{text}}}', example(gold), pool=pool, percent=percent) == percent
            assert math.strict(f'\\boxed{{{text}}}', example(gold), pool=pool, percent=percent) == percent
    assert math.reward(r'\boxed{25}', example('0.25'), pool=pool, percent=True) == 0
    assert math.reward(r'\boxed{2.5\%}', example('0.25'), pool=pool, percent=True) == 0


def test_a_quantity_of_the_problem_in_its_own_unit_is_no_answer_in_another(pool):
    problem = 'How many hours are 90 minutes?'
    assert math.reward(r'\boxed{90\text{ minutes}}', example('1.5 hours', problem), pool=pool) == 0
    assert math.reward(r'\boxed{1.5\text{ hours}}', example('1.5 hours', problem), pool=pool) == 1
    assert math.reward(r'\boxed{90\text{ minutes}}', example('1.5 hours'), pool=pool) == 1


@pytest.mark.parametrize('gold', ['proof', 'Not found', 'N/A', 'see solution'])
def test_what_stands_for_a_missing_answer_is_none(gold, pool):
    assert math.reward(f'\\boxed{{{gold}}}', example(gold), pool=pool) is None
