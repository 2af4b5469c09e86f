"""The labs: each monitor speaks in its lab and is silent with the remedy; no monitor speaks in healthy runs."""

import ast
import copy
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import sys

from absl import flags
import pytest

from grpo_jax import diagnose, supervised, train
from grpo_jax.configs import arithmetic
from grpo_jax.configs.labs import careless
from grpo_jax.data import habits
from grpo_jax.run import cli
from grpo_jax.run.open import make_algorithm
from grpo_jax.run.steering import value_of
from grpo_jax.tools.preflight.plan import change_config
from grpo_jax.types import Example
from tests import doc_examples, tiny_run

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'golden', 'healthy')
LABS = 'grpo_jax.configs.labs.'
SEEDS = range(5)
COIN = {'steps': 4, 'reward.parts': (('coin', 1.0),), 'reward.verifier': ''}
# what cuts the labs of some monitors down to seconds, with a policy that cannot add
SHORT = {
    'flaky_reward': {'steps': 6},
    'correction_at_bound': COIN | {'steps': 5},
    'inert_settings': COIN,
    'loss_is_zero': COIN,
    'sampler_mismatch': {'steps': 4, 'diagnose.sampler_gap': 1e-5},
}
# monitors whose lab no flag mends, and the words in which the diagnosis says so
UNMENDED = {
    'data_exhausted': 'which no flag can name',
    'dead_all_right': 'which no flag can name',
    'flaky_reward': 'which no flag mends',
    'loss_is_zero': 'watch reward and grad_norm instead',
}
# monitors of accuracy: with the remedy more are right in the end than when the monitor spoke
BETTER = ('falling_evaluation', 'hacked_part', 'overoptimization')
MORE = 14  # steps that a run goes on for with a remedy: a window and some
# the shapes of tiny_run, whose programs other tests compile too
TINY = {'model.path': tiny_run.MODEL, 'data.prompts_per_step': 4, 'rollout.group_size': 4}
TINY |= {'rollout.max_tokens': 12, 'evaluation.prompts': 2, 'evaluation.samples': 1, 'supervised.updates': 0}


def lab_of(monitor):
    """The module of a monitor's lab."""
    return importlib.import_module(LABS + diagnose.MONITORS[monitor].lab)


def read(workdir, config):
    """(rows, Context with its evaluations) of a run."""
    evaluations = tiny_run.rows(workdir, 'evaluations.jsonl')
    return tiny_run.rows(workdir), diagnose.Context.from_config(config)._replace(evaluations=evaluations)


def sees(name, rows, context):
    """Whether a monitor sees something at any step of a run, be it that it speaks or waits behind another."""

    def judge(step):
        known = [row for row in context.evaluations if row['step'] <= step]
        return diagnose.MONITORS[name].judge(rows[: step + 1], context._replace(evaluations=known))

    return any(judge(step) for step in range(len(rows) + 1))


def printed(name, workdir, config):
    """The Diagnosis that a run prints of what a monitor sees: the monitor's, or its cause's, behind which it waits."""
    rows, context = read(workdir, config)
    assert sees(name, rows, context)
    told = diagnose.history(rows, context)
    own = [diagnosis for diagnosis in told if diagnosis.monitor == name]
    return (own or [diagnosis for diagnosis in told if diagnosis.monitor in diagnose.MONITORS[name].because])[0]


def go_on(diagnosis, file, base, workdir, run):
    """(rows, Context) of the printed command's run; base: the lab's config without changes by flags.

    run(config, workdir, steering) trains. The command is parsed as a shell and the program would. With --amend and
    --branch it goes on with the run that was stopped at the diagnosis, for MORE steps.
    """
    words = [sys.executable, '-m', 'grpo_jax.train', f'--config={file}', f'--workdir={workdir}']
    command = diagnose.command_with(diagnosis.remedy, str(workdir), words)
    if '--workdir=NEW' not in diagnosis.remedy:
        run(change_config(copy.deepcopy(base), {'steps': diagnosis.step + 1}), str(workdir), None)
    with doc_examples.parsed('train', shlex.split(command)[3:]):
        steering, folder = cli.read_steering(), flags.FLAGS.branch or flags.FLAGS.workdir
        new = flags.FLAGS.config.to_dict()
        begun = flags.FLAGS.workdir
    changed = {key: value_of(new, key) for key in diagnose.overrides(diagnosis.remedy)}
    changed |= {} if '--workdir=NEW' in diagnosis.remedy else {'steps': diagnosis.step + 1 + MORE}
    config = change_config(copy.deepcopy(base), changed)
    run(config, begun, steering)
    return read(folder, config)


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
def test_a_lab_cut_down_makes_its_monitor_speak_and_what_it_prints_mends_it(name, tmp_path):
    lab = lab_of(name)
    config = change_config(lab.get_config(), TINY | SHORT[name])
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 12
    train.run(copy.deepcopy(config), str(tmp_path / 'plain'))
    diagnosis = printed(name, tmp_path / 'plain', config)
    assert diagnosis.monitor == name
    if name in UNMENDED:
        assert not diagnosis.remedy and UNMENDED[name] in str(diagnosis)
        return
    check_flags(diagnosis, lab, name)

    def run(config, workdir, steering):
        train.run(config, workdir, steering=steering)

    rows, context = go_on(diagnosis, f'configs/labs/{name}.py', config, tmp_path / 'lab', run)
    assert diagnose.MONITORS[name].judge(rows, context) is None


def check_flags(diagnosis, lab, name):
    """Asserts that the printed flags are what the lab applies; of numbers that the rows decide, about.

    A cause's flags are the same keys: how far an update threw the policy differs between machines, and so does whether
    the cause speaks.
    """
    if diagnosis.monitor != name:
        assert diagnose.overrides(diagnosis.remedy).keys() == lab.REMEDY.keys()
        return
    values = {key: literal(text) for key, text in diagnose.overrides(diagnosis.remedy).items()}
    assert values == {k: pytest.approx(v, rel=0.4) if isinstance(v, (int, float)) else v for k, v in lab.REMEDY.items()}


@pytest.fixture(scope='module')
def labs(tmp_path_factory):
    """run(config, workdir, steering): the workdir of a run. Equal ones are one, and so are their cold starts."""
    folder = tmp_path_factory.mktemp('labs')

    def run(config, workdir=None, steering=None):
        workdir = workdir or str(folder / key_of(config.to_json(sort_keys=True)))
        if steering or not train.is_finished(config, workdir):
            own = os.path.join(workdir, 'cold_start')
            if config.supervised.updates and not os.path.exists(own):
                shutil.copytree(cold_start(config), own, ignore=shutil.ignore_patterns('config.json'))
            train.run(config, workdir, steering=steering)
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
def test_what_a_lab_prints_is_what_the_lab_applies_and_the_monitor_is_silent_after_it(name, long, labs, tmp_path):
    lab = lab_of(name)
    plain = lab.get_config()
    diagnosis = printed(name, labs(lab.get_config()), plain)
    if name in UNMENDED:
        assert not diagnosis.remedy and UNMENDED[name] in str(diagnosis)
        remedied = change_config(lab.get_config(), lab.REMEDY)
        assert not sees(name, *read(labs(copy.deepcopy(remedied)), remedied))
        return
    check_flags(diagnosis, lab, name)
    rows, context = go_on(diagnosis, f'configs/labs/{name}.py', plain, tmp_path / 'lab', labs)
    if '--workdir=NEW' in diagnosis.remedy:
        assert not sees(name, rows, context)
    assert diagnose.MONITORS[name].judge(rows, context) is None
    if name in BETTER:
        right = [row['reward/numeric'] for row in rows]
        spoke = tiny_run.rows(labs(lab.get_config()))[diagnosis.step]['reward/numeric']
        assert sum(right[-3:]) / 3 > spoke + 0.05


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
    # the demo has no penalty, curriculum, resampling or service, and no rows that go on
    services = {'reward_missing', 'reward_refused'}
    assert (
        absent
        <= {'kl_ref', 'kl_ref_sequence', 'retired', 'draws', 'fresh_gap_mean', 'stale_ess', 'correction_bound'}
        | services
    )


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
