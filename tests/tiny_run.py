"""A whole run in seconds: sums of digits, a random model of two narrow layers, on one of the fake devices."""

import dataclasses
import json
import os

from grpo_jax.configs import arithmetic
from grpo_jax.run.open import make_workdir, open_split
from grpo_jax.run.steering import read_contents

DEMO = 'configs/models/characters'
# the demo's model with two layers of 32 in place of three of 128: a step takes half as long
MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'characters')
# on the command line, what all small runs of the arithmetic demo share
FLAGS = [
    f'--config.model.path={MODEL}',
    '--config.data.options.digits=1',
    '--config.data.options.count=40',
    '--config.data.prompts_per_step=4',
    '--config.data.max_prompt_tokens=6',
    '--config.rollout.group_size=4',
]


def config(**changes):
    """The arithmetic demo cut down; changes are dotted keys with __ for the dots."""
    small = arithmetic.get_config(changes.pop('preset', 'dr_grpo'))
    small.steps, small.model.path = 3, MODEL
    small.data.options = {'digits': 1, 'count': 40, 'blurts': 0.5, 'wrong': 0.5}
    small.data.prompts_per_step, small.data.max_prompt_tokens = 4, 6
    small.rollout.group_size, small.rollout.max_tokens = 4, 12
    small.supervised.updates, small.supervised.batch = 0, 8  # no cold start: two programs less to compile
    small.evaluation.every, small.evaluation.prompts, small.evaluation.samples = 0, 2, 1
    small.checkpoint.every = 2
    small.log.probe_every = 0  # a program less to compile
    for name, value in changes.items():
        *path, key = name.split('__')
        section = small
        for part in path:
            section = section[part]
        section[key] = value
    return small


def record(run, step=0, steering=None):
    """Makes the workdir of a Run that of one that has begun, as train.run does."""
    make_workdir(read(run, steering), step)


def read(run, steering=None):
    """The Run with the contents of its train split, as train.run has it."""
    splits = {'train': open_split(run, 'train')}
    contents = read_contents(run.workdir, run.settings.recorded, splits, steered=steering)
    return dataclasses.replace(run, contents=contents)


def rows(workdir, name='metrics.jsonl'):
    """The rows of a run's file."""
    with open(os.path.join(workdir, name), encoding='utf8') as lines:
        return [json.loads(line) for line in lines]
