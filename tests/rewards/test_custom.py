"""What goes wrong in a file of one's own rewards is one line that names the file's line."""

import asyncio
import os
import pickle
import re

import numpy as np
import pytest
from test_scoring import compute, example, make

from grpo_jax import rewards
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold

FILE = """\
import asyncio

def divides(completion, example):
    return deeper(len(completion))

def deeper(length):
    return 1 / (length - 1)

async def asks(completion, example):
    await asyncio.sleep(0)
    return [][len(completion)]

def of_all(completions, examples):
    return [int(text) for text in completions]

def leaves(completion, example):
    raise SystemExit('now')

def says(completion, example):
    return 'good'

async def says_later(completion, example):
    return 'good'

def says_all(completions, examples):
    return ['good' for _ in completions]

def too_few(completions, examples):
    return [1.0]

def endless(completion, example):
    return float('inf')

def many(completion, example):
    return {'nan': float('nan'), 'none': None, 'true': True, '2': 2}[completion]

def both(completions, examples):
    return 1.0

def extract(completion):
    return completion.split()[7]

def steps(completion, example):
    return [(3, 1.0), len(completion)]

async def asks_all(completions, examples):
    return [1.0]

def waits(completion, example):
    raise TimeoutError('of a judge')

async def waits_later(completion, example):
    raise TimeoutError('of a judge')

def too_deep(completion, example):
    return too_deep(completion, example)
"""


@pytest.fixture(scope='module')
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp('own') / 'mine.py'
    path.write_text(FILE, encoding='utf8')
    return str(path)


def line_of(text):
    return FILE.splitlines().index(text) + 1


@pytest.mark.parametrize(
    'name, line, words',
    [
        ('divides', '    return 1 / (length - 1)', 'ZeroDivisionError: division by zero'),
        ('asks', '    return [][len(completion)]', 'IndexError: list index out of range'),
        ('of_all', '    return [int(text) for text in completions]', 'ValueError: invalid literal'),
        ('leaves', "    raise SystemExit('now')", 'SystemExit: now'),
        ('says', 'def says(completion, example):', "returned 'good', and a reward is a finite number"),
        ('says_later', 'async def says_later(completion, example):', "returned 'good'"),
        ('says_all', 'def says_all(completions, examples):', "returned 'good'"),
        ('too_few', 'def too_few(completions, examples):', r'returned \[1.0\], and not a list of 2 rewards'),
        ('both', 'def both(completions, examples):', 'returned 1.0, and not a list of 2 rewards'),
        ('endless', 'def endless(completion, example):', 'returned inf'),
    ],
)
def test_what_a_reward_does_wrong_is_named_with_its_line(file, name, line, words):
    with make((f'{file}:{name}', 1.0)) as reward_functions, pytest.raises(BadInput) as error:
        compute(reward_functions, [example('1')], ['a', 'b'])
    text = str(error.value)
    assert re.match(f"reward = '{file}:{name}': {file}, line {line_of(line)}: .*{words}.*; mend the file$", text), text


def test_numbers_nan_and_none_are_rewards(file):
    with make((f'{file}:many', 1.0)) as reward_functions:
        _, parts = compute(reward_functions, [example('1')], ['2', 'true', 'nan', 'none'])
    np.testing.assert_array_equal(parts['many'], [2.0, 1.0, np.nan, np.nan])


def test_what_a_verifier_and_steps_do_wrong_is_named_too(file):
    with make((f'{file}:many', 1.0), verifier='many', step_rewards=f'{file}:many') as reward_functions:
        with pytest.raises(BadInput, match=rf'line {line_of("    return completion.split()[7]")}: IndexError'):
            reward_functions.extract('one two')
        with pytest.raises(BadInput, match=rf'line {line_of("def steps(completion, example):")}: returned .*pairs'):
            reward_functions.steps(['one two'], [example('1')])


def test_the_gold_self_test_names_the_line(file):
    with make((f'{file}:many', 1.0), verifier='many') as reward_functions, pytest.raises(BadInput, match='KeyError'):
        gold.check(reward_functions, [example('1')])


@pytest.mark.parametrize(
    'text, line, words',
    [
        ('import json\n\n\ndef f(completion, example)\n    return 1.0\n', 4, "SyntaxError: expected ':'"),
        ('import numpy\nimport no_such_module\n', 2, "ModuleNotFoundError: No module named 'no_such_module'"),
        ('def g():\n    return {}["key"]\n\n\nx = g()\n', 2, "KeyError: 'key'"),
        ('raise SystemExit\n', 1, 'SystemExit'),
        ('raise ValueError("one\\n  two")\n', 1, 'ValueError: one two'),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_before_anything_starts(tmp_path, text, line, words):
    path = tmp_path / 'mine.py'
    path.write_text(text, encoding='utf8')
    with pytest.raises(BadInput) as error:
        make((f'{path}:f', 1.0))
    assert f'{path}, line {line}: {words}; mend the file' in str(error.value)


def test_a_function_that_is_async_and_takes_all_completions_is_refused(file):
    with pytest.raises(BadInput, match='is async and takes all completions; choose one'):
        make((f'{file}:asks_all', 1.0))


def test_a_function_of_a_notebook_keeps_its_traceback():
    def broken(completion, example):
        raise KeyError('mine')

    async def broken_later(completion, example):
        await asyncio.sleep(0)
        raise KeyError('mine')

    for function in (broken, broken_later):
        with make(('mine', 1.0), functions={'mine': function}) as reward_functions, pytest.raises(KeyError) as error:
            compute(reward_functions, [example('1')], ['a'])
        assert error.traceback[-1].path == type(error.traceback[-1].path)(__file__)


def test_bad_input_survives_the_pipe_of_a_worker():
    error = pickle.loads(pickle.dumps(BadInput('reward', os.path.sep, 'no\nnumber')))
    assert type(error) is BadInput and str(error) == "reward = '/': no\nnumber"


@pytest.mark.parametrize('name', ['waits', 'waits_later', 'too_deep'])
def test_a_completion_that_runs_out_of_time_or_stack_is_counted_and_stops_nothing(file, name):
    with make((f'{file}:{name}', 1.0), failed=-0.5) as reward_functions:
        rewarded = rewards.compute_rewards(reward_functions, [example('1')], ['a'], [False], [1])
    assert rewarded.rewards.tolist() == [-0.5]
    assert rewarded.failures['died' if name == 'too_deep' else 'expired'].tolist() == [True]
