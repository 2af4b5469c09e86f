"""Stages of a recipe: their order, what each begins with, going on after a kill in any of them, and what is refused."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from grpo_jax import evaluate, sample, supervised, train
from grpo_jax.configs.recipes import r1, r1_small
from grpo_jax.errors import BadInput
from grpo_jax.sample import Request
from grpo_jax.tools import export, pipeline
from grpo_jax.tools.pipeline import Stage
from tests import small_model, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NAMES = ['cold_start', 'reasoning', 'samples', 'fine_tuning', 'rules']
SMALL = [
    *tiny_run.FLAGS,
    '--config.rollout.max_tokens=12',
    '--config.algorithm.fixed_length=12',
    '--config.supervised.updates=6',
    '--config.supervised.batch=8',
    '--config.evaluation.prompts=6',
    '--config.checkpoint.every=2',
    '--config.steps=6',
    "--config.reward.parts=(('coin', 1.0),)",
    '--config.reward.verifier=coin',
    '--config.reward.self_test=1.0',
]


def adapted(**options):
    """Two stages with the same adapters, of which the second begins as the first's policy."""
    options = {f'model__lora__{name}': value for name, value in dict(rank=2, **options).items()}
    path = pipeline.policy_folder('work', 'first')
    return [
        Stage('first', 'supervised', tiny_run.config(supervised__updates=2, **options)),
        Stage('second', 'train', tiny_run.config(model__path=path, model__random_init=False, **options)),
    ]


def three_stages(**changes):
    return [
        Stage('first', 'supervised', tiny_run.config(supervised__updates=2)),
        Stage('second', 'train', tiny_run.config(**changes)),
        Stage('third', 'sample', of='second'),
    ]


def test_preferences_are_the_last_stage_of_r1_and_judge_general_prompts_alone():
    *_, rules, last = r1.get_stages(r1.get_config(), 'runs')
    assert (last.name, last.config.model.path) == ('preferences', 'runs/rules/policy')
    names = [source.get('source', source['name']) for source in last.config.data.options['sources']]
    assert names == ['math', 'general'] and [*last.config.reward.by_source] == ['general']
    assert 'model' in dict(last.config.reward.by_source['general']['parts'])
    assert 'model' not in dict(last.config.reward.parts) and not rules.config.reward.by_source


@pytest.mark.parametrize('recipe', [r1, r1_small])
def test_stages_begin_with_what_the_stages_before_them_made(recipe):
    base = recipe.get_config()
    stages = recipe.get_stages(base, 'runs')
    pipeline.check(stages, 'runs')
    stages = stages[: len(NAMES)]
    assert [stage.name for stage in stages] == NAMES
    assert [stage.command for stage in stages] == ['supervised', 'train', 'sample', 'supervised', 'train']
    cold_start, reasoning, samples, fine_tuning, rules = stages
    begins = [stage.config.model.path for stage in (cold_start, reasoning, fine_tuning, rules)]
    assert begins == [base.model.path, 'runs/cold_start/policy', base.model.path, 'runs/fine_tuning/policy']
    assert samples.of == 'reasoning'
    assert fine_tuning.config.data.options['sources'][0]['options']['folder'] == 'runs/samples/run'


class Killed(Exception):
    """What a fake command ends with."""


def test_after_a_kill_anywhere_the_same_command_goes_on_and_repeats_nothing(tmp_path, monkeypatch):
    done, killed, workdir = [], set(), str(tmp_path / 'work')

    def act(what, place):
        if what not in killed:
            killed.add(what)
            raise Killed(what)
        done.append(what)
        os.makedirs(place)

    monkeypatch.setattr(
        sample, 'run', lambda _, of, place, *__, **___: act(f'third of {os.path.relpath(of, workdir)}', place)
    )
    for module in (supervised, train):
        monkeypatch.setattr(module, 'run', lambda _, place: act(os.path.relpath(place, workdir), place))
        monkeypatch.setattr(module, 'is_finished', lambda _, place: os.path.isdir(place))
    monkeypatch.setattr(export, 'export', lambda _, place, *__, **___: act(os.path.relpath(place, workdir), place))
    monkeypatch.setattr(pipeline, 'read_rows', lambda _: [{}])
    for _ in range(5):
        with pytest.raises(Killed):
            pipeline.run(three_stages(), workdir)
    for _ in range(2):
        pipeline.run(three_stages(), workdir)
    assert done == ['first/run', 'first/policy', 'second/run', 'second/policy', 'third of second/run']


def test_supervised_training_is_finished_with_its_last_checkpoint_and_its_own_config(tmp_path):
    made = tiny_run.config(supervised__updates=2, model__path=small_model.write(tmp_path / 'small'))
    workdir = str(tmp_path / 'run')
    assert not supervised.is_finished(made, workdir)
    supervised.run(made, workdir)
    assert supervised.is_finished(made, workdir)
    made.supervised.updates = 3
    assert not supervised.is_finished(made, workdir)


@pytest.mark.parametrize(
    ('stages', 'words'),
    [
        ([], ['stages', 'one or more']),
        (three_stages()[:1] * 2, ["['first', 'first']", 'a name of its own']),
        ([Stage('../out', 'train', tiny_run.config())], ['../out', 'letters']),
        ([Stage('first', 'export', tiny_run.config())], ['stage first', 'export', 'supervised, train, sample']),
        ([Stage('first', 'train')], ['config of stage first', 'None']),
        ([Stage('first', 'sample', of='second')], ['stage first', "'second'", 'before it']),
        ([*three_stages()[:2], Stage('third', 'sample', of='second', request=Request(samples=0))], ['--samples', '0']),
        ([Stage('first', 'supervised', tiny_run.config())], ['supervised.updates of stage first']),
        (three_stages(rollout__group_size=0), ['rollout.group_size']),
        (three_stages(algorithm__clip_low=0.1, algorithm__surrogate='cispo'), ['clip_low']),
    ],
)
def test_stages_that_cannot_run_are_refused_before_the_first_begins(stages, words, tmp_path):
    with pytest.raises(BadInput) as error:
        pipeline.run(stages, str(tmp_path / 'work'))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not os.path.exists(tmp_path / 'work' / 'first')


@pytest.mark.parametrize(('option', 'value', 'word'), [('path', 'mine', 'is in'), ('base_dtype', 'int8', 'rounds')])
def test_adapters_that_are_merged_are_not_added_again_and_not_rounded(option, value, word):
    with pytest.raises(BadInput, match=rf'model\.lora\.{option} of stage second = {value!r}: {word}'):
        pipeline.check(adapted(**{option: value}), 'work')
    begun = adapted(rslora=True, **{option: value})[1].config
    pipeline.begin_with(begun, 'work', 'first')
    assert (begun.model.path, begun.model.lora.path) == ('work/first/policy', '')


def test_an_experiment_without_stages_is_refused():
    with pytest.raises(BadInput, match='has no get_stages'):
        pipeline.read_stages('arithmetic:grpo', tiny_run.config(), 'runs')
    assert [stage.name for stage in pipeline.read_stages('recipes/r1_small', r1_small.get_config(), 'runs')] == NAMES


@pytest.mark.parametrize('returned', ['None', "[('first', 'train')]", 'missing'])
def test_a_file_whose_stages_are_none_is_refused_in_one_line(returned, tmp_path):
    path = tmp_path / 'mine.py'
    path.write_text(f'def get_stages(config, workdir):\n    return {returned}\n')
    with pytest.raises(BadInput, match=r'line 2.*NameError' if returned == 'missing' else 'return a list') as error:
        pipeline.read_stages(str(path), tiny_run.config(), 'runs')
    assert '\n' not in str(error.value)


def start(workdir, model, *flags):
    command = [sys.executable, '-m', 'grpo_jax', 'pipeline', '--config=recipes/r1_small', f'--workdir={workdir}']
    command += [f'--config.model.path={model}', *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_in(workdir, stage, model):
    """kill -9 when a stage's run has three rows of metrics, or has begun to sample."""
    process, folder = start(workdir, model, *SMALL), pathlib.Path(workdir, stage, 'run')
    path, lines = (folder / 'sampling.json', 1) if stage == 'samples' else (folder / 'metrics.jsonl', 3)
    while process.poll() is None:
        if path.exists() and path.read_text(encoding='utf8').count('\n') >= lines:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors


def test_killed_in_each_stage_it_ends_with_the_same_bits(long, tmp_path):
    model = small_model.write(tmp_path / 'small')
    straight, killed = str(tmp_path / 'straight'), str(tmp_path / 'killed')
    process = start(straight, model, *SMALL)
    output, errors = process.communicate()
    assert process.returncode == 0 and 'held-out figures by stage' in output, errors
    for stage in NAMES:
        kill_in(killed, stage, model)
    process = start(killed, model, *SMALL)
    _, errors = process.communicate()
    assert process.returncode == 0 and errors.count('stage ') == 1, errors  # the last alone
    for stage in {*NAMES} - {'samples'}:
        policies = [
            jax.device_get(evaluate.open_policy(evaluate.open_recorded(pipeline.run_folder(workdir, stage)))[0])
            for workdir in (straight, killed)
        ]
        jax.tree.map(np.testing.assert_array_equal, *policies)


def test_the_last_policy_of_the_small_recipe_beats_the_first(long, tmp_path):
    evaluations = pipeline.run(
        r1_small.get_stages(r1_small.get_config(), str(tmp_path / 'work')), str(tmp_path / 'work')
    )
    first, last = evaluations['reasoning'][0], evaluations['rules'][-1]
    assert last['greedy'] > first['greedy'] and last['pass@1'] > first['pass@1'] + 0.3
