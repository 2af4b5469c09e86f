"""How much of a slow reward collection.staleness=1 hides: seconds of a step without it, with it, and with it one ahead.

python -m benchmarks.hidden_rewards [--config=arithmetic] [--steps=12] [--share=1.0]

The demo's own loop, from random weights. The reward is one more part of weight 0, which waits on the event loop for as
long as sampling takes (times --share), as a judge over HTTP does. Seconds are medians over the steps but the first two.
"""

import argparse
import asyncio
import json
import statistics
import tempfile

from benchmarks import environment
from grpo_jax import train
from grpo_jax.run.config_file import locate, read_config

SKIPPED = 2


def seconds_of(options, wait, staleness):
    """{stage: median seconds} of a run's steps; wait: seconds that the reward takes."""
    config = read_config(locate(options.config))
    config.steps, config.supervised.updates, config.log.probe_every = options.steps, 0, 0
    config.evaluation.every, config.evaluation.prompts, config.log.rollouts = 0, 2, 0
    config.diagnose.on = 'off'
    config.algorithm.correction, config.collection.staleness = 'truncated', staleness
    config.reward.parts = (*config.reward.parts, ('slow', 0.0))

    async def slow(completion, example):
        await asyncio.sleep(wait)
        return 0.0

    with tempfile.TemporaryDirectory() as workdir:
        train.run(config, workdir, functions={'slow': slow})
        with open(f'{workdir}/timings.jsonl', encoding='utf8') as lines:
            rows = [json.loads(line) for line in lines][SKIPPED:]
    stages = ('sample', 'reward', 'observe', 'update')
    figures = {name: statistics.median(row[name] for row in rows) for name in stages}
    return figures | {'step': statistics.median(sum(row[name] for name in stages) for row in rows)}


def main():
    """Measures the three, and prints how much of the reward is hidden."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--config', default='arithmetic')
    parser.add_argument('--steps', type=int, default=12)
    parser.add_argument('--share', type=float, default=1.0)
    options = parser.parse_args()
    print(environment.describe())
    free = seconds_of(options, 0.0, 1)
    wait = options.share * free['sample']
    shown = {'no wait': free, 'waits': seconds_of(options, wait, 0), 'waits, staleness 1': seconds_of(options, wait, 1)}
    for name, figures in shown.items():
        print(f'{name}: ' + ', '.join(f'{stage} {value:.3f} s' for stage, value in figures.items()))
    added = [shown[name]['step'] - free['step'] for name in ('waits', 'waits, staleness 1')]
    print(f'a reward of {wait:.3f} s adds {added[0]:.3f} s a step, {added[1]:.3f} s with staleness 1')
    waited = shown['waits, staleness 1']['reward'] - free['reward']
    print(f'hidden: {1 - added[1] / wait:.0%} of the reward by the whole step, {1 - waited / wait:.0%} by stage reward')


if __name__ == '__main__':
    main()
