"""A learning rate that is far too high, as a user meets it: one diagnosis, whose command is pasted into a shell."""

import re
import subprocess
import sys

import numpy as np

from grpo_jax.statistics import share_interval
from tests import tiny_run

# sums of two digits and the small model of the labs: a minute a run
FLAGS = '--config=labs/sums --config.steps=12 --config.log.probe_every=0 --config.evaluation.prompts=128'
SAID = re.compile(r'^diagnosis at step (\d+): (\w+): (.*); try (.*)$', re.MULTILINE)


def shell(command):
    """What a command, run by a shell, wrote to stderr."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def train(folder, changes=''):
    """Trains in a folder by command; returns (step, monitor, what is seen and why, command) of each diagnosis."""
    return SAID.findall(shell(f'{sys.executable} -m grpo_jax.train {FLAGS} {changes} --workdir={folder}'))


def greedy(folder):
    """Greedy accuracy on held-out prompts after the last step."""
    return tiny_run.rows(folder, 'evaluations.jsonl')[-1]['greedy']


def test_the_printed_command_mends_a_learning_rate_that_is_far_too_high(long, tmp_path):
    """1e-2: one diagnosis, the cause. Its command, run as printed, ends within 5 points of the default's interval."""
    said = train(tmp_path / 'high', '--config.optimizer.learning_rate=1e-2')
    assert len(said) == 1, said
    ((step, monitor, text, command),) = said
    assert monitor == 'large_updates' and int(step) <= 3 and 'the learning rate is far too high' in text
    assert command.endswith(f'--workdir={tmp_path}/high_2 --config.optimizer.learning_rate=0.00033')
    assert greedy(tmp_path / 'high') < 0.1
    assert not SAID.findall(shell(command))
    assert not train(tmp_path / 'default')
    right = round(128 * greedy(tmp_path / 'default'))
    low, _ = share_interval(np.repeat([1.0, 0.0], [right, 128 - right]), level=0.95)
    assert greedy(tmp_path / 'high_2') > low - 0.05


def test_a_rate_that_is_still_too_high_is_said_to_be(long, tmp_path):
    """1e-3: in four steps entropy falls to about a quarter, and half of the groups become all wrong."""
    said = train(tmp_path / 'still', '--config.optimizer.learning_rate=1e-3')
    assert len(said) == 1, said
    ((step, monitor, text, command),) = said
    assert monitor == 'large_updates' and int(step) <= 8 and re.search('updates are (still )?too large', text)
    # a third of it, or a thirtieth where the reward fell by more than half of its deviation, as here it just may
    rate = command.removeprefix(command.rpartition('=')[0] + '=')
    assert f'--workdir={tmp_path}/still_2 ' in command and rate in ('0.00033', '3.3e-05')
