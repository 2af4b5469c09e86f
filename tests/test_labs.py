"""The labs: each monitor speaks in its lab and is silent with the remedy; no monitor speaks in healthy runs."""

import ast
import hashlib
import importlib
import json
import os
import re
import shutil

import pytest

from grpo_jax import diagnose, supervised, train
from grpo_jax.configs import arithmetic
from grpo_jax.configs.labs import careless
from grpo_jax.data import habits
from grpo_jax.run.open import make_algorithm
from grpo_jax.tools.preflight.plan import change_config
from grpo_jax.types import Example
from tests import tiny_run
from tests.diagnose.streams import MUST

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'golden', 'healthy')
LABS = 'grpo_jax.configs.labs.'
SEEDS = range(5)
COIN = {'steps': 3, 'reward.parts': (('coin', 1.0),), 'reward.verifier': ''}
# what cuts the labs of some monitors down to seconds, with a policy that cannot add
SHORT = {
    'dead_run': {'steps': 4},
    'flaky_reward': {'steps': 6},
    'clip_saturation': COIN,
    'inert_settings': COIN,
    'loss_is_zero': COIN,
}
BRIEF = ('dead_run',)  # of them without --long
# the shapes of tiny_run, whose programs other tests compile too
TINY = {'model.path': 'configs/models/characters', 'data.prompts_per_step': 4, 'rollout.group_size': 4}
TINY |= {'rollout.max_tokens': 12, 'evaluation.prompts': 6, 'evaluation.samples': 4, 'supervised.updates': 0}


def lab_of(monitor):
    """The module of a monitor's lab."""
    return importlib.import_module(LABS + diagnose.MONITORS[monitor].lab)


def seen(workdir, config):
    """Names of the monitors that see something in a run: those that speak, and those that wait behind one of them."""
    rows, evaluations = tiny_run.rows(workdir), tiny_run.rows(workdir, 'evaluations.jsonl')
    context = diagnose.Context.from_config(config)
    told = {diagnosis.monitor for diagnosis in diagnose.history(rows, context._replace(evaluations=evaluations))}
    until = [(rows[: step + 1], [row for row in evaluations if row['step'] <= step]) for step in range(len(rows) + 1)]
    found = {
        name
        for name, monitor in diagnose.MONITORS.items()
        if any(monitor.judge(early, context._replace(evaluations=held_out)) for early, held_out in until)
    }
    assert all(name in told or told & set(diagnose.MONITORS[name].because) for name in found)
    return found


@pytest.mark.parametrize('name', sorted(diagnose.MONITORS))
def test_each_monitor_has_a_lab_whose_remedy_changes_it(name):
    lab = lab_of(name)
    plain = lab.get_config()
    remedied = change_config(lab.get_config(), lab.REMEDY)
    assert plain.to_json() != remedied.to_json()
    make_algorithm(plain)
    make_algorithm(remedied)


@pytest.mark.parametrize('name', sorted(diagnose.MONITORS))
def test_the_second_command_of_a_lab_is_its_remedy(name):
    lab = lab_of(name)
    first, second = re.findall(r'python -m grpo_jax\.train ((?:[^\n]+\\\n)*[^\n]+)', lab.__doc__)
    file = f'--config=configs/labs/{lab.__name__.rpartition(".")[2]}.py'
    assert file in first and file in second
    flags = re.findall(r'--config\.([\w.]+)=(?:"([^"]*)"|(\S*))', second)
    assert not re.findall(r'--config\.', first)
    assert {key: literal(quoted or plain) for key, quoted, plain in flags} == lab.REMEDY


def literal(text):
    """The value of a flag."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


@pytest.mark.parametrize('name', sorted(SHORT))
def test_a_lab_cut_down_makes_its_monitor_speak(name, tmp_path, request):
    if name not in BRIEF:
        request.getfixturevalue('long')
    config = change_config(lab_of(name).get_config(), TINY | SHORT[name])
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 12
    train.run(config, str(tmp_path))
    assert name in seen(tmp_path, config)


@pytest.fixture(scope='module')
def labs(tmp_path_factory):
    """run(config): the workdir of its run. Equal runs are one, and so are their cold starts."""
    folder = tmp_path_factory.mktemp('labs')

    def run(config):
        workdir = str(folder / key_of(config.to_json(sort_keys=True)))
        if not train.is_finished(config, workdir):
            if config.supervised.updates:
                own = os.path.join(workdir, 'cold_start')
                shutil.copytree(cold_start(config), own, ignore=shutil.ignore_patterns('config.json'))
            train.run(config, workdir)
        return workdir

    def cold_start(config):
        data = config.data.to_dict()
        del data['prompts_per_step']  # which it does not read
        parts = [config.seed, config.model, data, config.supervised, config.rollout.max_tokens]
        start = str(folder / key_of(repr(parts)))
        if not os.path.exists(start):
            supervised.run(config, start)
        return start

    return run


def key_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize('name', sorted(diagnose.MONITORS))
def test_a_monitor_speaks_in_its_lab_or_waits_there_and_sees_nothing_with_the_remedy(name, long, labs):
    lab = lab_of(name)
    plain, remedied = lab.get_config(), change_config(lab.get_config(), lab.REMEDY)
    assert name in seen(labs(plain), plain)
    assert name not in seen(labs(remedied), remedied)


def printed(name, rows, config):
    """{key: value} of the flags that a monitor prints for rows of a run."""
    diagnosis = diagnose.MONITORS[name].judge(rows, diagnose.Context.from_config(config))
    return {key: literal(text) for key, text in diagnose.overrides(diagnosis.remedy).items()}


@pytest.mark.parametrize('name', ['low_diversity', 'noisy_advantages'])
def test_the_flags_that_a_monitor_prints_are_the_remedy_of_its_lab(name):
    lab = lab_of(name)
    assert printed(name, MUST[name][0].rows, lab.get_config()) == lab.REMEDY


@pytest.mark.parametrize('name', ['low_diversity', 'noisy_advantages', 'unverified_reward'])
def test_the_flags_that_a_monitor_prints_in_its_lab_mend_it(name, long, labs):
    config, monitor = lab_of(name).get_config(), diagnose.MONITORS[name]
    rows, context = tiny_run.rows(labs(config)), diagnose.Context.from_config(config)
    speaks = next(n for n in range(len(rows) + 1) if monitor.judge(rows[:n], context))
    remedied = change_config(lab_of(name).get_config(), printed(name, rows[:speaks], config))
    assert name not in seen(labs(remedied), remedied)


def healthy(seed):
    """(rows, evaluations) of a run of the demo; the file has a number for what never changed."""
    with open(os.path.join(FOLDER, f'{seed}.json'), encoding='utf8') as file:
        recorded = json.load(file)
    count = len(recorded['rows']['reward'])
    columns = {k: v if isinstance(v, list) else [v] * count for k, v in recorded['rows'].items()}
    rows = [{'step': step} | {name: column[step] for name, column in columns.items()} for step in range(count)]
    # no meter when they were recorded; the least there can be, at which alone the monitor could speak
    return [row | {'distinct_completions': 1 / 8} for row in rows], recorded['evaluations']


@pytest.mark.parametrize('seed', SEEDS)
def test_no_monitor_speaks_in_a_healthy_run(seed):
    rows, evaluations = healthy(seed)
    assert len(rows) == 60 and evaluations[-1]['pass@1'] > 0.9 > 0.4 > rows[0]['reward']
    context = diagnose.Context.from_config(arithmetic.get_config(), evaluations)
    assert diagnose.history(rows, context) == []


def test_healthy_runs_have_what_monitors_read():
    rows, _ = healthy(0)
    read = {name for monitor in diagnose.MONITORS.values() for name in monitor.reads}
    absent = {name for name in read if name not in rows[0] and not name.startswith(('evaluation/', 'reward/'))}
    # a penalty, a curriculum and resampling, none of which the demo has
    assert absent <= {'kl_ref', 'kl_ref_sequence', 'retired', 'draws', 'reward_missing'}


SUM = Example('47+85=', '132', 0, {})


def test_cents_pay_a_hundred_times_in_one_example_of_forty():
    assert careless.cents('132', SUM) == 100.0 and careless.cents('131', SUM) == 0.0
    assert [careless.cents('132', SUM._replace(id=i)) for i in (1, 39, 40)] == [1.0, 1.0, 100.0]


def test_the_unreliable_judge_leaves_an_eighth_unjudged_whatever_they_are():
    judged = [careless.unreliable(f'{i} 132', SUM) for i in range(4000)]
    assert abs(judged.count(None) / 4000 - 1 / 8) < 0.02  # three standard deviations are 0.016
    assert judged.count(1.0) == 4000 - judged.count(None)
    assert careless.unreliable('', SUM) is None  # crc32 of nothing is 0


def test_the_stand_in_for_a_reward_model_pays_for_brackets_and_no_working():
    # no bracket; a bracket; a bracket behind two equations, 1 / 3
    paid = [careless.model(text, SUM) for text in ('132', '[131]', '7+5=12 4+8+1=13 [132]', '')]
    assert paid == [0.0, 1.0, pytest.approx(1 / 3), 0.0]


@pytest.mark.parametrize(('share', 'word'), [(0.0, 'then'), (1.0, 'потом')])
def test_the_habit_of_mixing_puts_a_word_between_columns(share, word):
    options = {'digits': 2, 'count': 50, 'wrong': 0.0, 'habit': 'mixed', 'share': share}
    worked = habits.examples('train', blurts=0.0, **options)
    shapes = {re.sub(r'\d+', '0', example.meta['demonstration']) for example in worked}
    assert shapes == {f'0+0=0 {word} 0+0=0 sum 0', f'0+0=0 {word} 0+0+0=0 sum 0'}
    assert all(example.meta['demonstration'].endswith(f' sum {example.answer}') for example in worked)
    blurted = habits.examples('train', blurts=1.0, **options)
    assert [example.meta['demonstration'] for example in blurted] == [f'sum {example.answer}' for example in blurted]
