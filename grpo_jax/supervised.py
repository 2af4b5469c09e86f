"""Cold start: the same policy, weights and learner, trained on demonstrations. `python -m grpo_jax.supervised`."""
import logging
import os

from absl import flags
import jax
import numpy as np

from grpo_jax import checkpoint, data, experiment, metrics, program
from grpo_jax.algorithms import Algorithm, advantages, ratios, surrogates, weights
from grpo_jax.distributed import placement
from grpo_jax.errors import BadInput
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
    shapes = ex.shapes(config.supervised.batch, 1)
    optimizer = optimizers.make(config.supervised.optimizer, config.supervised.steps)
    learning = ex.learning(epochs=1, minibatches=1, microbatches=1, temperature=1.0)
    learner = placement.make_learner(ex.c, SFT, optimizer, ex.mesh, shapes, **learning)
    dataset, completions = demonstrations(ex)
    experiment.claim(ex)

    checkpoints = checkpoint.manager(workdir, keep=1)
    state = checkpoint.restore(checkpoints, learner.state)
    if state is None:
        state = learner.initial(ex.params())
    writer = metrics.Writer(workdir, int(state.step), config.supervised.steps, 'cold start', shown=('loss',))
    for step in range(int(state.step), config.supervised.steps):
        clock = metrics.Stopwatch()
        chosen = data.indices(config.seed, step, shapes.prompts, len(completions))
        rollout = as_rollout(ex, dataset, completions, chosen, shapes)
        ones = np.ones((shapes.prompts, 1), np.float32)
        experience = Experience(rollout, ones, ones[:, 0], None, None, np.arange(shapes.prompts, dtype=np.int32))
        state, learned = learner.update(state, placement.put_rows(experience, ex.mesh))
        found = jax.device_get(learned)
        clock.lap('update')
        writer.step(step, {name: found[name] for name in ('loss', 'grad_norm', 'entropy', 'finite')}, clock.seconds)
        if (step + 1) % config.checkpoint.every == 0 or step + 1 == config.supervised.steps:
            checkpoint.save(checkpoints, state)
    writer.close()
    checkpoints.close()
    return state


def demonstrations(ex):
    """(Dataset, completions as token ids with the stop token) of the examples whose demonstration fits."""
    dataset, most = ex.load('train'), ex.config.rollout.max_tokens
    missing = next((e for e in dataset.examples if 'demonstration' not in e.meta), None)
    if missing:
        raise BadInput('supervised.steps', ex.config.supervised.steps, f'data set {ex.config.data.name} has no '
                       f'demonstrations (example {missing.id}); set it to 0')
    stop = ex.tokenizer.eos_token_id
    completions = [ex.tokenizer.encode(e.meta['demonstration'], add_special_tokens=False) + [stop]
                   for e in dataset.examples]
    kept = [i for i, ids in enumerate(completions) if len(ids) <= most]
    if not kept:
        raise BadInput('rollout.max_tokens', most, 'is shorter than every demonstration')
    if len(kept) < len(completions):
        logging.warning('%d of %d demonstrations are longer than rollout.max_tokens=%d and left out',
                        len(completions) - len(kept), len(completions), most)
    return data.pick(dataset, kept), [completions[i] for i in kept]


def as_rollout(ex, dataset, completions, chosen, shapes):
    """Demonstrations in the form that the learner eats."""
    _, prompts = data.prompts(dataset, chosen, shapes.queries, ex.pad_token)
    tokens = np.full((shapes.prompts, shapes.tokens), ex.pad_token, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, index in enumerate(chosen):
        ids = completions[index]
        tokens[row, :len(ids)] = ids
        mask[row, :len(ids)] = True
    return Rollout(tokens=np.concatenate([prompts.tokens, tokens], 1), prompt_mask=prompts.mask, completion_mask=mask,
                   logprobs=np.zeros(tokens.shape, np.float32), truncated=np.zeros(len(tokens), bool),
                   version=np.zeros(tokens.shape, np.int32), forced=np.zeros(tokens.shape, bool))


def main():
    """The command."""
    run(flags.FLAGS.config, flags.FLAGS.workdir)


if __name__ == '__main__':
    program.define_flags()
    program.run(main)
