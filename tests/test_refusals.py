"""All that is wrong with a start is said at once, a line each, before anything is compiled or written."""

import os
import pickle
import re
import subprocess
import sys

import pytest

from grpo_jax import rewards, train
from grpo_jax.errors import NO_VALUE, UNMADE, BadInput, BadInputs, Checks, InUse
from grpo_jax.rewards import gold
from grpo_jax.run import config_file
from grpo_jax.run.open import open_config
from grpo_jax.sharding import compiled
from grpo_jax.tools import show
from grpo_jax.types import Example
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(compiled.Executable, 'lower', lambda _: pytest.fail('has compiled'))


def refuse(thing, value=1):
    raise BadInput(thing, value, 'is wrong; mend it')


def refusals(function, *arguments, **named):
    """{thing: line} of what a call refuses."""
    with pytest.raises(BadInput) as error:
        function(*arguments, **named)
    return {refusal.args[0]: str(refusal) for refusal in error.value.refusals}


# the collector


def test_checks_raise_what_each_has_refused_in_order_and_once():
    with pytest.raises(BadInputs) as error, Checks() as check:
        assert check(int, '3') == 3
        assert check(refuse, 'a') is UNMADE and check(refuse, 'b') is UNMADE and check(refuse, 'a') is UNMADE
    assert str(error.value) == 'a = 1: is wrong; mend it\nb = 1: is wrong; mend it'
    again = pickle.loads(pickle.dumps(error.value))
    assert type(again) is BadInputs and str(again) == str(error.value)
    assert error.value._render_traceback_() == ['error: a = 1: is wrong; mend it', 'error: b = 1: is wrong; mend it']


def test_a_single_refusal_is_raised_as_it_is():
    with pytest.raises(BadInput) as error, Checks() as check:
        check(refuse, 'a')
    assert type(error.value) is BadInput and str(error.value) == 'a = 1: is wrong; mend it'


def test_what_needs_a_thing_that_was_refused_is_not_judged():
    with pytest.raises(BadInput) as error, Checks() as check:
        made = check(refuse, 'a')
        check(refuse, made), check(refuse, 'b', value=made.part.of_it), check(refuse, 3 + made + 4)
        assert list(made) == []
    assert str(error.value) == 'a = 1: is wrong; mend it'


def test_inner_checks_leave_the_raising_to_the_outer_ones():
    with pytest.raises(BadInputs) as error, Checks() as check:
        with Checks(check) as inner:
            inner(refuse, 'a')
        check(refuse, 'b')
    assert [refusal.args[0] for refusal in error.value.refusals] == ['a', 'b']


def test_a_folder_in_use_and_a_bug_are_no_refusals():
    def in_use():
        raise InUse('--workdir', 'x', 'is in use')

    with pytest.raises(InUse), Checks() as check:
        check(refuse, 'a')
        check(in_use)
    with pytest.raises(ZeroDivisionError), Checks() as check:
        check(refuse, 'a')
        print(1 / 0)


def test_without_a_value_the_thing_is_the_subject():
    assert (
        str(BadInput('6 of 11 rows', NO_VALUE, 'are malformed; mend them')) == '6 of 11 rows are malformed; mend them'
    )


# a start

REWARD = """
def brevity(completion, example, *, scale: float = 1.0):
    return -scale * len(completion)


def fails(completion, example):
    return example.meta['level']


def text(completion, example):
    return 'much'


def few(completions, examples):
    return []


async def later(completion, example):
    raise ValueError('no network')


def sound(completions, examples):
    return [1.0] * len(completions)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / 'mine.py').write_text(REWARD, encoding='utf8')
    return tmp_path / 'mine.py'


def test_all_that_is_wrong_with_a_start_is_listed(tmp_path, mine):
    parts = (('numeric', 1.0), (f'{mine}:brevity', 0.1), (f'{mine}:absent', 0.1), ('nothing', 0.1))
    config = tiny_run.config(reward__parts=parts, mesh__data=16, model__path='runs/none/there')
    config.reward.options.brevity.scal = 0.5
    config.data.options.digitz = 2
    config.unlock()
    config.rollout.group_sise = 4
    config.steps, config.optimizer.learning_rate, config.evaluation.samples = 0, -1.0, 0
    config.algorithm.surrogate, config.log.trackers = 'clamp', ('nobody',)
    lines = refusals(train.check, config, str(tmp_path / 'run'))
    assert set(lines) == {
        *('steps', 'rollout.group_sise', 'optimizer.learning_rate', 'evaluation.samples', 'log.trackers'),
        *('reward.parts', 'data.options.digitz', 'mesh', 'model.path', 'algorithm.surrogate'),
        'reward.options.brevity.scal',
    }
    assert lines['rollout.group_sise'] == 'rollout.group_sise = 4: is no key; did you mean group_size?'
    assert lines['data.options.digitz'].endswith('did you mean digits?')
    assert lines['reward.options.brevity.scal'].endswith('did you mean scale?')
    assert sorted(os.listdir(tmp_path)) == ['mine.py']
    with pytest.raises(BadInput) as error:
        train.run(config, str(tmp_path / 'run'))
    assert str(error.value).splitlines() == list(dict.fromkeys(str(error.value).splitlines()))
    assert {refusal.args[0] for refusal in error.value.refusals} == set(lines)
    with pytest.raises(BadInput) as shown:
        list(show.lines(config, 1))
    assert {refusal.args[0] for refusal in shown.value.refusals} == set(lines)


def test_data_rewards_mesh_and_algorithm_are_judged_beside_one_another(tmp_path, mine):
    config = tiny_run.config(
        reward__parts=(('numeric', 1.0), (f'{mine}:fails', 1.0), (f'{mine}:text', 1.0)),
        learner__minibatches=3, mesh__tensor=4, rollout__max_tokens=1000, data__max_prompt_tokens=6,
    )  # fmt: skip
    lines = refusals(train.check, config, str(tmp_path / 'run'))
    assert set(lines) == {
        *('learner.minibatches', 'mesh.tensor', 'data.max_prompt_tokens + rollout.max_tokens', 'reward')
    }
    config = tiny_run.config(data__options={'digits': 1, 'count': 0}, mesh__tensor=4)
    assert set(refusals(train.check, config, str(tmp_path / 'run'))) >= {'mesh.tensor', 'data.options.count'}


def test_a_sound_start_is_checked_without_a_trace(tmp_path, capsys):
    run, splits = train.check(tiny_run.config(), str(tmp_path / 'run'))
    assert len(splits.train.examples) == 40 and run.algorithm is not None and not os.listdir(tmp_path)
    assert 'gold self-test: 0 of 40' in capsys.readouterr().out


def test_bad_gold_is_among_what_a_check_lists(tmp_path):
    (tmp_path / 'data').mkdir()
    for split in ('train', 'test'):
        rows = [f'{{"prompt": "{i}?", "answer": "one and a half"}}\n' for i in range(20 + (split == 'test'))]
        (tmp_path / 'data' / f'{split}.jsonl').write_text(''.join(rows).replace('?', f'{split}?'))
    changes = {'data__name': 'files', 'data__options': {'folder': str(tmp_path / 'data')}, 'mesh__data': 16}
    config = tiny_run.config(data__max_prompt_tokens=16, **changes)
    assert set(refusals(train.check, config, str(tmp_path / 'run'))) == {'mesh', 'reward.self_test'}


def test_the_command_has_a_line_for_each_and_status_2(tmp_path):
    arguments = ['--config=arithmetic', f'--workdir={tmp_path / "run"}', '--config.steps=0', '--config.mesh.data=64']
    arguments.append('--config.data.options.count=50')
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax.train', '--check', *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not re.match('reading|judging', line)]
    assert done.returncode == 2 and len(lines) == 2, done.stderr
    assert lines[0].startswith('error: steps = 0: must') and lines[1].startswith('error: mesh = ')
    assert not os.listdir(tmp_path)


# the workdir


def test_a_workdir_without_a_name_is_refused_and_no_other_folder_is_read(tmp_path, monkeypatch):
    tiny_run.record(open_config(tiny_run.config(seed=3), str(tmp_path)))
    monkeypatch.chdir(tmp_path)  # where another run's config.json lies
    before = os.listdir('.')
    assert refusals(train.check, tiny_run.config(), '') == {'--workdir': "--workdir = '': names no folder; name one"}
    with pytest.raises(BadInput, match=r"--workdir = '': names no folder"):
        train.run(tiny_run.config(), '')
    assert os.listdir('.') == before


def test_another_runs_workdir_is_called_that_first(tmp_path):
    tiny_run.record(open_config(tiny_run.config(), str(tmp_path / 'run')))
    config = tiny_run.config(seed=3, rollout__group_size=8, mesh__data=16, evaluation__samples=0)
    with pytest.raises(BadInput) as error:
        train.check(config, str(tmp_path / 'run'))
    first, *others = str(error.value).splitlines()
    assert 'holds another run, in which' in first and 'rollout.group_size is 4 and not 8' in first
    assert 'seed is 0 and not 3' in first and [line.split(' ')[0] for line in others] == ['evaluation.samples', 'mesh']


def test_a_workdir_that_holds_other_things_is_refused_and_one_of_an_interrupted_start_is_not(tmp_path):
    (tmp_path / 'run' / 'model').mkdir(parents=True)
    for name in ('owner.json', 'environment.json', 'data.json.writing', '.nfs1'):
        (tmp_path / 'run' / name).write_text('[]')
    open_config(tiny_run.config(), str(tmp_path / 'run'))
    (tmp_path / 'run' / 'thesis.tex').write_text('mine')
    lines = refusals(open_config, tiny_run.config(), str(tmp_path / 'run'))
    assert lines['--workdir'].endswith('holds no run, but other things, like thesis.tex; name a new folder')


# options of rewards and data in a config file

FILE = """
from grpo_jax.configs import arithmetic


def get_config():
    config = arithmetic.get_config('dr_grpo')
    {}
    return config
"""


def read(folder, *lines):
    (folder / 'exp.py').write_text(FILE.format('\n    '.join(lines)), encoding='utf8')
    return config_file.read_config(str(folder / 'exp.py'))


PARTS = "config.reward.parts = (('numeric', 1.0), ('mine.py:brevity', 0.1))"
SCALE = 'config.reward.options.brevity.scale = 0.05'
DIGITS = 'config.data.options.digits = 2'
FLAT = "config.update_from_flattened_dict({'reward.options.brevity.scale': 0.05, 'data.options.digits': 2})"


@pytest.mark.parametrize(
    'lines', [[PARTS, SCALE, DIGITS], [SCALE, DIGITS, PARTS], [FLAT, PARTS]]
)  # fmt: skip
def test_options_are_settable_by_assignment_in_any_order(tmp_path, mine, lines):
    config = read(tmp_path, *lines)
    assert config.reward.options.brevity.to_dict() == {'scale': 0.05} and config.data.options.digits == 2
    functions = open_config(config, str(tmp_path / 'run')).rewards
    assert functions.parts['brevity'].function.keywords['scale'] == 0.05
    with pytest.raises(AttributeError):
        config.rollout.group_sise = 3  # other keys are held as before
    copy = pickle.loads(pickle.dumps(config.copy_and_resolve_references()))
    assert copy.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    'line, words',
    [
        (
            'config.reward.options.brevity.scal = 0.05',
            'reward.options.brevity.scal = 0.05: is no key; did you mean scale?',
        ),
        ('config.reward.options.brevty.scale = 0.05', 'reward.options.brevty belongs to no reward .* mean brevity?'),
        ('config.reward.options.format.tgas = ()', r'reward.options.format.tgas = \(\): is no key; did you mean tags?'),
        ('config.reward.options.brevity.scale = "much"', "brevity.scale = 'much': must be a number"),
        ('config.data.options.digitz = 2', 'data.options.digitz = 2: is no key; did you mean digits?'),
        ('config.unlock().rollout.group_sise = 2', 'rollout.group_sise = 2: is no key; did you mean group_size?'),
        ('config.unlock().optimiser = config.optimizer', 'optimiser is no key; did you mean optimizer?'),
        ('config.unlock().model.lora.rnk = 2', 'model.lora.rnk = 2: is no key; did you mean rank?'),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_when_the_config_is_read(tmp_path, mine, line, words):
    config = read(tmp_path, PARTS, line)
    with pytest.raises(BadInput, match=words.replace('?', r'\?')):
        open_config(config, str(tmp_path / 'run'))


def test_a_key_that_is_not_there_is_an_error_of_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'exp.py').write_text(FILE.format('config.steps = 3\n    config.stepz = 4'))
    with pytest.raises(BadInput) as error:
        config_file.read_config('exp.py')
    expected = 'exp.py, line 8 names the key stepz, which is not there: did you mean steps?; mend it'
    assert str(error.value) == expected
    (tmp_path / 'helper.py').write_text('\n\ndef half(x):\n    return 1 / x\n')
    (tmp_path / 'exp.py').write_text(FILE.format('import helper\n    config.steps = helper.half(0)'))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput) as error:
        config_file.read_config('exp.py')
    assert str(error.value) == f'{tmp_path}/helper.py, line 4 fails with ZeroDivisionError: division by zero; mend it'


def test_files_beside_the_config_are_found_from_anywhere_and_the_folder_of_the_command_comes_first(
    tmp_path, mine, monkeypatch
):
    (tmp_path / 'here').mkdir()
    monkeypatch.chdir(tmp_path / 'here')
    assert read(tmp_path, PARTS).reward.parts[1][0] == f'{mine}:brevity'
    (tmp_path / 'here' / 'mine.py').write_text(REWARD)
    assert read(tmp_path, PARTS).reward.parts[1][0] == 'mine.py:brevity'
    config = read(tmp_path, "config.reward.parts = (('none.py:brevity', 1.0),)", "config.reward.verifier = ''")
    config.collection.gate = 'reward'
    lines = refusals(open_config, config, str(tmp_path / 'run'))
    assert str(tmp_path / 'here') in lines['reward.parts'] and 'beside the config' in lines['reward.parts']


# each reward is called once before a run


def build(*parts, functions=None, **changes):
    options = {'verifier': '', 'deadline': 5.0, 'workers': 1} | changes
    section = tiny_run.config().reward
    for name, value in options.items():
        section[name] = value
    section.parts = tuple((part, 1.0) for part in parts)
    return rewards.build(rewards.RewardOptions.from_config(section), 64, functions)


def test_what_each_reward_does_wrong_is_said_by_name_before_anything_compiles(mine):
    names = ('fails', 'text', 'few', 'later', 'sound')
    with build(*(f'{mine}:{name}' for name in names)) as functions, pytest.raises(BadInputs) as error:
        gold.try_out(functions, [Example('1 + 1', '2', 0, {})])
    fails, text, few, later = map(str, error.value.refusals)
    assert "mine.py:fails'" in fails and "KeyError: 'level'" in fails and 'line 7' in fails
    assert "mine.py:text'" in text and "returned 'much'" in text
    assert "mine.py:few'" in few and 'returned [], and not a list of 1 rewards' in few
    assert "mine.py:later'" in later and 'ValueError: no network' in later


def test_functions_that_are_handed_over_are_tried_too_and_each_once():
    calls = []

    def broken(completion, example):
        raise KeyError('mine')

    def kind(completion, example, *, correct):
        calls.append((completion, correct))
        return 1.0

    functions = {'broken': broken, 'kind': kind}
    with build('numeric', 'broken', 'kind', functions=functions, verifier='numeric') as built:
        with pytest.raises(BadInput, match=r"reward.parts = 'broken': fails on the answer of example 4 with KeyError"):
            gold.try_out(built, [Example('1 + 1', '2', 4, {}), Example('1 + 2', '3', 5, {})])
    assert calls == [('2', True)]


def test_a_run_calls_each_reward_before_it_compiles(tmp_path, mine):
    config = tiny_run.config(reward__parts=(('numeric', 1.0), (f'{mine}:fails', 1.0)))
    with pytest.raises(BadInput, match="KeyError: 'level'"):
        train.run(config, str(tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()
