"""A user's files are imported as Python imports them, and what is wrong in them is named with file and line."""

import multiprocessing
import os
import pathlib
import pickle
import re
import sys

import pytest

from grpo_jax import data, rewards, user_files
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.run import config_file

FIELD = pathlib.Path(__file__).parent / 'field'


def write(folder, files=(), **more):
    """Writes Python files to a folder: name without .py -> text."""
    for name, text in (dict(files) | more).items():
        path = folder / f'{name}.py'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def reward_of(*parts, **functions):
    config = default.get_config('dr_grpo')
    with config.unlocked():
        config.reward.parts, config.reward.verifier, config.reward.workers = tuple((p, 1.0) for p in parts), '', 1
    return rewards.build(rewards.RewardOptions.from_config(config.reward), 512, functions)


def paid(*parts, **functions):
    with reward_of(*parts, **functions) as built:
        judged = rewards.compute_rewards(built, [Example('2+1=', '3', 0, {})], ['3 .', '4 .'], [False] * 2, [3, 3])
    return [list(map(float, values)) for values in judged.parts.values()]


@pytest.mark.parametrize(
    'name, values',
    [
        ('future_dataclass', [1, 0]),
        ('pickled', [1, 1]),
        ('sibling', [0.03, 0.03]),
        ('pack/rel', [0.03, 0.03]),
        ('acall', [0.5, 0.5]),
    ],
)
def test_rewards_as_people_write_them_run(name, values):
    assert paid(f'{FIELD}/rewards/{name}.py:score') == [pytest.approx(values)]


def test_an_object_with_an_asynchronous_call_is_awaited_for_each_completion():
    class Judge:
        async def __call__(self, completion, answer):
            return float(answer in completion)

    assert paid('judge', judge=Judge()) == [[1, 0]]


def test_functions_and_values_of_a_users_file_reach_other_processes(tmp_path):
    text = 'class Row(tuple): pass\ndef first(row): return row[0]\n'
    names = ['rewards/words_of_mine', 'rewards/statistics', 'data/words_of_mine']  # two are taken by another
    for name in names:
        write(tmp_path, {name: text})
        module = user_files.import_file(str(tmp_path / f'{name}.py'))
        assert sys.modules[module.__name__] is module
        assert type(pickle.loads(pickle.dumps(module.Row([5])))) is module.Row
        if name != names[0]:
            with multiprocessing.get_context('spawn').Pool(1) as pool:
                assert pool.map(module.first, [module.Row([5])]) == [5]
    import statistics

    assert statistics.mean([1, 3]) == 2  # Python's own


def test_files_of_one_name_and_helpers_of_one_name_do_not_mix(tmp_path):
    for number, place in enumerate(('one', 'two')):
        write(tmp_path / place, mine='from common_words import N\ndef n(): return N\n', common_words=f'N = {number}\n')
    modules = [user_files.import_file(str(tmp_path / place / 'mine.py')) for place in ('one', 'two')]
    assert [module.n() for module in modules] == [0, 1]
    assert user_files.import_file(str(tmp_path / 'one' / 'mine.py')) is modules[0]  # and it is run once


def test_an_edit_of_a_file_or_of_its_helper_is_seen_by_the_next_start(tmp_path):
    write(tmp_path, chief='from its_helper import N\ndef n(): return N\n', its_helper='N = 1\n')
    path = str(tmp_path / 'chief.py')
    assert user_files.import_file(path).n() == 1
    write(tmp_path, its_helper='N = 2\n')
    os.utime(tmp_path / 'its_helper.py', ns=(1, 1))  # another time of the same size
    assert user_files.import_file(path).n() == 2
    assert not list(tmp_path.rglob('__pycache__'))


def test_a_package_beside_a_file_of_its_name_does_not_hide_it(tmp_path):
    write(tmp_path, {'judge_of_mine': 'X = 1\n', 'judge_of_mine/__init__': 'X = 2\n'})
    assert user_files.import_file(str(tmp_path / 'judge_of_mine.py')).X == 1


def test_digests_know_helpers_packages_and_imports_within_functions(tmp_path):
    main = 'import numpy, helper_a\nfrom pack_b import one\ndef f():\n    from helper_c import g\n    return g\n'
    write(tmp_path, main=main, helper_a='import helper_e\n', helper_c='g = 1\n', helper_e='', other='')
    write(tmp_path / 'pack_b', __init__='', one='from .two import x', two='x = 1', other='')
    seen = user_files.digests(str(tmp_path / 'main.py'))
    names = {os.path.relpath(path, tmp_path) for path in seen}
    helpers = {f'helper_{letter}.py' for letter in 'ace'}
    assert names == {'main.py', *helpers, 'pack_b/__init__.py', 'pack_b/one.py', 'pack_b/two.py'}


@pytest.mark.parametrize(
    'name, words',
    [
        ('key_error', r"key_error\.py, line 4: KeyError: 'question'; mend the file"),
        ('meta_none', r'and meta a dict; mend it'),
        ('int_answer', r'whose prompt and answer are texts'),
    ],
)
def test_an_error_in_a_data_set_is_a_line_with_its_place(name, words):
    options = data.DataOptions(name=f'{FIELD}/datasets/{name}.py')
    with pytest.raises(BadInput, match=words) as error:
        data.load(options, 'train', None)
    assert '\n' not in str(error.value)


def test_an_error_in_a_helper_of_a_data_set_names_the_helper(tmp_path):
    write(tmp_path, mine='import helps\ndef examples(split):\n    yield helps.half(0)\n', helps='def half(x):\n 1/x\n')
    with pytest.raises(BadInput, match=re.escape(f'{tmp_path}/helps.py, line 2: ZeroDivisionError: division by zero')):
        data.examples(str(tmp_path / 'mine.py'), {}, 'train')
    (tmp_path / 'mine.py').write_text('x = (\n')
    with pytest.raises(BadInput, match=re.escape(f'{tmp_path}/mine.py, line 1: SyntaxError')):
        data.examples(str(tmp_path / 'mine.py'), {}, 'train')


@pytest.mark.parametrize('name', ['future_dataclass', 'sibling'])
def test_data_sets_and_configs_as_people_write_them_are_read(name):
    rows = data.examples(f'{FIELD}/datasets/{name}.py', {}, 'train')
    assert rows and all(isinstance(row, Example) for row in rows)
    assert config_file.read_config(f'{FIELD}/experiments/{name}.py').steps == 1


def test_only_python_files_are_files_of_rewards():
    assert not user_files.is_file('judge.pyz:score') and user_files.is_file('judge.py:score')
    with pytest.raises(BadInput, match=r'no such file in grpo_jax/rewards.*give FILE\.py:NAME'):
        reward_of('judge.pyz:score')


def test_imports_of_installed_packages_and_of_folders_without_init_are_followed_as_python_does(tmp_path, monkeypatch):
    installed = tmp_path / 'env' / 'lib' / 'site-packages'
    (installed / 'spaced' / 'inner').mkdir(parents=True)
    (installed / 'spaced' / 'inner' / 'deep.py').write_text('VALUE = 3')
    monkeypatch.syspath_prepend(str(installed))  # as a .pth file does
    (tmp_path / 'helpers' / 'more').mkdir(parents=True)
    (tmp_path / 'helpers' / 'more' / 'widths.py').write_text('WIDTH = 4')
    (tmp_path / 'mine.py').write_text(
        'import numpy\nimport jax.numpy as jnp\nfrom spaced.inner import deep\nfrom helpers.more.widths import WIDTH\n'
        'def f(): return WIDTH + deep.VALUE'
    )
    assert user_files.load_function('x', f'{tmp_path}/mine.py:f')() == 7
    found = user_files.digests(str(tmp_path / 'mine.py'))
    assert {*found} == {str(tmp_path / 'mine.py'), str(tmp_path / 'helpers' / 'more' / 'widths.py')}
