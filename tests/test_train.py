"""Whole runs, small."""

import ast
import functools
import glob
import inspect
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from grpo_jax import algorithms, evaluate, rewards, train
from grpo_jax.algorithms import pieces, surrogates
from grpo_jax.algorithms.algorithm import MODULES
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.run import checkpoint, cli
from grpo_jax.run.open import open_split
from grpo_jax.tools import export, show
from grpo_jax.types import Example
from tests import small_model, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    workdir = str(tmp_path_factory.mktemp('runs') / 'tiny')
    return workdir, train.run(tiny_run.config(steps=6, log__rollouts=2, supervised__updates=2), workdir, profile=(1, 1))


def test_a_callback_sees_each_step_as_its_row_of_metrics(tmp_path):
    seen = []
    config = tiny_run.config(steps=3, supervised__updates=0)
    train.run(config, str(tmp_path), on_step=lambda step, row: seen.append((step, row)))
    assert [step for step, _ in seen] == [0, 1, 2]
    assert [row for _, row in seen] == tiny_run.rows(tmp_path)


def test_what_a_callback_raises_ends_the_run_which_is_saved_and_goes_on(tmp_path):
    seen = []

    def fail(step, row):
        seen.append(step)
        if len(seen) == 2:
            raise ZeroDivisionError('of a plot')

    config = tiny_run.config(steps=3, supervised__updates=0, checkpoint__every=100)
    with pytest.raises(ZeroDivisionError, match='of a plot'):
        train.run(config, str(tmp_path), on_step=fail)
    assert checkpoint.steps(str(tmp_path))[0] == 2  # the step that it saw is finished
    train.run(config, str(tmp_path), on_step=fail)
    assert seen == [0, 1, 2] and [row['step'] for row in tiny_run.rows(tmp_path)] == [0, 1, 2]


def test_a_profile_is_written_for_tensorboard(finished):
    traces = glob.glob(os.path.join(finished[0], 'profile', 'plugins', 'profile', '*', '*.xplane.pb'))
    assert len(traces) == 1
    with open(traces[0], 'rb') as file:
        trace = file.read()
    assert all(name in trace for name in (b'sample', b'reward', b'update'))  # the stages, by name


def test_profile_steps_are_two_rising_numbers():
    values = {'3:5': (3, 5), '4:4': (4, 4)}
    for text, steps in values.items():
        assert cli.parse_steps(text) == steps
    for text in ('5', '5:3', 'a:b', ':', '1:2:3', '-1:2'):
        with pytest.raises(BadInput, match='--profile'):
            cli.parse_steps(text)


def test_a_run_leaves_its_files(finished):
    workdir, state = finished
    assert int(state.step) == 6
    assert {
        'config.json',
        'programs.json',
        'metrics.jsonl',
        'timings.jsonl',
        'evaluations.jsonl',
        'tensorboard',
        'rollouts',
        'checkpoints',
        'model',
        'cold_start',
    } <= set(os.listdir(workdir))
    assert [row['step'] for row in tiny_run.rows(workdir)] == list(range(6))
    assert sorted(os.listdir(os.path.join(workdir, 'rollouts'))) == [f'{step:06d}.jsonl' for step in (0, 2, 4, 5)]
    assert [row['step'] for row in tiny_run.rows(workdir, 'evaluations.jsonl')] == [0, 6]


def test_a_dump_holds_prompt_completion_reward_and_advantage(finished):
    rows = tiny_run.rows(finished[0], 'rollouts/000000.jsonl')
    assert len(rows) == 16
    for group in range(4):
        members = rows[4 * group : 4 * group + 4]
        assert len({row['prompt'] for row in members}) == 1
        assert sum(row['advantage'] for row in members) == pytest.approx(0, abs=1e-6)


def test_sampler_and_learner_agree_at_every_step(finished):
    assert max(row['sampler_gap_max'] for row in tiny_run.rows(finished[0])) < 1e-4


def test_evaluation_of_a_workdir_is_deterministic_and_equals_the_runs_own(finished):
    workdir, _ = finished
    run = evaluate.open_recorded(workdir)
    evaluator = evaluate.make_evaluator(run, open_split(run, 'test'), 'test', run.settings.evaluation.samples)
    found = evaluator(evaluate.open_policy(run)[0])
    last = tiny_run.rows(workdir, 'evaluations.jsonl')[-1]
    assert found | {'step': 6} == last


def test_export_has_the_runs_weights(finished, tmp_path):
    workdir, state = finished
    export.export(workdir, str(tmp_path / 'out'), 'float32')
    c = families.load_config(tmp_path / 'out')
    nowhere = transformer.map_table(lambda path, param: jax.devices()[0], transformer.param_table(c))
    for a, b in zip(
        jax.tree.leaves(hf.load_params(tmp_path / 'out', c, nowhere)), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    card = (tmp_path / 'out' / 'README.md').read_text(encoding='utf8')
    assert '# out\n' in card and 'the weights of step 6.' in card
    curve = card.split('## Curve')[1].split('##')[0]
    assert [line.split()[1] for line in curve.splitlines() if line.startswith('| `')] == ['`0`', '`6`']
    with open(os.path.join(workdir, 'programs.json'), encoding='utf8') as file:
        assert all(f'`{program}`' in card for program in json.load(file).values())


# one preset for each way through the loop; the others differ in array mathematics alone
@pytest.mark.parametrize('preset', ['grpo', 'rloo', 'ppo', 'gtpo', 'm2po'])
def test_each_preset_trains(request, preset, tmp_path):
    if preset != 'ppo':
        request.getfixturevalue('long')
    config = tiny_run.config(preset=preset, steps=2, supervised__updates=0, learner__minibatches=2)
    state = train.run(config, str(tmp_path))
    assert (state.ref_params is not None) == (preset in ('grpo', 'rloo', 'ppo'))
    assert ('critic' in state.aux) == (preset == 'ppo')
    rows = tiny_run.rows(tmp_path)
    assert len(rows) == 2 and all(row['finite'] == 1 for row in rows)
    assert ('kl_ref' in rows[0]) == (preset in ('grpo', 'rloo', 'ppo'))


SURROGATE = '''

def squash(ratio, advantages, *, squash_width=0.3):
    """-A w tanh((x - 1) / w): the ratio counts less the farther it is from 1."""
    return -advantages * squash_width * jnp.tanh((ratio - 1) / squash_width)
'''
PRESET = '''"""GRPO with a squashed ratio."""


def apply(algorithm):
    algorithm.surrogate, algorithm.weights = 'squash', 'token_mean'
'''


def test_a_new_surrogate_and_its_preset_are_a_few_lines_in_files(long, tmp_path):
    assert sum(len(text.splitlines()) for text in (SURROGATE, PRESET)) < 15
    for folder in ('grpo_jax', 'configs'):
        shutil.copytree(os.path.join(ROOT, folder), tmp_path / folder, symlinks=True)
    with open(tmp_path / 'grpo_jax/algorithms/surrogates.py', 'a', encoding='utf8') as file:
        file.write(SURROGATE)
    (tmp_path / 'configs/algorithms/squash.py').write_text(PRESET, encoding='utf8')
    small = [
        'steps=2',
        'supervised.updates=0',
        'data.options.digits=1',
        'data.options.count=40',
        'rollout.max_tokens=8',
        'data.prompts_per_step=4',
        'evaluation.prompts=2',
        'evaluation.samples=2',
        'algorithm.squash_width=0.5',
    ]
    done = subprocess.run(
        [
            sys.executable,
            '-m',
            'grpo_jax.train',
            '--config=configs/arithmetic.py:squash',
            '--workdir=run',
            *(f'--config.{change}' for change in small),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(tiny_run.rows(tmp_path / 'run')) == 2


def test_a_variant_written_in_a_notebook_trains(tmp_path):
    def half_clip(ratio, advantages):
        return 0.5 * surrogates.clip(ratio, advantages, clip_low=0.2, clip_high=0.2)

    config = tiny_run.config(steps=1, supervised__updates=0)
    mine = algorithms.make(config.algorithm)._replace(surrogate=half_clip)
    assert int(train.run(config, str(tmp_path), algorithm=mine).step) == 1


def test_a_critics_advantage_written_in_a_notebook_trains(long, tmp_path):
    def mine(rewards, values, mask):
        return (rewards[..., None] - values) * mask

    config = tiny_run.config(steps=1, supervised__updates=0)
    method = algorithms.make(config.algorithm)._replace(advantage=mine, discount=0.9)
    train.run(config, str(tmp_path), algorithm=method)
    assert np.isfinite(tiny_run.rows(tmp_path)[0]['critic/loss'])


def test_packed_rows_on_two_devices_train_also_where_no_logprobs_are_needed(long, tmp_path):
    config = tiny_run.config(
        steps=1, supervised__updates=0, mesh__data=2, learner__pack_columns=64, evaluation__prompts=2
    )
    assert int(train.run(config, str(tmp_path)).step) == 1


def test_a_run_works_without_jit(long, tmp_path):
    config = tiny_run.config(
        model__path=small_model.write(tmp_path / 'model'),
        steps=1,
        supervised__updates=0,
        data__prompts_per_step=2,
        rollout__group_size=2,
        rollout__max_tokens=3,
    )
    with jax.disable_jit():
        state = train.run(config, str(tmp_path / 'run'))
    assert int(state.step) == 1


def test_show_prints_text_and_ids():
    lines = list(show.lines(tiny_run.config(), 2))
    assert 'stop tokens 1' in lines[0]
    ids = [ast.literal_eval(line[5:]) for line in lines if line.startswith('ids')]
    texts = [ast.literal_eval(line[5:]) for line in lines if line.startswith('text')]
    assert len(ids) == len(texts) == 2
    assert all(text.endswith('=') and len(i) == len(text) for text, i in zip(texts, ids, strict=True))
    assert not any(line.startswith('demonstration') for line in lines)  # a run without a cold start learns from none
    shown = [*show.lines(tiny_run.config(preset='sft'), 2)]
    assert [line.partition(' ')[0] for line in shown[2:6]] == ['example', 'text', 'ids', 'demonstration']


def test_the_main_loop_fits_on_one_screen_and_a_half():
    source = inspect.getsource(train.run)
    (function,) = ast.parse(source).body
    lines = [line.strip() for line in source.splitlines()[function.body[0].end_lineno :]]
    assert len([line for line in lines if line and line[0] != '#']) <= 60  # of code, behind the docstring


def test_every_config_key_is_read(tmp_path):
    """A key that no code reads is an option that lies."""
    read = set()
    config = tiny_run.config(
        preset='dapo',
        steps=1,
        supervised__updates=1,
        reward__length_shaping='overlong',
        reward__options__overlong__margin=4,
    )
    kind = type(config)
    original = kind.__getitem__

    def spy(self, key):
        read.add((id(self), key))
        return original(self, key)

    sections = {id(section): name for name, section in config.items() if isinstance(section, kind)}
    sections |= {id(config): '', id(config.supervised.optimizer): 'supervised.optimizer'}
    keys = {(i, key) for i in sections for key in _section(config, sections[i]).keys()}
    # numbers of pieces that this preset does not use
    unused = {
        name
        for module in MODULES.values()
        for piece in pieces.list_pieces(module).values()
        for name, p in inspect.signature(piece).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
    copy = kind.copy_and_resolve_references
    try:
        kind.__getitem__, kind.copy_and_resolve_references = spy, lambda self, *_: self  # a copy would read every key
        train.run(config, str(tmp_path))
    finally:
        kind.__getitem__, kind.copy_and_resolve_references = original, copy
    missed = {f'{sections[i]}.{key}' for i, key in keys - read if key not in unused}
    assert not missed


def _section(config, name):
    return functools.reduce(lambda section, key: section[key], name.split('.') if name else [], config)


def test_a_reward_that_cannot_score_leaves_the_statistics():
    section = default.get_config().reward
    section.update({'parts': (('mine', 2.0),), 'verifier': '', 'truncated_reward': -0.5})
    functions = {'mine': lambda text, example: None if text == '?' else 1.0}
    with rewards.build(rewards.RewardOptions.from_config(section), 64, functions) as reward_functions:
        rewarded = rewards.compute_rewards(
            reward_functions, [Example('', '', 0, {})], ['a', '?', 'b'], [False, False, True], [1, 1, 1]
        )
    np.testing.assert_array_equal(rewarded.rewards, [2.0, np.nan, 1.5])
    assert np.isnan(rewarded.parts['mine'][1])
