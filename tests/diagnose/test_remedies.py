"""A remedy that is named acts: the run reads what it changes. The printed command is the run's own, to be pasted."""

import ast
import functools
import os
import shlex

import numpy as np
import pytest

from grpo_jax import algorithms, diagnose, rewards
from grpo_jax.algorithms import pieces
from grpo_jax.collect.select import find_dead
from grpo_jax.configs import arithmetic
from grpo_jax.diagnose import MONITORS, Context
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.grouping import Grouping
from grpo_jax.rewards.scoring import compute_rewards
from grpo_jax.run.settings import Settings
from grpo_jax.tools.preflight.plan import change_config
from tests.algorithms import fixture
from tests.diagnose import streams

# two groups of four: one is all wrong, with other lengths, forms and ends; in the other three are right
FORMED = '<think>5</think><answer>{}</answer>'
TEXTS = ['7 7 7 7 7', FORMED.format(8), 'da да 9', '5 5', '12 12 12 12', '12', FORMED.format(12), '3']
TRUNCATED = [True, False, False, True, True, False, False, False]
LENGTHS = [9, 3, 7, 4, 8, 2, 4, 1]
EXAMPLES = [Example('5+6=', '11', 0, {}), Example('5+7=', '12', 1, {})]
SETTINGS = [
    {},
    {'collection.gate': 'outcome'},
    {'reward.parts': (('numeric', 1.0), ('format', 0.2)), 'collection.gate': 'outcome'},
    {'reward.parts': (('repetition', 0.5), ('numeric', 1.0)), 'reward.truncated_reward': -0.5},
    {'reward.verifier': '', 'reward.parts': (('format', 1.0),), 'collection.gate': 'reward'},
    {'collection.dead_groups': 'resample', 'optimizer.learning_rate': 0.0, 'supervised.updates': 400},
]


WITH_SETTINGS = ('dr_grpo', 'maxrl')
PAID, SETTLED = {}, {}  # by settings, since most presets and remedies share them


def pay(options):
    """(shaped rewards, what else an advantage may read, dead groups by the gate) of the completions."""
    settings = repr((options.rewards, options.sampling.max_tokens, options.collection.gate))
    if settings not in PAID:
        functions = rewards.build(options.rewards, options.sampling.max_tokens)
        with functions:
            rewarded = compute_rewards(functions, EXAMPLES, TEXTS, TRUNCATED, LENGTHS)
            grouping = Grouping.by_sizes(np.array([4, 4]))
            shaped = rewards.shape_rewards(functions, rewarded, grouping)
            inputs = rewards.advantage_inputs(functions, EXAMPLES, rewarded, shaped, lambda: (), None, grouping)
        PAID[settings] = shaped, inputs, find_dead(options.collection.gate, rewarded, grouping)
    return PAID[settings]


def step_of(algorithm, options):
    """What a step of the run learns from rewards: advantages of eight completions, as train.py has them."""
    shaped, inputs, dead = pay(options)
    mask = np.arange(9) < np.reshape(LENGTHS, (2, 4, 1))
    values = np.tile(np.arange(9) / 9, (2, 4, 1))
    steps = np.where(mask, values * np.reshape(shaped, (2, 4, 1)) ** options.rewards.steps_with_outcome, np.nan)
    inputs = inputs | {'step_rewards': steps, 'dead': dead}
    inputs |= dict.fromkeys(('old_logprobs', 'sampler_logprobs', 'teacher_logprobs', 'ref_logprobs'), -values)
    inputs |= {'old_entropy': values, 'initial_entropy': 0.5, 'values': values, 'kl': values, 'mask': mask}
    inputs |= {
        'run_baseline': 0.2,
        'prompt_baselines': np.full((2, 4), 0.2),
        'tokens': np.tile(np.arange(9), (2, 4, 1)),
    }
    return algorithms.compute_advantages(algorithm, shaped, **inputs)


def settle(config):
    """The Settings of a config; presets whose configs differ in config.algorithm alone share one value."""
    sections = config.to_dict()
    del sections['algorithm']
    if repr(sections) not in SETTLED:
        SETTLED[repr(sections)] = Settings.from_config(config)
    return SETTLED[repr(sections)]


def read_of(config):
    """All that a run of the config reads, as a text: its pieces with their numbers, its settings, what it learns."""
    algorithm = algorithms.make(config.algorithm, config.collection)
    shown = [(name, pieces.name_of(piece), pieces.numbers(piece)) if callable(piece) else (name, piece)
             for name, piece in algorithm._asdict().items() if name != 'regularizers']  # fmt: skip
    shown.append([(pieces.name_of(piece), pieces.numbers(piece)) for piece in algorithm.regularizers])
    options = settle(config)
    settings = options._asdict()
    for name in ('rewards', 'algorithm', 'config', 'diagnose'):  # the rewards are read where they change an advantage
        del settings[name]
    judging = options.rewards.deadline, options.rewards.memory_gib, options.rewards.self_test, options.rewards.retries
    return repr((shown, settings, step_of(algorithm, options).tolist(), judging))


def values_of(flags):
    """{key: value} of a remedy's flags."""
    found = {}
    for key, text in diagnose.overrides(flags).items():
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


@pytest.mark.parametrize('preset', fixture.PRESETS)
def test_the_run_reads_what_any_remedy_changes(preset, request):
    """For every monitor, answer and preset, and for settings that make some remedies inert: none of those is named."""
    if fixture.PRESETS.index(preset) % 4 and preset not in WITH_SETTINGS:
        request.getfixturevalue('long')
    inert, base = [], arithmetic.get_config(preset)
    for settings in SETTINGS if preset in WITH_SETTINGS else SETTINGS[:1]:
        config = change_config(base, settings)
        try:
            before = read_of(config)
        except BadInput:  # the preset needs what these settings take away
            continue
        context = Context.from_config(config)
        context = context._replace(acts=functools.cache(context.acts))
        answers = [answer for monitor in MONITORS.values() for answer in monitor.answers.values()]
        remedies = {context.remedy(answer, {'margin': '30'}, 0) for answer in answers} - {''}  # lengths from 2 on
        assert len(remedies) > 8
        inert += [(flags, settings) for flags in remedies if read_of(change_config(config, values_of(flags))) == before]
    assert not inert


def context_of(preset='dr_grpo', limits=None, **changes):
    """The Context of the demo with some keys changed; __ in a name stands for a dot."""
    config = change_config(arithmetic.get_config(preset), {k.replace('__', '.'): v for k, v in changes.items()})
    return Context.from_config(config, limits=limits or diagnose.Limits())


def remedy(monitor, answer, context, step=0, **numbers):
    """The flags that a monitor's answer names in a run."""
    return context.remedy(MONITORS[monitor].answers[answer], numbers, step)


def test_a_price_of_truncation_is_named_only_with_a_gate_that_lets_wrong_groups_learn():
    assert remedy('truncation', 'grown', context_of()) == '--amend --config.reward.truncated_reward=-0.5'
    gated = remedy('truncation', 'grown', context_of(collection__gate='outcome'))
    assert gated == '--branch=DIR --config.collection.gate=reward --config.reward.truncated_reward=-0.5'
    for unread in (context_of('maxrl'), context_of(reward__truncated_reward=-0.5)):
        assert remedy('truncation', 'grown', unread) == '--amend --config.optimizer.learning_rate=3e-05'


def test_no_budget_beyond_the_models_context_is_named():
    # 8 + 2 * 32 tokens
    assert remedy('truncation', '', context_of(limits=diagnose.Limits(72))) == '--amend --config.rollout.max_tokens=64'
    context = context_of(limits=diagnose.Limits(71))
    assert remedy('truncation', '', context) == ''
    diagnosis = MONITORS['truncation'].judge(streams.rows(2, truncated=0.5), context)
    assert 'no remedy is named, since --amend --config.rollout.max_tokens=64 changes nothing' in diagnosis.cause


def test_a_chat_template_is_named_only_where_there_is_one():
    assert remedy('dead_run', 'unparsed', context_of()) == '--workdir=NEW --config.data.chat=True'
    assert remedy('dead_run', 'unparsed', context_of(limits=diagnose.Limits(chat_template=False))) == ''


def test_overlong_begins_where_it_takes_something_from_the_lengths_that_were_seen():
    flags = remedy('length_hacking', '', context_of(), margin='12')
    assert flags.endswith('length_shaping=overlong --config.reward.options.overlong.margin=12')


def test_after_the_last_step_a_remedy_names_a_new_run():
    context = context_of(learner__minibatches=4)
    assert remedy('clip_saturation', '', context, 58).startswith('--amend')
    for step in (59, 60):  # the last of 60 steps, and the evaluation behind it
        flags = remedy('clip_saturation', '', context, step)
        assert flags == '--workdir=NEW --config.learner.epochs=1 --config.learner.minibatches=2'


COMMAND = ['/venv/bin/python', '-m', 'grpo_jax.train', '--config=arithmetic', '--config.steps', '9', '--workdir']


def test_the_printed_command_is_the_runs_own_with_the_remedy(tmp_path):
    """Real folders, quoted for a shell; what it replaces is left out, whatever way it was written."""
    workdir = f'{tmp_path}/my runs/a'
    words = [*COMMAND, workdir, '--amend', '--config.optimizer.learning_rate=1e-2']
    flags = '--amend --config.optimizer.learning_rate=0.001'
    text = diagnose.command_with(flags, workdir, words)
    assert text == shlex.join([*COMMAND[:6], f'--workdir={workdir}', *shlex.split(flags)])
    parts = '''--branch=DIR --config.reward.parts="(('numeric', 1.0), ('language', 1.0))"'''
    branched = shlex.split(diagnose.command_with(parts, workdir, words))
    assert branched[-3:] == [f'--workdir={workdir}', f'--branch={workdir}_2', shlex.split(parts)[1]]
    assert '--config.optimizer.learning_rate=1e-2' in branched and '--amend' not in branched


def test_a_new_run_gets_a_folder_that_is_not_there(tmp_path):
    workdir = str(tmp_path / 'a')
    os.makedirs(f'{workdir}_2')
    words = ['grpo-jax', 'train', f'--workdir={tmp_path / "parent"}', f'--branch={workdir}/', '--config=arithmetic']
    text = diagnose.command_with('--workdir=NEW --config.steps=9', f'{workdir}/', words)
    assert text == f'grpo-jax train --config=arithmetic --workdir={workdir}_3 --config.steps=9'
    going_on = diagnose.command_with('--amend --config.steps=9', f'{workdir}/', words)
    assert going_on == f'grpo-jax train --config=arithmetic --workdir={workdir} --amend --config.steps=9'


def test_a_sweeps_run_has_flags_alone():
    assert diagnose.command_with('--amend --config.steps=9', 'runs/sweep/grpo/0', [*COMMAND, 'runs/sweep']) == ''
    assert diagnose.command_with('', 'runs/a', [*COMMAND, 'runs/a']) == ''


IMPORT = 'from grpo_jax.run.steering import Steering'
NOTEBOOK = ['/venv/bin/python', '-m', 'ipykernel_launcher', '-f', 'kernel.json']


@pytest.mark.parametrize(
    'flags, statements',
    [
        (
            '--amend --config.steps=9',
            f"{IMPORT}; config.steps = 9; train.run(config, 'runs/a', steering=Steering(amend=True))",
        ),
        (
            """--branch=DIR --config.algorithm.kl=k3 --config.reward.parts="(('numeric', 1),)\"""",
            f"{IMPORT}; config.algorithm.kl = 'k3'; config.reward.parts = (('numeric', 1),); "
            "train.run(config, 'runs/a', steering=Steering(branch='runs/a_2'))",
        ),
        (
            '--workdir=NEW --config.rollout.cache_dtype=',
            "config.rollout.cache_dtype = ''; train.run(config, 'runs/a_2')",
        ),
        ('--config.reward.retries=8', "config.reward.retries = 8; train.run(config, 'runs/a')"),
    ],
)
def test_in_a_notebook_a_remedy_is_what_a_cell_runs(flags, statements):
    for words in (NOTEBOOK, ['/venv/bin/python', 'my_loop.py']):
        assert diagnose.command_with(flags, 'runs/a/', words) == statements


def test_less_is_paid_for_all_but_the_verifier_wherever_it_lies(tmp_path):
    judge = tmp_path / 'mine.py'
    judge.write_text('def judge(completion, example):\n    return 1.0\n')
    parts = (('format', 0.5), (f'{judge}:judge', 2.0))
    context = context_of(reward__parts=parts, reward__verifier='judge')
    assert values_of(remedy('hacked_part', '', context)) == {
        'reward.parts': (('format', 0.05), (f'{judge}:judge', 2.0))
    }
    # a verifier that only measures is paid
    context = context_of(reward__parts=(('format', 0.5), ('numeric', 0.0)))
    assert values_of(remedy('falling_evaluation', 'paid', context)) == {
        'reward.parts': (('format', 0.05), ('numeric', 1.0))
    }
