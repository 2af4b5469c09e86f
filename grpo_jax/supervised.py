"""Cold start: the same policy, weights and learner, trained on demonstrations. `python -m grpo_jax.supervised`."""

import os

from absl import flags
import jax
import numpy as np

from grpo_jax import data
from grpo_jax.algorithms import Algorithm, advantages, ratios, surrogates, weights
from grpo_jax.errors import BadInput, Stopped
from grpo_jax.hosts import processes
from grpo_jax.learner import optimizer as optimizers
from grpo_jax.learner.programs import make_learner
from grpo_jax.run import checkpoint, cli, demonstrations, metrics, watch
from grpo_jax.run.experiment import Experiment, agree, claim, open_experiment
from grpo_jax.sharding import batches
from grpo_jax.types import Experience

# cross entropy is the policy gradient with every advantage 1, averaged over tokens
SFT = Algorithm(
    advantage=advantages.group_mean,
    ratio=ratios.token,
    surrogate=surrogates.policy_gradient,
    weights=weights.token_mean,
)


def cold_start(experiment):
    """The initial policy of an experiment: its model's weights, or those that supervised.updates lead to."""
    if not experiment.config.supervised.updates:
        return experiment.params()
    return run(experiment.config, os.path.join(experiment.workdir, 'cold_start')).params


def run(config, workdir):
    """The final TrainState of supervised training on the train split's demonstrations, in its own workdir.

    A demonstration is an example's meta['demonstration']; those longer than rollout.max_tokens are left
    out. Goes on where it stopped.
    """
    if not config.supervised.updates:
        raise BadInput('supervised.updates', 0, 'nothing to do; set the number of updates')
    experiment = open_experiment(config, workdir)
    shapes, learner = build_learner(experiment)
    dataset, completions = demonstrations.find(experiment)

    def experience(step):
        chosen = data.indices(config.seed, step, shapes.prompts, len(completions), dataset.sources)
        rollout = demonstrations.as_rollout(experiment, dataset, completions, chosen, shapes)
        ones = np.ones((shapes.prompts, 1), np.float32)
        return Experience(rollout, ones, ones[:, 0], None, None, np.arange(shapes.prompts, dtype=np.int32))

    return loop(experiment, learner, experience, 'cold start', dataset.examples)


def build_learner(experiment):
    """(batches.Shapes of an update, Learner) of an experiment's supervised training."""
    shapes = experiment.shapes(experiment.config.supervised.batch, 1)
    optimizer = optimizers.make(experiment.config.supervised.optimizer, experiment.config.supervised.updates)
    learning = experiment.learning(epochs=1, minibatches=1, microbatches=1, temperature=1.0)
    return shapes, make_learner(experiment.model_config, SFT, optimizer, experiment.mesh, shapes, **learning)


def loop(experiment, learner, experience, title, examples, beginning=Experiment.params):
    """The final TrainState of supervised.updates updates on experience(step), host arrays; goes on where it stopped.

    examples: those that it learns from; beginning(ex): parameters of the first state. Stopped when a SIGTERM came: the
    step at hand was finished and saved.
    """
    config, steps = experiment.config, experiment.config.supervised.updates
    checkpoints = checkpoint.manager(experiment.workdir, keep=1)
    agree(experiment, checkpoints.latest_step(), {'update': learner.update}, examples)
    claim(experiment)
    state = checkpoint.restore(checkpoints, learner.state)
    if state is None:
        state = learner.initial(beginning(experiment))
    writer = metrics.writer(experiment.workdir, int(state.step), steps, title, shown=('loss',))
    with watch.Watch(config.log.hang_after) as watched:
        for step in range(int(state.step), steps):
            watched.step(f'{title}, step {step}')
            clock = metrics.Stopwatch()
            state, learned = learner.update(state, batches.put_rows(experience(step), experiment.mesh))
            found = jax.device_get(learned)
            clock.lap('update')
            row = {name: found[name] for name in ('loss', 'grad_norm', 'entropy', 'finite') if name in found}
            writer.step(step, row, clock.seconds)
            stop = processes.agree(f'the end of step {step} of the {title}', row, watched.stopping)
            if (step + 1) % config.checkpoint.every == 0 or step + 1 == steps or stop:
                checkpoint.save(checkpoints, state)
            if stop:
                writer.close()
                checkpoints.close()
                raise Stopped(experiment.workdir, step)
    writer.close()
    checkpoints.close()
    return state


def main():
    """The command."""
    run(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == '__main__':
    cli.define_flags()
    cli.run(main)
