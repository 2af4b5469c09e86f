"""How well sampler and learner agree on logprobs, in float32 and bfloat16; the cost of learner.old_logprobs='decode'.

Besides, what model.lora.base_dtype='int8' changes: the learner's logprobs of the same tokens, with the base in int8.

python -m benchmarks.agreement [--smollm2=FOLDER] [--dtype=bfloat16]

The arithmetic demo's model with random weights (8 x 8 rows of at most 32 tokens), and SmolLM2-135M-Instruct (2 x 4 rows
of at most 48). Gaps are absolute differences of a token's logprobs in nats; KL is the mean of k3 of the two.
Seconds are of the processor, medians of runs in turn: sampling a rollout, the learner's forward pass over it, and
decoding it again.
"""

import argparse
import tempfile

import jax
import numpy as np

from benchmarks import environment
from grpo_jax import data
from grpo_jax.collect.draw import abstract_aux
from grpo_jax.collect.policies import make_decode_scorer
from grpo_jax.configs import arithmetic, default
from grpo_jax.run.open import make_policy, make_run_learner, make_run_sampler, open_run, open_split
from grpo_jax.sharding import batches

REPEATS = 3


def demo():
    """The config of the demo's model."""
    config = arithmetic.get_config('dr_grpo')
    config.supervised.updates, config.data.prompts_per_step, config.rollout.group_size = 0, 8, 8
    return config


def smollm2(folder):
    """The config of SmolLM2 on sums in its chat."""
    config = default.get_config('dr_grpo')
    config.model.path, config.data.chat = folder, True
    config.data.prompts_per_step, config.rollout.group_size, config.rollout.max_tokens = 2, 4, 48
    config.reward.parts, config.reward.verifier = (('numeric', 1.0),), 'numeric'
    config.data.max_prompt_tokens, config.data.options = 64, {'digits': 1, 'count': 40, 'blurts': 0.0, 'wrong': 0.0}
    return config


def measure(name, config, dtype):
    """Prints a line for a model in a dtype."""
    config.model.dtype, config.learner.old_logprobs = dtype, 'decode'
    config.learner.minibatches = 2  # so that the learner has a forward pass to time
    run, learner, dataset = open_learner(config)
    settings, shapes = run.settings, run.settings.step_shapes(run.algorithm)
    state, sample = learner.initial(make_policy(run)), make_run_sampler(run, shapes)
    _, prompts = data.prompts(dataset, range(shapes.prompts), shapes.queries, settings.sampling.pad_token)
    prompts, key = batches.put_rows(prompts, run.mesh), jax.random.key(settings.seed)
    rollout = sample(state.params, prompts, key, 0)
    decode = make_decode_scorer(sample, key, shapes.group_size, run.mesh, run.algorithm.needs_reference)
    seconds, results = environment.interleaved(
        {
            'sample': lambda: jax.device_get(sample(state.params, prompts, key, 0)),
            'forward': lambda: jax.device_get(learner.logprobs(state, rollout, learner.pack(rollout))),
            'decode': lambda: jax.device_get(decode(state, rollout, None)),
        },
        REPEATS,
    )
    mask, sampled = np.asarray(rollout.loss_mask), np.asarray(rollout.logprobs)
    own = results['forward']['forward_logprobs']
    for by, logprobs in (('forward', own), ('decode', results['decode']['old_logprobs'])):
        cost = f'{seconds[by]:.2f} s, {seconds[by] / seconds["sample"]:.2f} of sampling ({seconds["sample"]:.2f} s)'
        print(f'{name}, {dtype}, {by}: {mask.sum()} tokens, {gaps((logprobs - sampled)[mask])}; {cost}', flush=True)
    changed = with_int8_base(config, rollout)
    print(f'{name}, {dtype}, base in int8 beside the base: {gaps((changed - own)[mask])}', flush=True)


def open_learner(config):
    """(Run, its Learner, the Dataset that it learns from) of a config."""
    with tempfile.TemporaryDirectory() as workdir:
        run = open_run(config, workdir)
    dataset, shapes = open_split(run, 'train'), run.settings.step_shapes(run.algorithm)
    aux = abstract_aux(run.settings.collection, shapes, len(dataset.examples))
    return run, make_run_learner(run, aux), dataset


def gaps(gap):
    """A text about differences of logprobs."""
    gap = gap.astype(np.float64)
    k3, equal = np.expm1(gap) - gap, np.mean(gap == 0)
    return f'gap mean {np.abs(gap).mean():.2e}, max {np.abs(gap).max():.2e}, KL {k3.mean():.2e}, equal bits {equal:.1%}'


def with_int8_base(config, rollout):
    """The learner's logprobs of a rollout where the frozen matrices are in int8, and adapters change nothing yet."""
    config.model.lora.rank, config.model.lora.base_dtype = 1, 'int8'
    config.learner.old_logprobs = 'forward'
    run, learner, _ = open_learner(config)
    state, packed = learner.initial(make_policy(run)), learner.pack(rollout)
    return jax.device_get(learner.logprobs(state, rollout, packed))['old_logprobs']


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--smollm2', default='', help='its folder')
    parser.add_argument('--dtype', action='append', choices=('float32', 'bfloat16'), help='default: both')
    arguments = parser.parse_args()
    print(environment.describe())
    for dtype in arguments.dtype or ('float32', 'bfloat16'):
        measure('demo', demo(), dtype)
        if arguments.smollm2:
            measure('SmolLM2', smollm2(arguments.smollm2), dtype)


if __name__ == '__main__':
    main()
