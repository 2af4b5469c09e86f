"""The way in: commands by name, their --help, configs by name, and keys that a signature declares."""

import os
import subprocess
import sys

from absl import flags
from ml_collections import config_flags
import pytest

from grpo_jax import __main__ as commands
from grpo_jax import algorithms
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.run import config_file

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHIPPED = os.path.join('grpo_jax', 'configs')


def config_of(*arguments):
    """The config that a command line gives."""
    values, argv = flags.FlagValues(), ['train', *arguments]
    config_flags.DEFINE_config_file('config', None, flag_values=values, sys_argv=argv)
    values['config'].parser = config_file.Parser(argv)
    values(argv)
    return values['config'].value


def run(*arguments, folder=ROOT):
    return subprocess.run([sys.executable, '-m', *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_without_a_command_all_are_listed_with_their_purpose():
    lines = commands.overview().splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(commands.COMMANDS)
    assert 'train         Trains a policy' in lines[2] and all(len(line) < 140 for line in lines)
    done = run('grpo_jax')
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, lines, '')


def test_the_list_holds_every_module_that_is_a_command():
    names = set()
    for folder, _, files in os.walk(commands.PACKAGE):
        for name in files:
            if name.endswith('.py'):
                with open(os.path.join(folder, name), encoding='utf8') as file:
                    if 'cli.run(main)' in file.read():
                        names.add(os.path.relpath(os.path.join(folder, name), commands.PACKAGE))
    assert names == {os.path.relpath(commands.path_of(name), commands.PACKAGE) for name in commands.COMMANDS}


def test_an_unknown_command_is_refused_with_the_list():
    done = run('grpo_jax', 'trian')
    assert done.returncode == 2 and done.stderr.startswith("error: command = 'trian'") and 'train' in done.stderr


def test_a_flag_that_a_command_needs_is_asked_for_by_name():
    done = run('grpo_jax', 'export', '--workdir=runs/x')
    assert (done.returncode, done.stderr) == (2, 'error: --out must be given\n')


def test_help_shows_purpose_examples_and_the_commands_own_flags():
    done = run('grpo_jax', 'sweep', '--help')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('Trains every preset') and '--seeds: Runs of each preset' in done.stdout
    assert '(default: 3)' in done.stdout and '--workdir' in done.stdout and '--strict' in done.stdout
    assert 'verbosity' not in done.stdout and 'tfds' not in done.stdout


@pytest.mark.parametrize('name', commands.COMMANDS)
def test_every_command_has_two_examples_that_its_help_shows(name):
    examples = [line.split() for line in commands.read_docstring(name).partition('Examples:\n')[2].splitlines()]
    assert len(examples) == 2 and all(words[:2] == ['python', '-m'] for words in examples)
    start = [f'grpo_jax.{name}'] if name in commands.CORE else ['grpo_jax', name]
    assert all(words[2 : 2 + len(start)] == start for words in examples)
    for words in examples:
        configs = [word.removeprefix('--config=') for word in words if word.startswith('--config=')]
        assert all(os.path.isfile(config_file.locate(config.partition(':')[0])) for config in configs)


@pytest.mark.parametrize('text', ['gsm8k', 'configs/gsm8k.py', 'grpo_jax/configs/gsm8k.py'])
def test_a_config_is_found_by_name_and_by_path(text):
    assert config_of(f'--config={text}:dapo').algorithm.clip_high == 0.28


def test_names_hold_in_a_folder_without_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_of('--config=gsm8k').data.name == 'gsm8k'
    assert config_of('--config=labs/random_reward').reward.verifier == 'numeric'
    assert config_of('--config=configs/arithmetic.py').model.path == 'configs/models/characters'
    with pytest.raises(BadInput, match=r"--config = 'gsm9k': no such file.*did you mean gsm8k\?"):
        config_of('--config=gsm9k')
    assert not {'default', 'labs/careless', 'labs/habits'} & {*config_file.experiments()}  # none can be run


def test_a_users_file_comes_before_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'from configs import default\n\n\ndef get_config(preset="grpo"):\n    return default.get_config(preset)\n'
    (tmp_path / 'mine.py').write_text(text)
    assert config_of('--config=mine.py').data.name == 'arithmetic'
    assert config_of('--config=mine.py:rloo', '--config.steps=3').steps == 3


@pytest.mark.parametrize(
    ('line', 'words'),
    [
        ('config.stepz = 3', ['line 6', 'stepz', 'steps']),
        ('config.steps = 1 / 0', ['line 6', 'ZeroDivisionError', 'division by zero']),
        ('import nowhere_at_all', ['line 6', 'ModuleNotFoundError', 'nowhere_at_all']),
        ('return 3', ['int', 'default.py']),
        ('config.steps = = 3', ['line 6', 'SyntaxError']),
    ],
)
def test_a_config_file_that_fails_names_its_line(tmp_path, line, words):
    text = (
        f'from grpo_jax.configs import default\n\n\ndef get_config():\n    config = default.get_config()\n    {line}\n'
    )
    (tmp_path / 'mine.py').write_text(f'{text}    return config\n')
    with pytest.raises(BadInput) as error:
        config_of(f'--config={tmp_path}/mine.py')
    message = str(error.value)
    assert all(word in message for word in words) and '\n' not in message, message


def test_options_of_a_data_set_need_no_key_in_the_experiment():
    config = config_of(
        '--config=arithmetic', '--config.data.name=files', '--config.data.options.folder=there',
        '--config.data.options.prompt_field=q', '--config.data.options.answer_field=007',
    )  # fmt: skip
    assert config.data.options.to_dict() == {'folder': 'there', 'prompt_field': 'q', 'answer_field': '007'}
    assert config_of('--config=arithmetic', '--config.data.options.digits=2').data.options.count == 20000
    mixed = config_of(
        '--config=arithmetic', '--config.data.name=mixture', "--config.data.options.sources=[{'name': 1}]"
    )
    assert [dict(source) for source in mixed.data.options.sources] == [{'name': 1}]


REWARD = """
def mine(completion, example, *, threshold: float = 0.5, words=('a',), strict: bool = False):
    return float(len(completion) > threshold)
"""


def test_options_of_a_users_reward_need_no_key(tmp_path):
    (tmp_path / 'mine.py').write_text(REWARD)
    reward = f"--config.reward.parts=(('{tmp_path}/mine.py:mine', 1.0),)"
    config = config_of('--config=arithmetic', reward, '--config.reward.options.mine.threshold=2')
    assert config.reward.options.mine.to_dict() == {'threshold': 2.0}
    config = config_of('--config=arithmetic', reward, '--config.reward.options.mine.strict=True')
    assert config.reward.options.mine.strict is True


def test_keys_that_no_file_lists_are_settable():
    # in configs/default.py stand the common ones alone
    config = config_of(
        '--config=arithmetic', '--config.diagnose.dead_share=0.8', '--config.learner.chunk=256',
        '--config.algorithm.icepop_low=0.25', '--config.supervised.optimizer.b1=0.8', '--config.log.probe_every=0',
    )  # fmt: skip
    assert (config.diagnose.dead_share, config.learner.chunk, config.algorithm.icepop_low) == (0.8, 256, 0.25)
    assert (config.supervised.optimizer.b1, config.log.probe_every) == (0.8, 0)


@pytest.mark.parametrize(
    ('override', 'words'),
    [
        ('--config.rollout.groupsize=4', ['config.rollout has no groupsize', 'group_size']),
        ('--config.data.options.digit=4', ['config.data.options has no digit', 'digits']),
        ('--config.reward.options.math.x=1', ['config.reward.options has no math']),
        ('--config.algorithm.squash_width=1.0', ['config.algorithm has no squash_width']),
        ('--config.diagnose.dead_shar=0.8', ['config.diagnose has no dead_shar', 'dead_share']),
        ('--config.algorithm.icepop_lo=0.8', ['config.algorithm has no icepop_lo', 'icepop_low']),
        ('--config.algorithm.source=pairs', ['config.algorithm has no source']),
        ('--noconfig.data.chatt', ['config.data has no chatt', 'chat']),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(override, words):
    with pytest.raises(BadInput) as error:
        config_of('--config=arithmetic', override)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_numbers_of_one_name_have_one_default_in_signatures_and_config():
    section, defaults = default.get_config('sft').algorithm, algorithms.default_numbers()
    assert len(defaults) > 30 and set(defaults) <= set(section.keys())
