"""What goes wrong in a file of one's own rewards is one line that names the file's line."""

import asyncio
import os
import pickle
import re

import numpy as np
import pytest
from test_scoring import compute, example, make

from grpo_jax import rewards, train
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold
from grpo_jax.sharding import compiled
from grpo_jax.types import Example
from tests import doc_examples, tiny_run

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
    assert f'{path}, line {line}: {words}' in str(error.value) and str(error.value).endswith('; mend the file')


def test_a_function_that_is_async_may_take_all_completions(file):
    with make((f'{file}:asks_all', 1.0)) as reward_functions:
        _, parts = compute(reward_functions, [example('1')], ['a'])
        np.testing.assert_array_equal(parts['asks_all'], [1.0])
        with pytest.raises(BadInput, match=r'returned \[1\.0\], and not a list of 2 rewards'):
            compute(reward_functions, [example('1')], ['a', 'b'])


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
    assert type(error) is BadInput and str(error) == "reward = '/': no number"


@pytest.mark.parametrize('name', ['waits', 'waits_later', 'too_deep'])
def test_a_completion_that_runs_out_of_time_or_stack_is_counted_and_stops_nothing(file, name):
    with make((f'{file}:{name}', 1.0), failed=-0.5) as reward_functions:
        rewarded = rewards.compute_rewards(reward_functions, [example('1')], ['a'], [False], [1])
    assert rewarded.rewards.tolist() == [-0.5]
    assert rewarded.failures['died' if name == 'too_deep' else 'expired'].tolist() == [True]


# what parameters get

ROWS = [
    Example('one?', '1', 7, {'level': 3, 'answer': 'raw'}),
    Example('two?', '2', 8, {'level': 4, 'answer': 'raw', 'hint': 'even'}),
]
NAMES = """
def single(answer, completion, level): return level + (answer == completion)
def by_example(example, text): return example.id + len(text)
def optional(completion, hint='none', trainer_state=None): return len(hint) + (trainer_state is None)
def single_rest(completion, **rest): return rest['level'] * (sorted(rest) == ['answer', 'id', 'level', 'prompt'])
def with_option(prompt, text, *, scale=2): return scale * len(prompt + text)
async def later(completion, level, **rest): return level + len(rest)
def trl(prompts, completions, **kwargs):
    assert prompts == ['one?', 'one?', 'two?', 'two?'] and completions == ['1', 'b', 'c', '2'], (prompts, completions)
    assert sorted(kwargs) == ['answer', 'hint', 'id', 'level'] and kwargs['hint'] == [None, None, 'even', 'even']
    return [float(text == answer) for text, answer in zip(completions, kwargs['answer'])]
def trl_column(completions, answer, level, completion_ids=None, **kwargs):
    assert completion_ids is None
    return [level[row] + (answer[row] == text) for row, text in enumerate(completions)]
def only_rest(**kwargs): return [len(text) + row for text, row in zip(kwargs['completions'], kwargs['id'])]
def plural(texts, examples, ids): return [row + (ids[0] == examples[0].id) for row in ids]
def partly(completions, hint='none'): return [float(hint == ['none', 'none', 'even', 'even'])] * 4
def as_ever(completion, example): return example.meta['level']
def all_as_ever(completions, examples): return [float(e.answer == text) for text, e in zip(completions, examples)]
"""
BOUND = {
    'single': [4, 3, 4, 5],
    'by_example': [8, 8, 9, 9],
    'optional': [5, 5, 5, 5],
    'single_rest': [3, 3, 0, 0],  # the second example has a hint besides
    'with_option': [15, 15, 15, 15],
    'later': [6, 6, 8, 8],
    'trl': [1, 0, 0, 1],
    'trl_column': [4, 3, 4, 5],
    'only_rest': [8, 8, 9, 9],
    'plural': [8, 8, 9, 9],
    'partly': [1, 1, 1, 1],
    'as_ever': [3, 3, 4, 4],
    'all_as_ever': [1, 0, 0, 1],
}


@pytest.fixture(scope='module')
def names(tmp_path_factory):
    """(path of a file with the functions of NAMES, these functions by name)."""
    path, functions = tmp_path_factory.mktemp('own') / 'names.py', {}
    path.write_text(NAMES, encoding='utf8')
    exec(NAMES, {}, functions)
    return str(path), functions


@pytest.mark.parametrize('handed', [False, True])
@pytest.mark.parametrize('name', BOUND)
def test_parameters_get_what_they_name(names, name, handed):
    path, functions = names
    part, options = name if handed else f'{path}:{name}', {'with_option': {'scale': 3}} if name == 'with_option' else {}
    with make((part, 1.0), functions=functions if handed else None, options=options) as rewarding:
        rewards.check_parameters(rewarding, ROWS)
        _, parts = compute(rewarding, ROWS, ['1', 'b', 'c', '2'])
    assert parts[name].tolist() == BOUND[name]


@pytest.mark.parametrize(
    'source, text',
    [
        (
            'def f(completion, hardness): return 1.0',
            "parameter 'hardness', and example 7 no column of that name, only answer, level, besides",
        ),
        (
            'def f(completions, hint): return [1.0]',
            "parameter 'hint', and example 7 no column of that name, only answer, level",
        ),
        ('def f(completions, completion_ids, **rest): return [1.0]', "parameter 'completion_ids', and"),
        ('async def f(completion, hint): return 1.0', "parameter 'hint', and example 7"),
        ('f = lambda c, e: 1.0', "parameter 'c', and"),
    ],
)
def test_a_parameter_that_names_nothing_is_refused_before_the_run_and_in_it(tmp_path, source, text):
    (tmp_path / 'mine.py').write_text(source, encoding='utf8')
    functions = {}
    exec(source, {}, functions)
    for part in ('f', f'{tmp_path}/mine.py:f'):
        with make((part, 1.0), functions=functions) as rewarding:
            for attempt in (rewards.check_parameters, lambda *given: compute(*given, ['a', 'b'])):
                with pytest.raises(BadInput, match=re.escape(text)) as error:
                    attempt(rewarding, ROWS)
                assert str(error.value).count('no column of that name') == 1 and str(error.value).startswith(
                    'reward = '
                )


@pytest.mark.parametrize(
    'source, text',
    [
        ('def f(completion, examples): return 1.0', 'for one completion (completion) and for all (examples)'),
        ('def f(prompts, example): return 1.0', 'for one completion (example) and for all (prompts)'),
        ('f = iter', 'is no function with a signature'),
    ],
)
def test_functions_that_cannot_be_bound_are_refused_when_they_are_named(source, text):
    functions = {}
    exec(source, {}, functions)
    with pytest.raises(BadInput, match=re.escape(text)):
        make(('f', 1.0), functions=functions)


def test_what_a_bound_function_does_wrong_is_named_with_its_line(tmp_path):
    (tmp_path / 'mine.py').write_text('X = 1\n\n\ndef f(completions, **rest):\n    return "ab"\n', encoding='utf8')
    with (
        make((f'{tmp_path}/mine.py:f', 1.0)) as rewarding,
        pytest.raises(BadInput, match=r'mine\.py, line 4: returned'),
    ):
        compute(rewarding, ROWS, ['a', 'b'])


def test_a_run_whose_reward_names_nothing_is_refused_before_anything_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled.Executable, 'lower', lambda _: pytest.fail('has compiled'))
    config = tiny_run.config(reward__parts=(('numeric', 1.0), ('mine', 0.1)))
    with pytest.raises(BadInput, match="parameter 'hint', and example 0 no column"):
        train.run(config, str(tmp_path / 'run'), functions={'mine': lambda completion, hint: 1.0})
    assert not (tmp_path / 'run').exists()


def test_the_example_of_the_page_binds_by_name(tmp_path):
    block = next(b for b in doc_examples.blocks('docs/add_your_own.md', 'python') if b.mark == 'file: nearness.py')
    (tmp_path / 'nearness.py').write_text(block.text, encoding='utf8')
    with make((f'{tmp_path}/nearness.py:nearness', 1.0)) as rewarding:
        _, parts = compute(rewarding, [example('12'), example('3')], ['It is 12', 'is 10', '', 'so 4'])
    np.testing.assert_allclose(parts['nearness'], [1, 1 / 3, 0, 1 / 2])


# results of every kind

RESULTS = {
    'a text': ("'1.0'", None),
    'bytes': ("b'1'", None),
    'a list': ('[1.0]', None),
    'a tuple': ('(1.0, 2.0)', None),
    'a dict': ("{'reward': 1.0}", None),
    'an array': ('np.array([1.0])', None),
    'an array of two': ('np.array([1.0, 2.0])', None),
    'a complex number': ('1 + 0j', None),
    'a complex number of numpy': ('np.complex64(1)', None),
    'a text of numpy': ("np.str_('1')", None),
    'an infinity': ("float('-inf')", None),
    'an infinity of numpy': ('np.float32(np.inf)', None),
    'more than any float': ('10**400', None),
    'what cannot be printed': ('Silent()', None),
    'a function': ('print', None),
    'a number of numpy': ('np.float16(0.5)', 0.5),
    'a whole number of numpy': ('np.int64(2)', 2.0),
    'a bool of numpy': ('np.bool_(True)', 1.0),
    'an array without axes': ('np.array(0.25)', 0.25),
    'a fraction': ('fractions.Fraction(1, 4)', 0.25),
    'a NaN': ("float('nan')", np.nan),
    'a NaN of numpy': ('np.float32(np.nan)', np.nan),
    'nothing': ('None', np.nan),
}
KINDS = {
    'plain': 'def f(completion, example):\n    return {}\n',
    'later': 'async def f(completion, example):\n    return {}\n',
    'all': 'def f(completions, examples):\n    return [{} for _ in completions]\n',
}
HEAD = """import fractions
import numpy as np
class Silent:
    def __repr__(self): raise ValueError
    def __float__(self): raise ValueError
"""


@pytest.mark.parametrize('handed', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_a_result_that_is_no_number_is_named_with_its_part_and_its_file(tmp_path, kind, handed):
    for case, (result, expected) in RESULTS.items():
        path, functions = tmp_path / f'{abs(hash(case))}.py', {}
        path.write_text(HEAD + KINDS[kind].format(result), encoding='utf8')
        exec(compile(path.read_text(), str(path), 'exec'), functions)
        functions = {'f': functions['f']}
        part = 'f' if handed else f'{path}:f'
        with make((part, 1.0), functions=functions if handed else None, workers=1) as rewarding:
            if expected is None:
                with pytest.raises(BadInput) as error:
                    compute(rewarding, [example('1')], ['a'])
                text = str(error.value)
                assert text.startswith(f"reward = '{part}': {path}, line 6: returned ") and text.isprintable(), text
                assert 'finite number' in text and text.count('\n') == 0, (case, text)
            else:
                _, parts = compute(rewarding, [example('1')], ['a'])
                np.testing.assert_array_equal(parts['f'], [expected], case)


@pytest.mark.parametrize(
    'result', ['{1: 2}', '{1.0}', "'a'", 'None', '1.0', 'iter([1.0])', 'np.zeros((1, 1))', '[[1.0]]']
)
@pytest.mark.parametrize('handed', [False, True])
def test_what_is_no_list_of_rewards_is_named(tmp_path, result, handed):
    path, functions = tmp_path / 'mine.py', {}
    path.write_text(f'{HEAD}def f(completions, examples):\n    return {result}\n')
    exec(compile(path.read_text(), str(path), 'exec'), functions)
    functions = {'f': functions['f']}
    part = 'f' if handed else f'{path}:f'
    with make((part, 1.0), functions=functions if handed else None) as rewarding:
        with pytest.raises(BadInput, match=r'mine\.py, line 6: returned '):
            compute(rewarding, [example('1')], ['a'])


@pytest.mark.parametrize('name', ['of_steps', 'of_answers'])
def test_what_is_no_answer_and_what_are_no_steps_is_named(tmp_path, name):
    text = (
        'def f(completion, example): return 1.0\n'
        'def extract(completion): return [completion]\n'
        "def steps(completion, example): return [(1, float('inf'))]\n"
    )
    (tmp_path / 'mine.py').write_text(text)
    part = f'{tmp_path}/mine.py:f'
    with make((part, 1.0), verifier='f', step_rewards=part) as rewarding:
        with pytest.raises(
            BadInput,
            match=r"line 2: returned \['x'\], and an answer is a text"
            if name == 'of_answers'
            else r'line 3: returned \[\(1, inf\)\], and steps have pairs',
        ):
            rewarding.extract('x') if name == 'of_answers' else rewarding.steps(['x'], [example('1')])


RAISES = """
def deep(completion):
    raise KeyError(completion)

def plain(completion, example):
    return deep(completion)

async def later(completion, example):
    return deep(completion)

def of_all(completions, examples):
    return [deep(text) for text in completions]

class Odd(Exception):
    def __str__(self): raise ValueError

def odd(completion, example):
    raise Odd
"""


@pytest.mark.parametrize('name', ['plain', 'later', 'of_all'])
def test_an_exception_shows_file_line_and_text_by_every_path(tmp_path, name):
    (tmp_path / 'mine.py').write_text(RAISES)
    with make((f'{tmp_path}/mine.py:{name}', 1.0)) as rewarding, pytest.raises(BadInput) as error:
        compute(rewarding, [example('1')], ['a\x1b[31m'])
    assert str(error.value) == (
        f"reward = '{tmp_path}/mine.py:{name}': {tmp_path}/mine.py, line 3: KeyError: 'a\\x1b[31m', "
        f'in `raise KeyError(completion)`{"" if name == "of_all" else " (example 0)"}; mend the file'
    )


def test_an_exception_that_cannot_be_printed_is_named(tmp_path):
    (tmp_path / 'mine.py').write_text(RAISES)
    with make((f'{tmp_path}/mine.py:odd', 1.0)) as rewarding:
        with pytest.raises(BadInput, match='line 18: Odd: which cannot be printed'):
            compute(rewarding, [example('1')], ['a'])


def test_a_batch_that_runs_out_of_time_is_counted_and_stops_nothing(tmp_path):
    (tmp_path / 'mine.py').write_text('def f(completions, examples): raise TimeoutError\n')
    with make((f'{tmp_path}/mine.py:f', 1.0), failed=-0.5) as rewarding:
        rewarded = rewards.compute_rewards(rewarding, [example('1')], ['a', 'b'], [False] * 2, [1, 1])
    assert rewarded.rewards.tolist() == [-0.5, -0.5] and rewarded.failures['expired'].all()


def test_a_result_of_a_reward_of_this_package_is_checked_too(monkeypatch):
    def odd(completion, example):
        return [1.0]

    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', odd)
    with (
        make(('numeric', 1.0)) as rewarding,
        pytest.raises(BadInput, match=r"'numeric': .*test_custom\.py, line \d+: "),
    ):
        compute(rewarding, [example('1')], ['a'])
