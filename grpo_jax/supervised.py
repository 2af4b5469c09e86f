"""Cold start: the same policy, weights and learner, trained on demonstrations. `python -m grpo_jax.supervised`."""
import logging
import os

from absl import flags
import jax
import numpy as np

from grpo_jax import checkpoint, data, experiment, metrics, program, watch
from grpo_jax.algorithms import Algorithm, advantages, ratios, surrogates, weights
from grpo_jax.distributed import multihost, placement
from grpo_jax.errors import BadInput, Stopped
from grpo_jax.learner import optimizer as optimizers
from grpo_jax.types import Experience, Rollout

# cross entropy is the policy gradient with every advantage 1, averaged over tokens
SFT = Algorithm(advantage=advantages.group_mean, ratio=ratios.token, surrogate=surrogates.policy_gradient,
                weights=weights.token_mean)


def cold_start(ex):
    """The initial policy of an experiment: its model's weights, or those that supervised.steps lead to."""
    if not ex.config.supervised.steps:
        return ex.params()
    return run(ex.config, os.path.join(ex.workdir, 'cold_start')).params


def run(config, workdir):
    """The final TrainState of supervised training on the train split's demonstrations, in its own workdir.

    A demonstration is an example's meta['demonstration']; those longer than rollout.max_tokens are left
    out. Goes on where it stopped.
    """
    if not config.supervised.steps:
        raise BadInput('supervised.steps', 0, 'nothing to do; set the number of updates')
    ex = experiment.enter(config, workdir)
    shapes, learner = make_learner(ex)
    dataset, completions = demonstrations(ex)

    def experience(step):
        chosen = data.indices(config.seed, step, shapes.prompts, len(completions), dataset.parts)
        rollout = as_rollout(ex, dataset, completions, chosen, shapes)
        ones = np.ones((shapes.prompts, 1), np.float32)
        return Experience(rollout, ones, ones[:, 0], None, None, np.arange(shapes.prompts, dtype=np.int32))

    return loop(ex, learner, experience, 'cold start', dataset.examples)


def make_learner(ex):
    """(placement.Shapes of an update, placement.Learner) of an experiment's supervised training."""
    shapes = ex.shapes(ex.config.supervised.batch, 1)
    optimizer = optimizers.make(ex.config.supervised.optimizer, ex.config.supervised.steps)
    learning = ex.learning(epochs=1, minibatches=1, microbatches=1, temperature=1.0)
    return shapes, placement.make_learner(ex.c, SFT, optimizer, ex.mesh, shapes, **learning)


def loop(ex, learner, experience, title, examples, beginning=experiment.Experiment.params):
    """The final TrainState of supervised.steps updates on experience(step), host arrays; goes on where it stopped.

    examples: those that it learns from; beginning(ex): parameters of the first state. Stopped when a SIGTERM came: the
    step at hand was finished and saved.
    """
    config, steps = ex.config, ex.config.supervised.steps
    checkpoints = checkpoint.manager(ex.workdir, keep=1)
    experiment.agree(ex, checkpoints.latest_step(), {'update': learner.update}, examples)
    experiment.claim(ex)
    state = checkpoint.restore(checkpoints, learner.state)
    if state is None:
        state = learner.initial(beginning(ex))
    writer = metrics.writer(ex.workdir, int(state.step), steps, title, shown=('loss',))
    with watch.Watch(config.log.hang_after) as watched:
        for step in range(int(state.step), steps):
            watched.step(f'{title}, step {step}')
            clock = metrics.Stopwatch()
            state, learned = learner.update(state, placement.put_rows(experience(step), ex.mesh))
            found = jax.device_get(learned)
            clock.lap('update')
            row = {name: found[name] for name in ('loss', 'grad_norm', 'entropy', 'finite') if name in found}
            writer.step(step, row, clock.seconds)
            stop = multihost.agree(f'the end of step {step} of the {title}', row, watched.stopping)
            if (step + 1) % config.checkpoint.every == 0 or step + 1 == steps or stop:
                checkpoint.save(checkpoints, state)
            if stop:
                writer.close()
                checkpoints.close()
                raise Stopped(ex.workdir, step)
    writer.close()
    checkpoints.close()
    return state


def demonstrations(ex, fields=('demonstration',)):
    """(Dataset, completions) of the examples whose meta has all fields and whose completions fit.

    completions[i] has for each field the token ids with the stop token.
    """
    stop = ex.tokenizer.eos_token_id

    def encode(example):
        return [ex.tokenizer.encode(example.meta[field], add_special_tokens=False) + [stop] for field in fields]

    return read(ex, 'train', fields, encode)


def read(ex, split, fields, encode):
    """(Dataset, encode(example) of each) of the split's examples whose meta has all fields and whose completions fit.

    encode(example) lists an example's completions, each a list of tokens that must not pass rollout.max_tokens.
    """
    dataset, most = ex.load(split), ex.config.rollout.max_tokens
    have = [i for i, e in enumerate(dataset.examples) if all(field in e.meta for field in fields)]
    if not have:
        raise BadInput('data.name', ex.config.data.name, f'has no example with {" and ".join(fields)}; use another, '
                       'or supervised.steps=0 and algorithm.source=\'policy\'')
    completions = {i: encode(dataset.examples[i]) for i in have}
    kept = [i for i in have if max(map(len, completions[i])) <= most]
    if not kept:
        raise BadInput('rollout.max_tokens', most, 'is shorter than every demonstration')
    for count, reason in [(len(dataset.examples) - len(have), f'lack {" or ".join(fields)}'),
                          (len(have) - len(kept), f'are longer than rollout.max_tokens={most}')]:
        if count:
            logging.warning('%d of %d examples %s and are left out', count, len(dataset.examples), reason)
    return data.pick(dataset, kept), [completions[i] for i in kept]


def as_rollout(ex, dataset, completions, chosen, shapes):
    """The chosen examples' completions in the form that the learner eats, group_size of each."""
    _, prompts = data.prompts(dataset, chosen, shapes.queries, ex.pad_token)
    ids = [row for index in chosen for row in completions[index]]
    tokens = np.full((len(ids), shapes.tokens), ex.pad_token, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, kept in enumerate(ids):
        tokens[row, :len(kept)] = kept
        mask[row, :len(kept)] = True
    before, prompt_mask = (np.repeat(x, shapes.group_size, 0) for x in (prompts.tokens, prompts.mask))
    return Rollout(tokens=np.concatenate([before, tokens], 1), prompt_mask=prompt_mask, completion_mask=mask,
                   logprobs=np.zeros(tokens.shape, np.float32), truncated=np.zeros(len(tokens), bool),
                   version=np.zeros(tokens.shape, np.int32), forced=np.zeros(tokens.shape, bool))


def main():
    """The command."""
    run(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == '__main__':
    program.define_flags()
    program.run(main)
