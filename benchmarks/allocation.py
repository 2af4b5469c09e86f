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
from grpo_jax import export, sample, statistics, train
from grpo_jax.configs import arithmetic

SEEDS = flags.DEFINE_integer('seeds', 5, 'Cold starts, each with noise and prompts of its own.')
STEPS = flags.DEFINE_integer('steps', 12, 'Steps that each allocation takes.')
EXAMPLES, PROBES = 256, 16  # prompts that are looked at, and completions of each
BEHIND = dict(collection__allocation='uncertainty', data__max_prompt_tokens=64)
VARIANTS = {
    'equal': {},
    'pass_rate': dict(collection__allocation='pass_rate'),
    'uncertainty': dict(collection__allocation='uncertainty'),
    'uncertainty, exploration 0.1': dict(collection__allocation='uncertainty', collection__exploration=0.1),
    'uncertainty and seeding': BEHIND | dict(collection__seeding=2),
}


def changed(config, **changes):
    """The config with other values; changes are keys with __ for the dots."""
    for key, value in {'evaluation__prompts': 64, 'evaluation__samples': 4, 'log__probe_every': 0, **changes}.items():
        section, name = key.split('__')
        config[section][name] = value
    return config


def cold_start(folder, seed):
    """The folder of a policy after the demo's cold start."""
    config = changed(arithmetic.get_config(), optimizer__learning_rate=0.0)
    config.seed, config.steps = seed, 1
    train.run(config, os.path.join(folder, 'cold'))
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
    config = changed(
        arithmetic.get_config(),
        model__path=policy,
        model__random_init=False,
        data__name='files',
        supervised__updates=0,
        **VARIANTS[name],
    )
    config.seed, config.steps = seed, STEPS.value
    config.data.options, config.reward.step_rewards = {'folder': folder}, ''
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
