"""How rewards are found, run and added up: threads, files, coroutines, batches, failures."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from grpo_jax import rewards
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold
from grpo_jax.types import Example


def example(answer):
    return Example('question', answer, 0, {})


def make(*parts, verifier='', functions=None, options=None, workdir=os.devnull, **changes):
    section = default.get_config().reward
    section.update({'parts': parts, 'verifier': verifier, 'retries': 0} | changes)
    if options:
        section.options = options
    return rewards.build(rewards.RewardOptions.from_config(section), 64, functions, workdir)


def compute(reward_functions, examples, texts, truncated=None):
    """(rewards, parts) of completions; their lengths play no role."""
    none = np.zeros(len(texts), bool)
    rewarded = rewards.compute_rewards(
        reward_functions, examples, texts, none if truncated is None else truncated, np.zeros(len(texts), int)
    )
    return rewarded.rewards, rewarded.parts


class Letters:
    """A tokenizer of one letter a token."""

    eos_token_id = pad_token_id = None

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        assert not (skip_special_tokens or clean_up_tokenization_spaces)
        return ''.join('0123456789'[token] for token in tokens)


def test_scoring_as_rows_come_in_equals_scoring_all_at_once():
    reward_functions = make(('numeric', 1.0), ('format', 0.5), truncated_reward=-1.0, verifier='numeric')
    examples = [example('12'), example('7')]
    completions = [[1, 2], [7], [7], [1, 2, 3]]
    stream = rewards.RewardStream(reward_functions, examples, 2, Letters())
    for row in (2, 0, 3, 1):
        stream.add(row, completions[row], row == 3)
    rewarded = stream.results()
    assert rewarded.texts.tolist() == ['12', '7', '7', '123'] and rewarded.lengths.tolist() == [2, 1, 1, 3]
    expected, expected_parts = compute(reward_functions, examples, rewarded.texts, [False, False, False, True])
    np.testing.assert_array_equal(rewarded.rewards, expected)
    np.testing.assert_array_equal(rewarded.truncated, [False, False, False, True])
    assert all(np.array_equal(rewarded.parts[name], expected_parts[name]) for name in ('numeric', 'format'))


def judged(reward_functions, answers):
    """What the verifier says of completions by these names."""
    none = np.zeros(len(answers), bool)
    return rewards.compute_rewards(reward_functions, [example('1')] * len(answers), answers, none, none * 1).correct


def test_correct_is_what_the_verifier_says_whatever_else_is_paid():
    values = {'right': 1.0, 'wrong': 0.0, 'half': 0.5, 'unknown': None, 'nan': float('nan')}

    def verifier(completion, example):
        if completion == 'slow':
            raise TimeoutError
        return values[completion]

    parts = dict(functions={'mine': verifier, 'style': lambda completion, example: 5.0})
    order = ['right', 'wrong', 'half', 'unknown', 'nan', 'slow']
    paid = make(('mine', 0.1), ('style', 1.0), verifier='mine', **parts)
    np.testing.assert_array_equal(judged(paid, order), [1, 0, 0, np.nan, np.nan, 0])
    lower = make(('mine', 0.1), ('style', 1.0), verifier='mine', correct_at=0.5, **parts)
    np.testing.assert_array_equal(judged(lower, order), [1, 0, 1, np.nan, np.nan, 0])
    np.testing.assert_array_equal(judged(make(('mine', 1.0), **parts), order), [np.nan] * 6)


def test_a_reward_model_says_what_is_correct_by_a_threshold():
    def model(completions, examples):
        return [len(text) / 10 for text in completions]

    judge = make(('model', 1.0), functions={'model': model}, verifier='model', correct_at=0.3)
    np.testing.assert_array_equal(judged(judge, ['', 'ab', 'abc', 'abcd']), [0, 0, 1, 1])


def test_a_reward_that_raises_on_the_thread_is_heard():
    def broken(text, example):
        raise ValueError('no such answer')

    stream = rewards.RewardStream(make(('mine', 1.0), functions={'mine': broken}), [example('1')], 1, Letters())
    stream.add(0, [1], False)
    with pytest.raises(ValueError, match='no such answer'):
        stream.results()


# a user's own

FILE = """
import os, time

def pid(completion, example, *, plus=0):
    return os.getpid() + plus

def hangs(completion, example):
    while completion == 'hang':
        pass
    return 1.0

def dies(completion, example):
    os._exit(0)

def nested(completion, example):
    return nested(completion, example)

def of_all(completions, examples):
    return [len(text) + len(example.answer) for text, example in zip(completions, examples)]

def extract(completion):
    return completion.strip()
"""


@pytest.fixture(scope='module')
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp('own') / 'mine.py'
    path.write_text(FILE)
    return str(path)


def test_a_function_of_a_file_runs_in_another_process_with_its_options(file):
    reward_functions = make((f'{file}:pid', 1.0), options={'pid': {'plus': 10**9}})
    total, parts = compute(reward_functions, [example('1')], ['a'])
    assert parts['pid'][0] == total[0] > 10**9 and parts['pid'][0] != os.getpid() + 10**9


def test_a_function_of_a_file_can_be_the_verifier(file):
    assert make((f'{file}:hangs', 1.0), verifier='hangs').extract(' 4 ') == '4'


@pytest.mark.parametrize(
    'name, completions, failure',
    [('hangs', ['fine', 'hang', 'fine'], 'expired'), ('dies', ['fine'] * 3, 'died'), ('nested', ['fine'] * 3, 'died')],
)
def test_a_part_that_fails_has_the_score_of_failure_and_is_counted(file, name, completions, failure):
    reward_functions = make((f'{file}:{name}', 1.0), ('numeric', 1.0), failed=-0.25, deadline=1.5)
    rewarded = rewards.compute_rewards(reward_functions, [example('4')], completions, [False] * 3, [1] * 3)
    failed = [name != 'hangs' or text == 'hang' for text in completions]
    assert rewarded.failures[failure].tolist() == failed
    assert not rewarded.failures['died' if failure == 'expired' else 'expired'].any()
    assert rewarded.rewards.tolist() == [-0.25 if bad else 1.0 for bad in failed]


@pytest.mark.parametrize(
    'path, message',
    [
        ('nowhere.py:f', r"^reward.parts = 'nowhere.py:f': no such file"),
        ('{file}:f', r'^reward.parts = .*has no function f'),
        ('{file}:pid', r'^reward.options.pid'),
    ],
)
def test_a_function_of_a_file_that_cannot_work_is_refused(file, path, message, tmp_path):
    if message.startswith('^reward.options'):
        file = str(tmp_path / 'other.py')
        with open(file, 'w', encoding='utf8') as opened:
            opened.write('def pid(completion, example, *, plus): return plus')
    with pytest.raises(BadInput, match=message):
        make((path.format(file=file), 1.0))


def test_functions_of_a_notebook_are_parts_by_name():
    reward_functions = make(('short', 2.0), functions={'short': lambda completion, example: 1.0 / len(completion)})
    assert compute(reward_functions, [example('')], ['ab', 'abcd'])[0].tolist() == [1.0, 0.5]


FILE_OF_TRUNCATED = """
def told(completion, truncated):
    return float(truncated)
"""


def test_a_reward_may_ask_whether_the_budget_cut_the_completion_off(tmp_path):
    (tmp_path / 'mine.py').write_text(FILE_OF_TRUNCATED)

    def keyword(completion, example, *, truncated):
        return float(truncated)

    def of_all(completions, truncated):
        return [float(cut) for cut in truncated]

    async def later(text, truncated=None):
        return float(truncated)

    functions = {'keyword': keyword, 'of_all': of_all, 'later': later}
    names = (f'{tmp_path}/mine.py:told', *functions)
    reward_functions = make(*((name, 1.0) for name in names), functions=functions, verifier='told')
    rewards.check_parameters(reward_functions, [example('1')])
    told = rewards.compute_rewards(reward_functions, [example('1')], ['a', 'b'], [True, False], [1, 1])
    stream = rewards.RewardStream(reward_functions, [example('1')], 2, Letters())
    for row, cut in enumerate((True, False)):
        stream.add(row, [1], cut)
    for rewarded in (told, stream.results()):
        assert {*rewarded.parts} == {'told', *functions}
        assert [values.tolist() for values in rewarded.parts.values()] == [[1.0, 0.0]] * 4


def test_a_reward_may_ask_which_step_it_is(tmp_path):
    (tmp_path / 'mine.py').write_text('def late(completion, *, step):\n    return float(step > 3)\n')
    functions = {'of_all': lambda completions, *, step: [float(step)] * len(completions)}
    made = make((f'{tmp_path}/mine.py:late', 1.0), ('of_all', 1.0), functions=functions, verifier='late')
    gold.try_out(made, [example('1')])
    for step, expected in ((None, [0.0, 0.0]), (4, [1.0, 4.0])):
        told = rewards.compute_rewards(made._replace(step=step), [example('1')], ['a'], [False], [1])
        assert [float(values[0]) for values in told.parts.values()] == expected


@pytest.mark.parametrize(('name', 'column'), [('countdown', 'numbers'), ('code', 'before')])
def test_a_reward_of_the_package_is_refused_where_the_data_lack_what_it_reads(name, column):
    reward_functions = make((name, 1.0))
    with pytest.raises(BadInput, match=f"^reward.parts = '{name}': reads the column '{column}' .* target"):
        rewards.check_parameters(reward_functions, [Example('?', '8', 0, {'nums': [3, 5], 'target': 8})])


def test_batched_rewards_see_all_completions_with_their_examples(file):
    calls = []

    def count(completions, examples):
        calls.append(len(completions))
        return [None if text == '?' else 1.0 for text in completions]

    reward_functions = make((f'{file}:of_all', 1.0), ('count', 1.0), functions={'count': count})
    total, parts = compute(reward_functions, [example('1'), example('22')], ['a', 'bb', '?', 'dd'])
    assert parts['of_all'].tolist() == [2, 3, 3, 4] and calls == [4]
    assert np.isnan(parts['count'][2]) and np.isnan(total[2]) and total[[0, 1, 3]].tolist() == [3, 4, 5]


def test_asynchronous_rewards_wait_side_by_side_until_their_deadline():
    inside = []

    async def ask(completion, example):
        inside.append(completion)
        while len(inside) < 8:  # ends only when all are asked
            await asyncio.sleep(0.01)
        await asyncio.sleep(100 if completion == 'slow' else 0)
        return 1.0

    reward_functions = make(('ask', 1.0), functions={'ask': ask}, deadline=2.0, workers=1)
    began = time.monotonic()
    rewarded = rewards.compute_rewards(reward_functions, [example('1')], ['a'] * 7 + ['slow'], [False] * 8, [1] * 8)
    assert time.monotonic() - began < 20
    assert rewarded.rewards.tolist() == [1.0] * 7 + [0.0] and rewarded.failures['expired'].tolist() == [False] * 7 + [
        True
    ]


def test_a_reward_can_ask_what_the_verifier_said():
    def bonus(completion, example, *, correct):
        return {True: 1.0, False: -1.0, None: 0.5}[correct]

    reward_functions = make(('bonus', 1.0), ('numeric', 0.0), verifier='numeric', functions={'bonus': bonus})
    assert compute(reward_functions, [example('4')], ['4', '5'])[0].tolist() == [1, -1]
    assert compute(reward_functions, [example('many')], ['4'])[0].tolist() == [0.5]
    with pytest.raises(BadInput, match='since bonus reads its verdict'):
        make(('bonus', 1.0), functions={'bonus': bonus})


def test_scoring_goes_on_while_the_device_works():
    # what the step waits for is less than what the rewards took
    def slow(completion, example):
        time.sleep(0.2)
        return 1.0

    stream = rewards.RewardStream(
        make(('slow', 1.0), functions={'slow': slow}, workers=1), [example('1')], 4, Letters()
    )
    for row in range(4):
        stream.add(row, [1], False)
    time.sleep(0.9)  # the device
    began = time.monotonic()
    stream.results()
    assert time.monotonic() - began < 0.4


# what ends with the rewards


def test_close_ends_the_workers_the_threads_and_the_event_loop(file):
    async def ask(completion, example):
        await asyncio.sleep(100 if completion == 'slow' else 0)
        return 1.0

    before = set(threading.enumerate())
    with make((f'{file}:pid', 1.0), ('ask', 1.0), functions={'ask': ask}, deadline=200.0) as reward_functions:
        worker = int(compute(reward_functions, [example('1')], ['a'])[1]['pid'][0])
        stream = rewards.RewardStream(reward_functions, [example('1')], 1, Slow())
        stream.add(0, [1], False)
        os.kill(worker, 0)
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert 'rewards' in names and any(name.startswith('reward_') for name in names)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match='shutdown'):
        stream.add(0, [1], False)


class Slow:
    """A tokenizer of texts that take their time."""

    eos_token_id = pad_token_id = None

    def decode(self, tokens, **options):
        return 'slow'


def test_rewards_that_nobody_closed_end_with_the_last_reference_and_with_the_interpreter(file):
    reward_functions = make((f'{file}:pid', 1.0))
    worker = int(compute(reward_functions, [example('1')], ['a'])[1]['pid'][0])
    del reward_functions
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    script = (
        f'import os, sys; sys.path[:0] = {sys.path!r}\n'
        'from grpo_jax.workers import Pool, Sandbox\n'
        'pool, sandbox = Pool(1, deadline=9.0, memory_gib=2.0), Sandbox()\nsandbox.layers()\n'
        'print(pool.call(os.getpid), sandbox._idle[0].process.pid, sandbox._idle[0].folder)'
    )
    done = subprocess.run([sys.executable, '-c', script], text=True, check=True, stdout=subprocess.PIPE)
    worker, jail, folder = done.stdout.split()
    assert not os.path.exists(folder)
    for pid in (worker, jail):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
