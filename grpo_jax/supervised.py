"""Trains a policy on demonstrations, with the learner of GRPO; also as the cold start of a run.

Examples:
    python -m grpo_jax.supervised --config=arithmetic --workdir=runs/sft
    python -m grpo_jax.supervised --config=countdown --workdir=runs/sft2 --config.supervised.updates=2000
"""

from collections.abc import Callable, Mapping
import dataclasses
import os
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

from grpo_jax import data
from grpo_jax.collect import demonstrations
from grpo_jax.collect.demonstrations import SFT
from grpo_jax.errors import BadInput
from grpo_jax.learner import Optimizers, build_optimizer
from grpo_jax.learner.programs import Learner, check_sizes, make_learner
from grpo_jax.models.lora import LoraOptions, turn_off
from grpo_jax.run import checkpoint, cli
from grpo_jax.run.loop import Shell, barrier, owns_workdir, serves_sampler
from grpo_jax.run.open import Run, make_policy, make_workdir, open_config, open_split, open_state
from grpo_jax.run.settings import Settings
from grpo_jax.run.steering import Steering, changes, read_contents
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
    """Returns the parameters of a Run's first policy: the model's weights, trained by supervised.updates if not 0.

    functions, steering: as given to open the Run; on_step(step, row) is called after each update.
    """
    settings = parent.settings
    if not settings.supervised.updates:
        return make_policy(parent)
    workdir = os.path.join(parent.workdir, checkpoint.COLD_START)
    state = run(settings.config, workdir, settings.data.origins, functions, steering, train_split, on_step)
    return make_policy(parent, state.params) if settings.model.random_init else state.params


@owns_workdir
@serves_sampler
def run(
    config,
    workdir,
    origins=(),
    functions: Mapping | None = None,
    steered: Steering | None = None,
    train_split: data.Dataset | None = None,
    on_step: Callable | None = None,
) -> TrainState:
    """Trains the config's model on demonstrations, and returns the final TrainState.

    A demonstration is an example's meta['demonstration'] in the train split; those longer than rollout.max_tokens are
    left out. If workdir holds a checkpoint of this training, the training continues from it.

    config: a whole config, of which supervised.updates gives the length. workdir: the folder of this training alone.
    origins: where another run reads its data, when this training must read the same. functions: rewards by name that
    config.reward.parts may list. steered: which keys may differ from the config that workdir records. train_split:
    the train split, if the caller has it already. on_step(step, row) is called after each update.

    Raises BadInput if supervised.updates is 0, if the config or workdir cannot be used, or if no demonstration fits;
    InUse if another process owns workdir; Stopped after a signal, once the update in progress is saved.
    """
    # the parameter is not called steering, since owns_workdir would then lock the folder of the branch
    if not config.supervised.updates:
        raise BadInput('supervised.updates', 0, 'nothing to do; set the number of updates')
    opened = open_config(_supervised_config(config), workdir, functions=functions, origins=origins, steered=steered)
    settings = opened.settings
    settings.log.tracking.check()
    with BackgroundCompiler() as compiler:
        learner = make_supervised_learner(opened)
        finished = max(checkpoint.steps(workdir), default=0) >= settings.supervised.updates
        if not finished:  # else its programs have nothing left to do
            compiler.add(learner.programs.values())
            compiler.start()
        train_split = train_split or open_split(opened, 'train')
        contents = read_contents(workdir, settings.recorded, {'train': train_split}, functions, steered)
        opened = dataclasses.replace(opened, contents=contents)
        fields, tokenizer = ('demonstration',), opened.model.tokenizer
        dataset, completions = demonstrations.find(train_split, tokenizer, fields, settings.data, settings.sampling)
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
            params = make_policy(opened)
            compiler.wait('the cold start')  # the state's program would wait behind these, without a message
            return learner.initial(params)

        training = Training(batch, learner, update, learner.update.program, initial)
        return make_trained(opened, 'cold start', training, None if finished else compiler, on_step)


def make_supervised_learner(run: Run) -> Learner:
    """Returns the Learner of supervised training; raises BadInput when microbatches do not divide supervised.batch."""
    supervised, (shapes, learning) = run.settings.supervised, run.settings.supervised_sizes()
    check_sizes(SFT, run.mesh, shapes, learning, 'supervised.batch')
    optimizer = build_optimizer(supervised.optimizer, supervised.updates)
    return make_learner(run.model.config, SFT, Optimizers(optimizer), run.mesh, shapes, learning)


def is_finished(config, workdir) -> bool:
    """Returns whether workdir holds a finished supervised training of exactly this config."""
    path = os.path.join(workdir, 'config.json')
    recorded = Settings.from_config(_supervised_config(config)).recorded
    if not os.path.isfile(path) or changes(workdir, recorded):
        return False
    return max(checkpoint.steps(workdir), default=0) == config.supervised.updates


def _supervised_config(config):
    """The config of supervised training. For random weights it has no adapters, which alone cannot make a model."""
    if not (config.model.random_init and LoraOptions.from_config(config.model.lora).rank):
        return config
    config = config.copy_and_resolve_references()
    turn_off(config.model.lora)
    return config


class Training(NamedTuple):
    """The data and functions of a training on demonstrations or labels, for `make_trained`."""

    batch: Callable  # (step) -> host arrays
    learner: Any  # a Learner or RewardLearner
    update: Callable  # (TrainState, batch on the mesh) -> (TrainState, metrics)
    program: Any  # the Executable that it runs
    initial: Callable  # () -> the first TrainState


def make_trained(
    run: Run,
    title: str,
    training: Training,
    compiler: BackgroundCompiler | None = None,
    on_step: Callable | None = None,
) -> TrainState:
    """Makes a Run's supervised.updates updates, and returns the final TrainState; goes on where it stopped.

    title: for the console; compiler: one that compiles the learner already; on_step(step, row) is called after each
    update. After a signal, the update in progress is finished and saved, and Stopped is raised.
    """
    settings, learner, origins = run.settings, training.learner, run.settings.data.origins
    with Shell(run.workdir, keep=1) as shell:
        barrier(shell.newest, settings.recorded, origins, {'update': training.program}, run.contents.digests)
        make_workdir(run, shell.newest)
        state = open_state(run, shell.checkpoints, learner.abstract_state) or training.initial()
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
    """Runs the command."""
    run(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == '__main__':
    cli.define_flags()
    cli.run(main)
