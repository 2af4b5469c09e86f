"""Prompts solved by a budget of completions, as config.collection.allocation spreads it: on the demo's hard half.

    python -m benchmarks.allocation [--seeds=5] [--steps=12]

The demo's cold start is trained once a seed. Of EXAMPLES training prompts, those count as hard of which it solves least
in PROBES completions. From there each allocation learns for the same number of steps from the same prompts, as the
demo does. A prompt of a step is solved where one of its completions is right; the means are over all steps. Intervals
are those of the mean over seeds of the difference to equal groups, of 95 % (Student).
"""

import json
import os
import tempfile

from absl import app, flags
import numpy as np

from benchmarks import environment
from grpo_jax import sample, statistics, train
from grpo_jax.configs import arithmetic
from grpo_jax.tools import export
from grpo_jax.tools.preflight.plan import change_config

SEEDS = flags.DEFINE_integer('seeds', 5, 'Cold starts, each with noise and prompts of its own.')
STEPS = flags.DEFINE_integer('steps', 12, 'Steps that each allocation takes.')
EXAMPLES, PROBES = 256, 16  # prompts that are looked at, and completions of each
SMALL = {'evaluation.prompts': 64, 'evaluation.samples': 4, 'log.probe_every': 0}
ROUNDS = {'collection.allocation': 'uncertainty'}
VARIANTS = {
    'equal': {},
    'pass_rate': {'collection.allocation': 'pass_rate'},
    'uncertainty': ROUNDS,
    'uncertainty, exploration 0.1': ROUNDS | {'collection.exploration': 0.1},
    'uncertainty and seeding': ROUNDS | {'collection.seeding': 2, 'data.max_prompt_tokens': 64},
}


def demo(seed, steps, overrides):
    """The demo's config with a seed, steps, and other values by dotted key."""
    return change_config(arithmetic.get_config(), SMALL | {'seed': seed, 'steps': steps} | overrides)


def cold_start(folder, seed):
    """The folder of a policy after the demo's cold start."""
    train.run(demo(seed, 1, {'optimizer.learning_rate': 0.0}), os.path.join(folder, 'cold'))
    export.export(os.path.join(folder, 'cold'), policy := os.path.join(folder, 'policy'), 'float32')
    return policy


def write_hard_half(folder):
    """Writes the half of EXAMPLES prompts that the policy solves least as a train split, the others as a test split.

    The mean pass rate of the half.
    """
    request = sample.Request(prompts=EXAMPLES, samples=PROBES)
    sample.run(None, os.path.join(folder, 'cold'), os.path.join(folder, 'samples'), request)
    with open(sample.shard_path(os.path.join(folder, 'samples'), 0), encoding='utf8') as lines:
        rows = [json.loads(line) for line in lines]
    rates = np.array([row['correct'] for row in rows], float).reshape(EXAMPLES, PROBES).mean(1)
    order = np.argsort(rates, kind='stable')
    for split, places in (('train', order[: EXAMPLES // 2]), ('test', order[EXAMPLES // 2 :])):
        with open(os.path.join(folder, f'{split}.jsonl'), 'w', encoding='utf8') as file:
            chosen = [rows[i * PROBES] for i in places]
            file.writelines(json.dumps({name: row[name] for name in ('prompt', 'answer')}) + '\n' for row in chosen)
    return rates[order[: EXAMPLES // 2]].mean()


def learn(policy, folder, seed, name):
    """(solved prompts of 1000 completions, share of groups that may teach) over the steps of a variant."""
    learned = {
        'model.path': policy,
        'model.random_init': False,
        'data.name': 'files',
        'data.options': {'folder': folder},
        'reward.step_rewards': '',
        'supervised.updates': 0,
    }
    config = demo(seed, STEPS.value, learned | VARIANTS[name])
    workdir = os.path.join(folder, name.replace(' ', '_'))
    train.run(config, workdir)
    with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf8') as lines:
        rows = [json.loads(line) for line in lines]
    solved = np.mean([1 - row['groups_all_wrong'] for row in rows]) * 1000 / config.rollout.group_size
    return solved, np.mean([row['groups_mixed'] for row in rows])


def main(_):
    """The command."""
    print(environment.describe())
    figures = {name: [] for name in VARIANTS}
    for seed in range(SEEDS.value):
        with tempfile.TemporaryDirectory() as folder:
            policy = cold_start(folder, seed)
            rate = write_hard_half(folder)
            for name in VARIANTS:
                figures[name].append(learn(policy, folder, seed, name))
                solved, mixed = figures[name][-1]
                print(f'seed {seed}, pass rate {rate:.3f}: {name}: {solved:.1f} solved, {mixed:.3f} mixed', flush=True)
    print('| allocation | prompts solved of 1000 completions | more than equal | groups right and wrong | more |')
    print('|---|---|---|---|---|')
    for name in figures:
        cells = [name]
        for column, digits in ((0, 1), (1, 3)):
            own, equal = (np.array(figures[key])[:, column] for key in (name, 'equal'))
            low, high = statistics.mean_interval(own - equal, level=0.95) if SEEDS.value > 1 else (np.nan, np.nan)
            cells += [f'{own.mean():.{digits}f}', f'{low:+.{digits}f} to {high:+.{digits}f}']
        print(f'| {" | ".join(cells)} |')


if __name__ == '__main__':
    app.run(main)
