"""START HERE: run(config, workdir) builds everything, then loops over the steps of GRPO."""

import functools
import logging
import os

from absl import flags
import jax
import numpy as np

from grpo_jax import algorithms, evaluate, rewards, supervised
from grpo_jax.errors import BadInput, Stopped
from grpo_jax.hosts import json_file, processes
from grpo_jax.learner.experience import make_experience
from grpo_jax.rewards import gold
from grpo_jax.run import checkpoint, cli, collect, metrics, reference, watch
from grpo_jax.run.experiment import agree, claim, open_experiment, recorded_config
from grpo_jax.sharding import batches, compiled


def run(config, workdir, algorithm=None, functions=None):
    """The final TrainState of a run; its files are in workdir, and calling again goes on where it stopped.

    Stopped when a SIGTERM came: the step at hand was finished and saved.

    algorithm replaces the one that config.algorithm describes, for a variant written in a notebook; functions are
    rewards by name, which config.reward.parts may list.
    """
    experiment = open_experiment(config, workdir, functions=functions)
    algorithm = algorithm or algorithms.make(config.algorithm, config.collection)
    shapes = shapes_of(experiment, algorithm)
    put = functools.partial(batches.put_rows, mesh=experiment.mesh)

    collector = collect.Collector(experiment, config.collection, shapes)
    learner = experiment.learner(algorithm, shapes, collector.aux())
    evaluator = evaluate.make(experiment, config.evaluation.samples)

    checkpoints = checkpoint.manager(workdir, keep=config.checkpoint.keep)
    built = collector.programs | {'logprobs': learner.logprobs, 'update': learner.update}
    agree(experiment, checkpoints.latest_step(), built, collector.examples)
    state = checkpoint.restore(checkpoints, learner.state)
    if state is None:
        gold.check(experiment.reward_functions, collector.examples)
        state = learner.initial(supervised.cold_start(experiment))
    claim(experiment)
    compiled.write_hashes(workdir, **built)
    writer = metrics.writer(workdir, int(state.step), config.steps, 'train')

    with watch.Watch(config.log.hang_after) as watched:
        for step in range(int(state.step), config.steps):
            watched.step(f'step {step}')
            clock = metrics.Stopwatch()
            if _due(step, config.evaluation.every) or step == 0:
                writer.evaluation(step, evaluate.evaluate(evaluator, state.params))
                clock.lap('evaluate')

            state, renewed = reference.refresh(config, checkpoints, state, learner.state)
            draw, state = collector(state, writer.sampling)  # its rewards are still being computed on the host
            clock.lap('sample')

            logprobs = learner.logprobs(state, draw.rollout)
            rewarded = draw.results()
            clock.lap('reward')

            experience, row = make_experience(
                algorithm,
                state.aux,
                draw.rollout,
                rewards.shape_rewards(experiment.reward_functions, rewarded, shapes.group_size),
                logprobs,
                put,
                dead=algorithms.dead_groups(rewarded.rewards.reshape(shapes.prompts, -1)),
                **rewards.advantage_inputs(
                    experiment.reward_functions,
                    draw.examples,
                    rewarded,
                    lambda rollout=draw.rollout: processes.fetch((rollout.tokens, rollout.completion_mask)),
                    experiment.tokenizer,
                ),
            )
            state, learned = learner.update(state, experience)
            row |= jax.device_get(learned) | metrics.of_completions(rewarded)
            row |= draw.counts | {'reference_renewed': renewed} | metrics.of_sampler(collector.sample)
            clock.lap('update')

            if _due(step, config.log.rollouts):
                writer.rollouts(step, metrics.rollout_rows(draw.examples, rewarded, experience))
            writer.step(step, row, clock.seconds | metrics.speed_of_sampler(collector.sample))
            if row['finite'] < 1:
                _keep_bad_batch(workdir, step, experience, int(state.aux['bad_steps']), config.learner.max_bad_steps)
            stop = processes.agree(f'the end of step {step}', row, watched.stopping)
            if _due(step + 1, config.checkpoint.every) or step + 1 == config.steps or stop:
                checkpoint.save(checkpoints, state)
            if stop:
                writer.close()
                checkpoints.close()
                experiment.reward_functions.close()
                raise Stopped(workdir, step)

    writer.evaluation(config.steps, evaluate.evaluate(evaluator, state.params))
    writer.close()
    checkpoints.close()
    experiment.reward_functions.close()
    evaluate.table(os.path.join(workdir, 'evaluations.jsonl'))
    return state


def finished(config, workdir):
    """Whether workdir holds a whole run of this very config; BadInput when it went beyond config.steps."""
    paths = [os.path.join(workdir, name) for name in ('config.json', 'metrics.jsonl', 'evaluations.jsonl')]
    if not all(os.path.isfile(path) for path in paths):
        return False
    same = json_file.read(paths[0]) == recorded_config(config)
    steps, evaluations = len(metrics.read(paths[1])), metrics.read(paths[2])
    if steps > config.steps:
        raise BadInput('steps', config.steps, f'{workdir} has {steps} steps already; use another --workdir')
    return same and steps == config.steps and bool(evaluations) and evaluations[-1]['step'] == steps


def shapes_of(experiment, algorithm):
    """Sizes of a step; BadInput, or a warning, for what the algorithm cannot do with them."""
    config, prompts, group = (
        experiment.config,
        experiment.config.data.prompts_per_step,
        experiment.config.rollout.group_size,
    )
    if algorithm.source in collect.READ_FROM_DATA:  # as many rows, of more prompts
        size = len(collect.READ_FROM_DATA[algorithm.source])
        prompts, group = prompts * group // size, size
    if 'step_rewards' in algorithm.advantage_reads and not experiment.reward_functions.steps:
        raise BadInput(
            'reward.step_rewards',
            '',
            f'advantage {config.algorithm.advantage} needs rewards of steps; name '
            'a reward that has steps, like calculator',
        )
    if config.algorithm.critic_warmup and not algorithm.needs_values:
        raise BadInput(
            'algorithm.critic_warmup',
            config.algorithm.critic_warmup,
            f'advantage {config.algorithm.advantage} has no critic; use 0',
        )
    for warning in algorithms.check_run(
        algorithm, group_size=group, prompts=prompts, updates=config.learner.epochs * config.learner.minibatches
    ):
        logging.warning(warning)
    if 'reference' in config.learner.offload and not algorithm.keeps_reference:
        logging.warning('learner.offload names the reference, and this algorithm keeps none')
    return experiment.shapes(prompts, group)


def _due(step, every):
    return every > 0 and step % every == 0


def _keep_bad_batch(workdir, step, experience, count, most):
    """Writes the batch of a skipped update to bad/<step>.npz; stops the run when there were too many."""
    path = os.path.join(workdir, 'bad', f'{step:06d}.npz')
    leaves = jax.tree_util.tree_leaves_with_path(processes.fetch(experience))
    if processes.is_first():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        np.savez(path, **{jax.tree_util.keystr(name, simple=True, separator='.'): x for name, x in leaves})
    if count > most:
        raise FloatingPointError(
            f'{count} updates were skipped for a non-finite loss or gradient, more than learner.'
            f'max_bad_steps = {most}; the last batch is in {path}; lower the learning rate'
        )


def main():
    """The command."""
    run(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == '__main__':
    cli.define_flags()
    cli.run(main)
