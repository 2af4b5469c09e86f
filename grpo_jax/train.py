"""Trains a policy by GRPO or another preset. START HERE: run(config, workdir) builds everything, then loops over steps.

The same command goes on with a run that was stopped.

Examples:
    python -m grpo_jax.train --config=arithmetic --workdir=runs/arithmetic
    python -m grpo_jax.train --config=gsm8k:dapo --workdir=runs/gsm8k --config.rollout.group_size=16 --profile=3:5
"""

import logging
import os
from typing import Any

from absl import flags
import jax
import numpy as np

from grpo_jax import algorithms, diagnose, evaluate, rewards, supervised
from grpo_jax.algorithms import pieces
from grpo_jax.algorithms.validation import SECTIONS
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.learner.experience import make_experience
from grpo_jax.learner.programs import check_sizes
from grpo_jax.rewards import gold
from grpo_jax.run import (
    branch,
    checkpoint,
    cli,
    collect,
    console,
    decoded,
    measure,
    observers,
    reference,
    teacher,
    unrewarded,
)
from grpo_jax.run.experiment import Experiment, agree, claim, recorded_config
from grpo_jax.run.history import History
from grpo_jax.run.loop import Loop, on_devices
from grpo_jax.run.rows import read_rows, rollout_rows
from grpo_jax.run.settings import Settings
from grpo_jax.run.steering import Steering
from grpo_jax.run.workdir import owning
from grpo_jax.sharding import batches, compiled
from grpo_jax.types import Experience, TrainState

logger = logging.getLogger('grpo_jax')


@owning
def run(config, workdir, algorithm=None, functions=None, profile=None, steering=None, watch=None):
    """The final TrainState of a run; its files are in workdir, and calling again goes on where it stopped.

    Stopped when a signal came: the step at hand was finished and saved.

    algorithm replaces that of config.algorithm, for a variant written in a notebook; functions are rewards by name,
    which config.reward.parts may list; profile is the first and the last step of a trace in workdir/profile. steering,
    like Steering(amend=True) or Steering(branch=folder), is what is done where the run was begun with another config.
    watch(step, row) is called after each step with its row of metrics.jsonl; what it raises ends the run, saved.
    """
    experiment, parent, algorithm, shapes = open_run(config, workdir, algorithm, functions, steering)
    later = compiled.Later()
    experiment = experiment.compiling(later)
    workdir, settings, reward_functions = experiment.workdir, experiment.settings, experiment.reward_functions

    collector = collect.Collector(experiment, shapes)
    history = History(algorithm, collector.examples)
    learner = experiment.learner(algorithm, shapes, collector.aux() | history.aux())
    observer = observers.Observer(experiment, learner, shapes)
    evaluator = evaluate.make(experiment, settings.evaluation.samples)
    taught = teacher.load_teacher(experiment, algorithm, shapes)
    programs = collector.programs | learner.programs | observer.programs | taught.programs

    branch.begin(experiment, parent, learner)
    cadence = settings.cadence
    with reward_functions, later, Loop(experiment, settings.steps, 'train', cadence.keep, callback=watch) as loop:
        agree(experiment, loop.newest, programs, collector.examples)
        state = begin(experiment, loop, learner, collector.examples, later, functions)
        claim(experiment, int(state.step))
        taught.record(workdir, settings.teacher.path)
        compiled.write_hashes(workdir, **programs)

        for step in loop.steps(state, profile):
            if step == 0 or loop.due(step, settings.evaluation.every):
                with loop.stage('evaluate'):
                    loop.evaluation(step, evaluate.evaluate(evaluator, state.params))

            with loop.stage('sample'):  # rewards are computed on the host while other rows still decode
                state, renewed = reference.refresh(settings, loop.checkpoints, state, learner.state)
                draw, state = collector(state, loop.writer.sampling)

            with loop.stage('reward'):
                packed = learner.pack(draw.rollout)
                with on_devices():
                    logprobs = learner.logprobs(state, draw.rollout, packed) | taught(draw.rollout, packed)
                logprobs |= decoded.policy_logprobs(experiment, algorithm, collector.sample, state, draw.rollout)
                rewarded = draw.finish_rewards()
                if algorithm.source not in collect.READ_FROM_DATA:  # whose completions are right without a reward
                    unrewarded.check(workdir, step, rewarded)
                state, experience, row = to_experience(experiment, algorithm, state, draw, rewarded, logprobs, history)
                if experience.rollout is not draw.rollout:  # rows were dropped
                    packed = learner.pack(experience.rollout)

            with loop.stage('observe'):
                state, observed = observer(state, experience, packed, draw.examples, draw.rollout)

            with loop.stage('update'):
                with on_devices():
                    state, learned = learner.update(state, experience, packed)
                row |= measure.assess(experiment, draw.rollout, rewarded, experience, collector.sample and step)
                row |= observed | jax.device_get(learned) | measure.completion_metrics(rewarded)
                row |= draw.counts | {'reference_renewed': renewed} | measure.sampler_metrics(collector.sample)

            if loop.due(step, settings.cadence.rollouts):
                loop.writer.rollouts(step, rollout_rows(draw.examples, draw.rollout, rewarded, experience, experiment.tokenizer))
            loop.log(step, row, measure.step_speed(experiment, algorithm, collector, draw.rollout, loop.seconds))
            if row['finite'] < 1:
                with loop.writer.optional(step, checkpoint.BAD):
                    checkpoint.dump_bad_batch(workdir, step, experience)
            loop.finish(step, state, row)

        loop.evaluation(settings.steps, evaluate.evaluate(evaluator, state.params))
    console.print_outcome(workdir)
    return state


def begin(experiment, loop, learner, examples, later, functions) -> TrainState:
    """The TrainState that a run goes on from, or begins with; meanwhile `later` compiles, beside the cold start if any.

    The cold start's own programs come first.
    """
    if loop.newest is not None or not experiment.settings.supervised.updates:
        later.begin()
    state, policy = branch.restore(loop, experiment, learner), None
    if state is None:
        gold.check(experiment.reward_functions, examples)
        policy = supervised.cold_start(experiment, functions, later.step)
    else:
        branch.refuse_fewer_steps(experiment, int(state.step))
    later.finish('what a step and an evaluation run')
    return reference.initial_state(experiment, learner, policy) if state is None else state


def to_experience(
    experiment, algorithm, state, draw, rewarded, logprobs, history
) -> tuple[TrainState, Experience, dict[str, Any]]:
    """(TrainState, Experience, metrics by name) of a step's draw: rewards by the config's terms, and their advantages.

    The state's history has the rewards thereafter.
    """
    reward_functions, grouping = experiment.reward_functions, draw.grouping
    shaped = rewards.shape_rewards(reward_functions, rewarded, grouping)
    dead = collect.dead_groups(experiment.settings.collection, rewarded, grouping)
    state, baselines = history(state, draw.prompts, shaped)
    inputs = {'dead': dead, **baselines} | rewards.advantage_inputs(
        reward_functions, draw.examples, rewarded, shaped, draw.fetch_tokens, experiment.tokenizer, grouping
    )
    experience, row = make_experience(
        algorithm, state, draw.rollout, logprobs, shaped, inputs, experiment.mesh, grouping
    )
    return state, experience, row | {name: np.mean(values) for name, values in baselines.items()}


def open_run(
    config, workdir, algorithm=None, functions=None, steering=None
) -> tuple[Experiment, branch.Parent | None, algorithms.Algorithm, batches.Shapes]:
    """(Experiment of a run, Parent of a branch that is to begin, Algorithm, Shapes of a step); arguments as of run.

    BadInput for whatever of the config cannot work; nothing is written, read of the data, or compiled yet.
    """
    algorithm = choose_algorithm(config, algorithm)
    experiment, parent = branch.open_run(config, workdir, functions, steering or Steering())
    shapes = collect.step_shapes(experiment, algorithm)
    check_algorithm(experiment, algorithm, shapes)
    teacher.check_model(experiment, algorithm)
    experiment.settings.tracking.check()
    if experiment.settings.supervised.updates and parent is None and not checkpoint.steps(experiment.workdir):
        supervised.check(experiment)
    return experiment, parent, algorithm, shapes


def choose_algorithm(config, algorithm=None) -> algorithms.Algorithm:
    """The Algorithm of a run: the given one, or that of config.algorithm, with what config.collection says.

    BadInput for whatever of the config cannot work, and when the given one collects in another way than the config.
    """
    Settings.from_config(config)
    algorithm = algorithm or algorithms.make(config.algorithm, config.collection)
    collected = {name: config.collection[name] for name in SECTIONS}
    for name, value in collected.items():
        given = getattr(algorithm, name)
        if given not in (value, algorithms.Algorithm._field_defaults[name]):
            raise BadInput(f'collection.{name}', value, f'the given algorithm has {given!r}; set the config to that')
    return algorithm._replace(**collected)


def check_algorithm(experiment: Experiment, algorithm: algorithms.Algorithm, shapes: batches.Shapes):
    """BadInput, or a warning, for what the algorithm cannot do in this run."""
    config = experiment.config
    if 'step_rewards' in algorithm.advantage_reads and not experiment.reward_functions.steps:
        raise BadInput(
            'reward.step_rewards',
            '',
            f'advantage {config.algorithm.advantage} needs rewards of steps; name a reward that has steps, like '
            'calculator',
        )
    _check_rewards(experiment.settings.rewards, algorithm)
    if config.algorithm.critic_warmup and not algorithm.needs_values:
        raise BadInput(
            'algorithm.critic_warmup',
            config.algorithm.critic_warmup,
            f'advantage {config.algorithm.advantage} has no critic; use 0',
        )
    learning = experiment.settings.learning
    check_sizes(algorithm, experiment.mesh, shapes, learning)
    decoded.check(experiment, algorithm)
    _check_allocation(experiment.settings, algorithm)
    for warning in algorithms.check_run(
        algorithm, group_size=shapes.group_size, prompts=shapes.prompts, updates=learning.updates
    ):
        logger.warning(warning)
    for line in diagnose.advise(config, experiment.model_config):
        logger.warning(line)
    section, most = experiment.settings.algorithm, experiment.settings.sampling.max_tokens
    if section.weights == 'fixed_length' and section.fixed_length != most:
        logger.warning(
            'algorithm.fixed_length = %d is not rollout.max_tokens = %d, by which Dr. GRPO divides',
            section.fixed_length,
            most,
        )
    _check_adapters(experiment.settings, algorithm)
    kept = algorithm.keeps_reference or experiment.settings.cadence.kl_observe > 0
    reference.check(experiment, kept)
    teacher.check(experiment, algorithm)
    if 'reference' in learning.offload and not kept:
        logger.warning('learner.offload names the reference, and this algorithm keeps none')


def _check_allocation(settings: Settings, algorithm: algorithms.Algorithm):
    """BadInput for a loss of whole groups where an update may see a part of one: groups are made of equal parts."""
    allocation, minibatches = settings.collection.allocation, settings.learning.minibatches
    if allocation == 'equal':
        return
    if 'group_ids' in algorithm.reads:
        raise BadInput(
            'collection.allocation', allocation, 'a loss of pairs or whole groups needs groups of one size; use equal'
        )
    if minibatches > 1 and 'group_ids' in pieces.reads(algorithm.weights):
        raise BadInput(
            'learner.minibatches',
            minibatches,
            f'cuts the larger groups of collection.allocation={allocation!r} apart, and algorithm.weights='
            f'{settings.algorithm.weights!r} averages over whole ones; use 1, or token_mean',
        )


def _check_adapters(settings: Settings, algorithm: algorithms.Algorithm):
    """BadInput for what cannot be beside adapters."""
    rank = settings.model.lora.rank
    if rank and algorithm.needs_values:
        raise BadInput(
            'model.lora.rank', rank, 'a critic would be a second model, trained as a whole; use 0, or another preset'
        )
    if rank and settings.collection.reference == 'polyak':
        raise BadInput(
            'collection.reference',
            'polyak',
            'the mean of two adapters is not that of their weights; use hard or frozen',
        )


def _check_rewards(options: rewards.RewardOptions, algorithm: algorithms.Algorithm):
    """BadInput for rewards that the algorithm lacks, and for those that it would not read."""
    reads = algorithm.advantage_reads
    if 'correct' in reads | algorithm.reads and not (options.verifies_all or algorithm.source == 'pairs'):
        raise BadInput(
            'reward.verifier',
            '',
            'nothing says what is correct, which the algorithm reads; name a part, with reward.correct_at its least '
            'value of a correct completion',
        )
    reads_total = bool({'rewards', 'token_rewards'} & reads) or options.steps_with_outcome
    for name in ('length_shaping', 'truncated_reward'):
        if getattr(options, name) and not reads_total:
            raise BadInput(
                f'reward.{name}',
                getattr(options, name),
                f'is a term of the total reward, and the advantage reads {" and ".join(sorted(reads))}; leave it out',
            )


def finished(config, workdir) -> bool:
    """Whether workdir holds a whole run of this very config; BadInput when it went beyond config.steps."""
    paths = [os.path.join(workdir, name) for name in ('config.json', 'metrics.jsonl', 'evaluations.jsonl')]
    if not all(os.path.isfile(path) for path in paths):
        return False
    same = json_file.read(paths[0]) == recorded_config(config)
    steps, evaluations = len(read_rows(paths[1])), read_rows(paths[2])
    if steps > config.steps:
        raise BadInput('steps', config.steps, f'{workdir} has {steps} steps already; use another --workdir')
    return same and steps == config.steps and bool(evaluations) and evaluations[-1]['step'] == steps


def main():
    """The command."""
    profile = cli.parse_steps(flags.FLAGS.profile)
    run(flags.FLAGS.config, flags.FLAGS.workdir, profile=profile, steering=cli.read_steering())


if __name__ == '__main__':
    cli.define_flags()
    cli.define_profile()
    cli.define_steering()
    cli.run(main)
