"""Trains a policy on demonstrations: the cold start, with the same policy, weights and learner.

Examples:
    python -m grpo_jax.supervised --config=arithmetic --workdir=runs/sft
    python -m grpo_jax.supervised --config=countdown --workdir=runs/sft2 --config.supervised.updates=2000
"""

from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

from grpo_jax import data
from grpo_jax.collect import demonstrations
from grpo_jax.collect.demonstrations import SFT
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.hosts import json_file
from grpo_jax.learner import Optimizers, build_optimizer
from grpo_jax.learner.programs import Learner, check_sizes, make_learner
from grpo_jax.models.lora import LoraOptions, turn_off
from grpo_jax.run import checkpoint, cli
from grpo_jax.run.loop import Shell, owns_workdir
from grpo_jax.run.open import Run, barrier, make_policy, make_workdir, open_config, open_state, open_train_split
from grpo_jax.run.settings import Settings
from grpo_jax.run.steering import Steering
from grpo_jax.sharding import batches
from grpo_jax.sharding.compiled import BackgroundCompiler
from grpo_jax.types import Experience, TrainState


def cold_start(
    parent: Run,
    train_split: data.Dataset,
    functions: Mapping | None = None,
    steering: Steering | None = None,
    on_step: Callable | None = None,
):
    """The first policy of a Run: its model's weights, or those that supervised.updates lead to.

    functions, steering: as the Run was opened with; on_step(step, row) is called after each update.
    """
    settings = parent.settings
    if not settings.supervised.updates:
        return make_policy(parent)
    workdir = os.path.join(parent.workdir, checkpoint.COLD_START)
    state = run(settings.config, workdir, settings.data.origins, functions, steering, train_split, on_step)
    return make_policy(parent, state.params) if settings.model.random_init else state.params


@owns_workdir
def run(
    config,
    workdir,
    origins=(),
    functions: Mapping | None = None,
    steered: Steering | None = None,
    train_split: data.Dataset | None = None,
    on_step: Callable | None = None,
) -> TrainState:
    """The final TrainState of supervised training on the train split's demonstrations, in its own workdir.

    A demonstration is an example's meta['demonstration']; those longer than rollout.max_tokens are left out. Goes on
    where it stopped. origins: of the data, where another run has chosen them; functions: rewards by name that
    config.reward.parts may list; steered: what may be done where the workdir has another config; train_split: where it
    was read already; on_step(step, row) is called after each update.
    """
    if not config.supervised.updates:
        raise BadInput('supervised.updates', 0, 'nothing to do; set the number of updates')
    run = open_config(_own_config(config), workdir, functions=functions, origins=origins, steered=steered)
    settings, tokenizer = run.settings, run.model.tokenizer
    settings.log.tracking.check()
    with BackgroundCompiler() as compiler:
        learner = make_supervised_learner(run)
        compiler.add(learner.programs.values())
        compiler.start()
        train_split = train_split or open_train_split(run, steered)
        dataset, completions = demonstrations.find(
            train_split, tokenizer, ('demonstration',), settings.sampling.max_tokens, settings.data.name
        )
        shapes, pad_token = settings.shapes(settings.supervised.batch, 1), settings.sampling.pad_token

        def batch(step):
            chosen = data.indices(settings.seed, step, shapes.prompts, len(completions), dataset.sources)
            _, prompts = data.prompts(dataset, chosen, shapes.queries, pad_token)
            rollout = demonstrations.as_rollout(prompts, [completions[i] for i in chosen], shapes, pad_token)
            ones = np.ones((shapes.prompts, 1), np.float32)
            return Experience(rollout, ones, ones[:, 0], None, None, np.arange(shapes.prompts, dtype=np.int32))

        def update(state, experience):
            return learner.update(state, experience, learner.pack(experience.rollout))

        def initial():
            params = make_policy(run)
            compiler.wait('the cold start')  # where it is said: what compiles the state would wait behind it
            return learner.initial(params)

        training = Training(train_split, dataset.examples, batch, learner, update, initial)
        return make_trained(run, 'cold start', training, compiler, on_step)


def make_supervised_learner(run: Run) -> Learner:
    """The Learner of a Run's supervised training; BadInput where an update cannot be cut as the config says."""
    supervised, (shapes, learning) = run.settings.supervised, run.settings.supervised_sizes()
    check_sizes(SFT, run.mesh, shapes, learning, 'supervised.batch')
    optimizer = build_optimizer(supervised.optimizer, supervised.updates)
    return make_learner(run.model.config, SFT, Optimizers(optimizer), run.mesh, shapes, learning)


def finished(config, workdir) -> bool:
    """Whether workdir holds the whole supervised training of this very config."""
    path = os.path.join(workdir, 'config.json')
    if not os.path.isfile(path) or json_file.read(path) != Settings.from_config(_own_config(config)).recorded:
        return False
    return max(checkpoint.steps(workdir), default=0) == config.supervised.updates


def _own_config(config):
    """The config of supervised training, which trains random weights as a whole: adapters cannot make a model."""
    if not (config.model.random_init and LoraOptions.from_config(config.model.lora).rank):
        return config
    config = config.copy_and_resolve_references()
    turn_off(config.model.lora)
    return config


class Training(NamedTuple):
    """What is trained on demonstrations or labels, for `make_trained`."""

    split: data.Dataset  # the train split
    examples: Sequence[Example]  # those of it that it learns from
    batch: Callable  # (step) -> host arrays
    learner: Any  # with update and state
    update: Callable  # (TrainState, batch on the mesh) -> (TrainState, metrics)
    initial: Callable  # () -> the first TrainState


def make_trained(
    run: Run,
    title: str,
    training: Training,
    compiler: BackgroundCompiler | None = None,
    on_step: Callable | None = None,
) -> TrainState:
    """The final TrainState of a Run's supervised.updates updates; goes on where it stopped.

    compiler: has begun to compile the learner; on_step(step, row) is called after each update. Stopped when a signal
    came: the step at hand was finished and saved.
    """
    settings, learner, origins = run.settings, training.learner, run.settings.data.origins
    with Shell(run.workdir, keep=1) as shell:
        barrier(shell.newest, settings.recorded, origins, {'update': learner.update}, training.examples)
        make_workdir(run, training.split, shell.newest)
        state = open_state(run, shell.checkpoints, learner.state) or training.initial()
        if compiler is not None:
            compiler.wait('the cold start')
        loop = shell.open_loop(run, state, settings.supervised.updates, title, shown=('loss',), on_step=on_step)
        for step in loop.steps():
            with loop.stage('update'):
                state, learned = training.update(state, batches.put_rows(training.batch(step), run.mesh))
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
