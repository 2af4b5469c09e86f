"""Trains a policy on demonstrations: the cold start, with the same policy, weights and learner.

Examples:
    python -m grpo_jax.supervised --config=arithmetic --workdir=runs/sft
    python -m grpo_jax.supervised --config=countdown --workdir=runs/sft2 --config.supervised.updates=2000
"""

from collections.abc import Callable, Mapping
import os
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

from grpo_jax import data
from grpo_jax.algorithms import Algorithm, advantages, ratios, surrogates, weights
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.learner import Optimizers, build_optimizer
from grpo_jax.learner.programs import Learner, check_sizes, make_learner
from grpo_jax.models.lora import OFF, LoraOptions, turn_off
from grpo_jax.run import checkpoint, cli, demonstrations
from grpo_jax.run.experiment import Experiment, agree, claim, open_experiment, recorded_config
from grpo_jax.run.loop import Loop, on_devices
from grpo_jax.run.steering import Steering
from grpo_jax.run.workdir import owning
from grpo_jax.sharding import batches, compiled
from grpo_jax.types import Experience, TrainState

# cross entropy is the policy gradient with every advantage 1, averaged over tokens
SFT = Algorithm(
    advantage=advantages.group_mean,
    ratio=ratios.token,
    surrogate=surrogates.policy_gradient,
    weights=weights.token_mean,
)


def cold_start(experiment: Experiment, functions: Mapping | None = None, watch: Callable | None = None):
    """The initial policy of an experiment: its model's weights, or those that supervised.updates lead to.

    functions: the rewards by name with which the experiment was opened; watch(step, row) is called after each update.
    """
    if not experiment.settings.supervised.updates:
        return experiment.params()
    workdir = os.path.join(experiment.workdir, checkpoint.COLD_START)
    state = run(
        experiment.config, workdir, experiment.settings.data.origins, functions, experiment.steered,
        experiment.datasets, watch
    )  # fmt: skip
    return checkpoint.adapt(experiment, state.params) if experiment.settings.model.random_init else state.params


@owning
def run(
    config,
    workdir,
    origins=(),
    functions: Mapping | None = None,
    steered: Steering | None = None,
    datasets: Mapping | None = None,
    watch: Callable | None = None,
) -> TrainState:
    """The final TrainState of supervised training on the train split's demonstrations, in its own workdir.

    A demonstration is an example's meta['demonstration']; those longer than rollout.max_tokens are left out. Goes on
    where it stopped. origins: of the data, where another run has chosen them; functions: rewards by name that
    config.reward.parts may list; steered: what may be done where the workdir has another config; datasets: those that
    were read already, by split; watch(step, row) is called after each update.
    """
    if not config.supervised.updates:
        raise BadInput('supervised.updates', 0, 'nothing to do; set the number of updates')
    config = _own_config(config)
    experiment = open_experiment(config, workdir, functions=functions, origins=origins, steered=steered)
    experiment.settings.tracking.check()
    experiment.datasets.update(datasets or {})
    with compiled.Later() as later:
        return _run(experiment.compiling(later), later, watch)


def _run(experiment, later, watch):
    """The final TrainState of an experiment's supervised training, which `later` compiles."""
    config = experiment.config
    shapes, learner = build_learner(experiment)
    later.begin()
    dataset, completions = demonstrations.find(experiment)

    def batch(step):
        chosen = data.indices(config.seed, step, shapes.prompts, len(completions), dataset.sources)
        rollout = demonstrations.as_rollout(experiment, dataset, completions, chosen, shapes)
        ones = np.ones((shapes.prompts, 1), np.float32)
        return Experience(rollout, ones, ones[:, 0], None, None, np.arange(shapes.prompts, dtype=np.int32))

    def update(state, experience):
        packed = learner.pack(experience.rollout)
        with on_devices():
            return learner.update(state, experience, packed)

    def initial():
        params = experiment.params()
        later.finish('the cold start')  # where it is said: what compiles the state would wait behind it
        return learner.initial(params)

    training = Training(batch, learner, update, initial)
    return train(experiment, 'cold start', dataset.examples, training, later, watch)


def finished(config, workdir) -> bool:
    """Whether workdir holds the whole supervised training of this very config."""
    path = os.path.join(workdir, 'config.json')
    if not os.path.isfile(path) or json_file.read(path) != recorded_config(_own_config(config)):
        return False
    return max(checkpoint.steps(workdir), default=0) == config.supervised.updates


def _own_config(config):
    """The config of supervised training, which trains random weights as a whole: adapters cannot make a model."""
    if not (config.model.random_init and LoraOptions.from_config(config.model.get('lora', OFF._asdict())).rank):
        return config
    config = config.copy_and_resolve_references()
    turn_off(config.model.lora)
    return config


def check(experiment: Experiment) -> None:
    """BadInput where an update on demonstrations cannot be cut as the config says."""
    check_sizes(SFT, experiment.mesh, *_sizes(experiment), 'supervised.batch')


def _sizes(experiment):
    """(Shapes of an update, its Learning)."""
    settings = experiment.settings
    plain = dict(epochs=1, minibatches=1, microbatches=1, temperature=1.0, critic_warmup=0)
    learning = settings.learning._replace(**plain, old_logprobs='forward')  # nothing was sampled
    # demonstrations share no prompts, and short ones would fill the blocks of packed rows badly
    learning = learning._replace(pack_columns=max(learning.pack_columns, 0))
    if settings.model.random_init:
        learning = learning._replace(lora=OFF)
    return experiment.shapes(settings.supervised.batch, 1), learning


def build_learner(experiment: Experiment) -> tuple[batches.Shapes, Learner]:
    """(Shapes of an update, Learner) of an experiment's supervised training."""
    check(experiment)
    settings, (shapes, learning) = experiment.settings, _sizes(experiment)
    optimizer = build_optimizer(settings.supervised.optimizer, settings.supervised.updates)
    return shapes, make_learner(
        experiment.model_config, SFT, Optimizers(optimizer), experiment.devices, shapes, learning
    )


class Training(NamedTuple):
    """What is trained on demonstrations or labels, for `train`."""

    batch: Callable  # (step) -> host arrays
    learner: Any  # with update and state
    update: Callable  # (TrainState, batch on the mesh) -> (TrainState, metrics)
    initial: Callable  # () -> the first TrainState


def train(
    experiment: Experiment,
    title: str,
    examples,
    training: Training,
    later: compiled.Later | None = None,
    watch: Callable | None = None,
) -> TrainState:
    """The final TrainState of supervised.updates updates; goes on where it stopped.

    examples: those that it learns from; later: has begun to compile the learner; watch(step, row) is called after each
    update. Stopped when a signal came: the step at hand was finished and saved.
    """
    with Loop(experiment, experiment.settings.supervised.updates, title, 1, ('loss',), watch) as loop:
        agree(experiment, loop.newest, {'update': training.learner.update}, examples)
        claim(experiment, loop.newest)
        state = loop.restore(training.learner.state)
        if state is None:
            state = training.initial()
        if later is not None:
            later.finish('the cold start')
        for step in loop.steps(state):
            with loop.stage('update'):
                batch = batches.put_rows(training.batch(step), experiment.mesh)
                state, learned = training.update(state, batch)
                learned = jax.device_get(learned)
            row = {name: learned[name] for name in ('loss', 'grad_norm', 'entropy', 'finite') if name in learned}
            loop.log(step, row)
            loop.finish(step, state, row)
    return state


def main():
    """The command."""
    run(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == '__main__':
    cli.define_flags()
    cli.run(main)
