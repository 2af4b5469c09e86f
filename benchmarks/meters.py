"""What seeing costs: CPU-seconds of the meters, the probe and the monitors, as shares of a step of the demo.

python -m benchmarks.meters [--steps=40] [--repeats=15]

On the host each part is timed within a run. On the device, the run's update is called in turn with one that was
compiled without meters, on the same step.
"""

import argparse
from collections import defaultdict
import functools
import statistics
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import environment
from grpo_jax import algorithms, train
from grpo_jax.configs import arithmetic
from grpo_jax.learner import descent
from grpo_jax.run import loop, measure, observers


class Costs:
    """CPU-seconds of each call of functions, and of each step; and the update of the first step, with and without."""

    def __init__(self):
        self.seconds = defaultdict(list)
        self.learners, self.step = {}, None
        self._since = 0.0

    def timed(self, name, function, clock=time.thread_time):
        """The function, whose calls are timed; by its own thread, since the device may be at the update meanwhile."""

        @functools.wraps(function)
        def call(*arguments, **options):
            started = clock()
            result = jax.block_until_ready(function(*arguments, **options))
            self.seconds[name].append(clock() - started)
            return result

        return call

    def observing(self, observe):
        """The probe, timed, which keeps the inputs of the update."""
        timed = self.timed('probe', observe, time.process_time)

        def call(probe, state, experience, packed, *rest):
            jax.block_until_ready((state, experience))
            state, row = timed(probe, state, experience, packed, *rest)
            if self.step is None:
                self.step = jax.tree.map(jnp.copy, state), experience, packed
            return state, row

        return call

    def learner(self, make):
        """The run's learner, beside which one without meters is compiled."""

        def call(*arguments):
            with (
                mock.patch.object(algorithms, 'pooled_metrics', lambda *_: {}),
                mock.patch.object(descent, '_norms_by_part', lambda *_: {}),
            ):
                self.learners['without'] = make(*arguments)
                self.learners['without'].update.program.compile()
            self.learners['with'] = make(*arguments)
            return self.learners['with']

        return call

    def end_step(self, step, row):
        """The callback of a run: a step has ended."""
        now = time.process_time()
        if step:
            self.seconds['step'].append(now - self._since)
        self._since = now

    def updates(self, repeats):
        """Median CPU-seconds of the update, with meters and without, over calls in turn."""
        state, experience, packed = self.step
        states = {name: jax.tree.map(jnp.copy, state) for name in self.learners}

        def update(name):
            states[name], _ = jax.block_until_ready(self.learners[name].update(states[name], experience, packed))

        candidates = {name: functools.partial(update, name) for name in self.learners}
        environment.interleaved(candidates, 2)
        return environment.interleaved(candidates, repeats)[0]


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--steps', type=int, default=40)
    parser.add_argument('--repeats', type=int, default=15)
    options = parser.parse_args()
    print(environment.describe())
    config, costs = arithmetic.get_config('grpo'), Costs()
    config.steps, config.evaluation.every, config.evaluation.prompts = options.steps, 0, 8
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(measure, 'assess', costs.timed('meters of the host', measure.assess)),
        mock.patch.object(observers.Probe, 'observe', costs.observing(observers.Probe.observe)),
        mock.patch.object(loop.Monitors, 'step', costs.timed('monitors', loop.Monitors.step)),
        mock.patch.object(train, 'make_run_learner', costs.learner(train.make_run_learner)),
    ):
        train.run(config, f'{folder}/run', on_step=costs.end_step)
    medians = costs.updates(options.repeats)
    means = {name: statistics.fmean(seconds[1:]) for name, seconds in costs.seconds.items()}  # the first makes tables
    step = statistics.median(costs.seconds['step'])
    means['meters of the update'] = medians['with'] - medians['without']
    print(f'a step {step:.3f} CPU-s, its update {medians["with"]:.3f}, without meters {medians["without"]:.3f}')
    for name in ('meters of the update', 'meters of the host', 'probe', 'monitors'):
        print(f'{name:22} {1e3 * means[name]:7.2f} CPU-ms {means[name] / step:7.2%} of a step')
    total = sum(seconds for name, seconds in means.items() if name != 'step')
    print(f'{"all":22} {1e3 * total:7.2f} CPU-ms {total / step:7.2%} of a step')


if __name__ == '__main__':
    main()
