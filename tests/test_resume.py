"""kill -9 at any moment, the same command again: bit-equal parameters, metrics and sampled tokens."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from grpo_jax import evaluate
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STEPS = 8
# what the console of a run says; whatever else there is comes from a library
OURS = re.compile(
    r'compil(ing|ed) |read(ing)? the |drawing the weights'
    r'|judging gold answers|evaluat(ing|ed)|(cold start|train): \d+ of \d+(, | in )|sample: |waiting for the '
    r'|(cold start|train): (goes on|finished) after '
    r'|(diagnosis|note) at step |warning: ([a-z_.]+: was .*, now |begins anew: )'
)
SMALL = [
    *tiny_run.FLAGS,
    # a diagnosis quotes the command of its start; the demo's model gets none after the last start, which lacks --amend
    f'--config.model.path={tiny_run.DEMO}',
    '--config.rollout.max_tokens=12',
    '--config.supervised.updates=4',
    '--config.supervised.batch=8',
    '--config.evaluation.prompts=6',
    '--config.checkpoint.every=2',
    '--config.log.rollouts=1',
    '--config.learner.minibatches=2',
    f'--config.steps={STEPS}',
]


def start(workdir, *flags):
    # compiled as users' runs are, not as the rest of the suite
    environment = os.environ | {'XLA_FLAGS': '', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '0'}
    if any(flag.startswith('--config.mesh') for flag in flags):
        environment |= {'JAX_NUM_CPU_DEVICES': '4'}
    return subprocess.Popen(
        [
            sys.executable,
            '-m',
            'grpo_jax.train',
            '--config=configs/arithmetic.py:grpo',
            f'--workdir={workdir}',
            *SMALL,
            *flags,
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(workdir, *flags):
    process = start(workdir, *flags)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert [line for line in errors.splitlines() if not OURS.match(line)] == []


def kill_when_rows(workdir, count, delay, *flags):
    """kill -9 a little after metrics.jsonl has `count` rows, wherever the run then is."""
    process = start(workdir, *flags)
    path = pathlib.Path(workdir, 'metrics.jsonl')
    while process.poll() is None:
        if path.exists() and path.read_text(encoding='utf8').count('\n') >= count:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, 'the run ended before it could be killed'


def params(workdir):
    return jax.device_get(evaluate.open_policy(evaluate.open_recorded(str(workdir)))[0])


@pytest.fixture(scope='module')
def straight(request, tmp_path_factory):
    if not request.config.getoption('--long'):
        pytest.skip('needs --long')  # before the run, which comes before the tests' own fixture
    workdir = tmp_path_factory.mktemp('straight')
    finish(workdir)
    return workdir


def test_two_kills_change_nothing(long, straight, tmp_path):
    moments = np.random.default_rng(0)
    for count in (2, 5):
        kill_when_rows(tmp_path, count, moments.uniform(0, 0.3))
    finish(tmp_path)
    for name in ('metrics.jsonl', 'evaluations.jsonl'):
        assert (tmp_path / name).read_bytes() == (straight / name).read_bytes(), name
    for step in range(STEPS):
        name = f'rollouts/{step:06d}.jsonl'
        assert (tmp_path / name).read_bytes() == (straight / name).read_bytes(), name
    for a, b in zip(jax.tree.leaves(params(tmp_path)), jax.tree.leaves(params(straight)), strict=True):
        np.testing.assert_array_equal(a, b)


# rows of several cuts of the sampler
CARRIED = '--config.rollout.max_tokens=160', '--config.algorithm.correction=truncated'


@pytest.mark.parametrize(
    'flags',
    [
        ('--config.model.lora.rank=2', '--config.algorithm.kl_coef=0.01'),
        (
            *('--config.algorithm.advantage=prompt_moving_mean', '--config.data.options.count=12'),
            *('--config.collection.retire_above=0.2', '--config.collection.revisit=0.4'),
        ),
        (*CARRIED, '--config.collection.in_flight=4'),
        (*CARRIED, '--config.collection.staleness=2'),
        (*CARRIED, '--config.collection.in_flight=4', '--config.collection.staleness=1'),
        ('--config.mesh.data=1', '--config.mesh.fsdp=2', '--config.mesh.sampler=2'),
        ('--config.mesh.data=2', '--config.mesh.sampler=2', '--config.model.lora.rank=2'),
    ],
    ids=['adapters', 'history', 'carried', 'stale', 'both', 'two sides', 'two sides with adapters'],
)
def test_kills_of_a_run_that_keeps_more_change_nothing(long, flags, tmp_path):
    finish(tmp_path / 'kept', *flags)
    moments = np.random.default_rng(2)
    for count in (2, 5):
        kill_when_rows(tmp_path / 'killed', count, moments.uniform(0, 0.3), *flags)
    finish(tmp_path / 'killed', *flags)
    for name in ('metrics.jsonl', 'evaluations.jsonl'):
        assert (tmp_path / 'killed' / name).read_bytes() == (tmp_path / 'kept' / name).read_bytes(), name
    jax.tree.map(np.testing.assert_array_equal, params(tmp_path / 'killed'), params(tmp_path / 'kept'))


def test_a_finished_run_stays_as_it_is(long, straight):
    before = (straight / 'metrics.jsonl').read_bytes()
    finish(straight)
    assert (straight / 'metrics.jsonl').read_bytes() == before
    assert [row['step'] for row in tiny_run.rows(straight)] == list(range(STEPS))


def test_kills_after_an_amendment_change_nothing(long, straight, tmp_path):
    new = ('--config.optimizer.learning_rate=1e-4', '--config.rollout.temperature=0.9')
    shutil.copytree(straight, tmp_path / 'kept')
    shutil.copytree(straight, tmp_path / 'killed')
    finish(tmp_path / 'kept', *new, '--config.steps=12', '--amend')
    moments = np.random.default_rng(1)
    for count in (STEPS + 1, STEPS + 3):  # before the first checkpoint of the new config, and after it
        kill_when_rows(tmp_path / 'killed', count, moments.uniform(0, 0.1), *new, '--config.steps=12', '--amend')
    finish(tmp_path / 'killed', *new, '--config.steps=12')  # the new config is the run's, and needs no flag
    for name in ('metrics.jsonl', 'events.jsonl'):
        assert (tmp_path / 'killed' / name).read_bytes() == (tmp_path / 'kept' / name).read_bytes(), name
    jax.tree.map(np.testing.assert_array_equal, params(tmp_path / 'killed'), params(tmp_path / 'kept'))
