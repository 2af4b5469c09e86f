"""What old tokens cost, and what each correction mends: by staleness, correction and in_flight, in the demo.

python -m benchmarks.staleness [--config=arithmetic] [--steps=20] [--seeds=0] [--staleness=0,1,2,4] [--in_flight=0,8]
    [--corrections=truncated,icepop,masked_product,sampler] [--cut=8]

A row for each: the verified reward around steps 5, 10 and 15 (the mean of the three steps before), its mean over all
steps (the area under the curve), by how much that is above the first row's, seed by seed, the mean age of tokens, what
the correction did, and seconds of a step, which are this machine's. `sampler` is a ratio against the sampler
(algorithm.ratio_base) and no correction. Where nothing is old, corrections are not told apart. Runs of a seed share one
cold start. A step may end after each --cut tokens, since completions of the demo are shorter than the 64 of real runs.
Cells are means over the seeds; where there are several, +- half of the 95 % interval (Student's t).
"""

import argparse
import contextlib
import itertools
import os
import shutil
import statistics
import sys
import tempfile

import numpy as np
from scipy import stats

from benchmarks import environment
from grpo_jax import supervised, train
from grpo_jax.run.config_file import locate, read_config
from grpo_jax.run.rows import read_rows
from grpo_jax.sampler import engine

STAGES = 'sample', 'reward', 'observe', 'update'
POINTS = 5, 10, 15  # steps
COLUMNS = *(f'reward at {step}' for step in POINTS), 'mean reward', 'age', 'weight', 'at bound', 'stale_ess', 'seconds'
MEAN = COLUMNS.index('mean reward')


def make_config(options, seed, staleness=0, in_flight=0, correction='none'):
    """The config of a run."""
    config = read_config(locate(options.config))
    config.seed, config.steps, config.diagnose.on = seed, options.steps, 'off'
    config.evaluation.every, config.evaluation.prompts, config.log.rollouts = 0, 2, 0
    if options.updates >= 0:
        config.supervised.updates = options.updates
    config.collection.staleness, config.collection.in_flight = staleness, in_flight
    if correction == 'sampler':
        config.algorithm.ratio_base = 'sampler'
    else:
        config.algorithm.correction = correction
    return config


def begin(options, seed, folder):
    """The folder of a seed's cold start; '' where the config has none."""
    config, path = make_config(options, seed), os.path.join(folder, f'cold_start_{seed}')
    if not config.supervised.updates:
        return ''
    if not os.path.exists(path):
        supervised.run(config, path)
    return path


def measure(config, cold_start, workdir):
    """The figures of a run, in the order of COLUMNS; NaN for what it does not have."""
    if cold_start:
        ignored = shutil.ignore_patterns('config.json')
        shutil.copytree(cold_start, os.path.join(workdir, 'cold_start'), ignore=ignored)
    train.run(config, workdir)
    rows, timings = (read_rows(os.path.join(workdir, f'{name}.jsonl')) for name in ('metrics', 'timings'))
    right = [row[f'reward/{config.reward.verifier}'] for row in rows]
    means = []
    for name in ('staleness', 'correction_mean', 'correction_bound', 'stale_ess'):
        values = [row[name] for row in rows if row.get(name) is not None]
        means.append(statistics.mean(values) if values else np.nan)
    seconds = statistics.median(sum(row[stage] for stage in STAGES) for row in timings)
    points = [statistics.mean(right[step - 3 : step]) if len(right) >= step else np.nan for step in POINTS]
    return [*points, statistics.mean(right), *means, seconds]


def format_cell(values):
    """A column's mean over the seeds, and half of its 95 % interval."""
    if np.isnan(values).all():
        return ''
    count = len(values)
    spread = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / count**0.5 if count > 1 else None
    return f'{np.mean(values):.3f}' + (f' +- {spread:.3f}' if spread is not None else '')


def list_variants(options):
    """Yields (staleness, in_flight, correction)."""
    for staleness, in_flight in itertools.product(options.staleness, options.in_flight):
        for correction in options.corrections if staleness or in_flight else ['none']:
            yield staleness, in_flight, correction


def main():
    """Runs all, and prints a row of the table after each."""

    def numbers(text):
        return [int(number) for number in text.split(',')]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--config', default='arithmetic')
    for name, default in {'steps': 20, 'cut': 8, 'updates': -1}.items():  # updates: of the cold start; -1: the config's
        parser.add_argument(f'--{name}', type=int, default=default)
    for name, default in {'seeds': [0], 'staleness': [0, 1, 2, 4], 'in_flight': [0, 8]}.items():
        parser.add_argument(f'--{name}', type=numbers, default=default)
    default = ['truncated', 'icepop', 'masked_product', 'sampler']
    parser.add_argument('--corrections', type=lambda text: text.split(','), default=default)
    options = parser.parse_args()
    engine.CUT = options.cut
    print(environment.describe())
    heads = 'staleness', 'in_flight', 'correction', *COLUMNS, 'above the first'
    print('| ' + ' | '.join(heads) + ' |\n|' + '---|' * len(heads))
    first = None
    with tempfile.TemporaryDirectory() as folder:
        for number, variant in enumerate(list_variants(options)):
            figures = []
            for seed in options.seeds:
                workdir = os.path.join(folder, f'{number}_{seed}')
                with contextlib.redirect_stdout(sys.stderr):  # what runs print, which the table must not be among
                    cold_start = begin(options, seed, folder)
                    figures.append(measure(make_config(options, seed, *variant), cold_start, workdir))
            columns = np.array(figures).T
            first = columns[MEAN] if first is None else first
            cells = [*map(str, variant), *map(format_cell, [*columns, columns[MEAN] - first])]
            print('| ' + ' | '.join(cells) + ' |', flush=True)


if __name__ == '__main__':
    main()
