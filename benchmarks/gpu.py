"""One GPU: updates by cuDNN's attention beside XLA's, padded and packed, and rollouts, in bfloat16 with random weights.

python -m benchmarks.gpu [--model=Qwen2.5-0.5B] [--lengths=long-tailed] [--part=rollouts] [--repeats=5]
JAX_PLATFORMS=cpu python -m benchmarks.gpu --part=memory --lengths=equal   # what preflight says of the updates' memory

64 rows of 256 + 1,024 tokens, or with a mean of 300 of the 1,024; whole layers are computed again in the backward
pass. Rollouts decode by a loop over layers, and without one. An update is dr_grpo's with gradient descent, so that
parameters show the gradient. Seconds are wall, medians of runs in turn, compiling left out; TFLOP are those of the
matrix products in the program, without the kernels'.
"""

import argparse
import os
import time
from unittest import mock

os.environ.setdefault('JAX_PLATFORMS', 'cuda')

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from benchmarks.learner import build_learner, count_products, experience_of
from grpo_jax import sampler
from grpo_jax.models import transformer
from grpo_jax.models.hf import families
from grpo_jax.sampler import programs
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, compiled, mesh
from grpo_jax.tools.preflight import compiler, plan, topology
from grpo_jax.types import Prompts

CASES = {
    'equal': dict(prompts=8, group=8, queries=256, most=1024, mean=1024),
    'long-tailed': dict(prompts=8, group=8, queries=256, most=1024, mean=300),
}
WAYS = {  # of an update -> options of learner.*
    'padded, xla': dict(pack_columns=0, microbatches=8, attention='xla'),
    'padded': dict(pack_columns=0, microbatches=8),
    'packed, xla': dict(attention='xla'),
    'packed': {},
    'packed, 4 rows at once': dict(pack_rows=4),
    'packed, not repeatable': {},  # kernels that timings choose, scatters in any order
}


def updates(model_config, params, case, experience, repeats):
    """Prints a line for each way to compute an update."""
    options = dict(chunk=0, dtype='bfloat16', remat='full')
    learners = {}
    for name, way in WAYS.items():
        with mock.patch.dict(compiled.ON_GPU, clear='not repeatable' in name):
            learners[name] = build_learner(model_config, case, **options | way)
    began = time.perf_counter()
    compiled.compile_all([learner.update.program for learner in learners.values()], 'the updates')
    print(f'  compiled {len(learners)} updates side by side in {time.perf_counter() - began:.0f} s', flush=True)

    def step(learner):
        state = learner.initial(jax.tree.map(jnp.copy, params))
        return learner.update(state, experience, learner.pack(experience.rollout))[0].params

    @jax.jit
    def gradient_gap(one, other):
        """Norm of the difference of two gradients, over the norm of the second one."""
        squares = [
            (jnp.sum((x - y) ** 2), jnp.sum((y - z) ** 2))
            for x, y, z in zip(*map(jax.tree.leaves, (one, other, params)), strict=True)
        ]
        gap, norm = map(sum, zip(*squares, strict=True))
        return jnp.sqrt(gap / norm)

    exact = step(learners['padded, xla'])
    gaps, equal = {}, {}
    for name, learner in learners.items():
        once, again = step(learner), step(learner)
        gaps[name] = float(gradient_gap(once, exact))
        equal[name] = all(jnp.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (once, again)), strict=True))
    runs = {name: lambda learner=learner: jax.block_until_ready(step(learner)) for name, learner in learners.items()}
    seconds, _ = environment.interleaved(runs, repeats, time.perf_counter)
    for name, learner in learners.items():
        products = count_products(learner, learner.pack(experience.rollout))
        temporaries = learner.update.program.memory.temp_size_in_bytes
        print(
            f'  update, {name}: {seconds[name]:.3f} s, {products / 1e12:.1f} TFLOP, '
            f'{products / seconds[name] / 1e12:.0f} TFLOP/s, temporaries {temporaries / 2**30:.2f} GiB, '
            f'gradient beside padded rows by XLA {gaps[name]:.1e}, '
            f'{"equal" if equal[name] else "other"} bits when repeated',
            flush=True,
        )


def rollouts(model_config, params, case, experience, repeats):
    """Prints how long the engine takes for completions of the case's lengths, by a loop over layers and without one."""
    shapes = batches.Shapes(case['prompts'], case['group'], case['queries'], case['most'])
    lengths = np.asarray(experience.rollout.completion_mask.sum(1), np.int32)
    tokens = experience.rollout.tokens[:: case['group'], : case['queries']]
    prompts = Prompts(tokens, jnp.ones_like(tokens, bool), jnp.arange(case['prompts'], dtype=jnp.int32))
    sampling = sampler.Sampling(1.0, case['most'], (), 0, dtype='bfloat16')
    engines = {}
    for name, by_layer in {'a loop over layers': False, 'no loop over layers': True}.items():
        began = time.perf_counter()
        with mock.patch.dict(programs.BY_LAYER, gpu=by_layer):
            engines[name] = make_sampler(model_config, mesh.make({}), shapes, sampling, {}).compile()
        print(f'  compiled the programs of {name} in {time.perf_counter() - began:.0f} s', flush=True)

    def run(engine):
        return jax.block_until_ready(engine.sample(params, prompts, jax.random.key(7), 0, limit=lengths))

    runs = {name: lambda engine=engine: run(engine) for name, engine in engines.items()}
    for warm_up in runs.values():
        warm_up()
    medians, results = environment.interleaved(runs, repeats, time.perf_counter)
    for name, seconds in medians.items():
        _, stats = results[name]
        print(
            f'  rollout, {name}: {seconds:.2f} s, {lengths.sum() / seconds:.0f} tokens/s, {stats.steps} steps of '
            f'{1e3 * seconds / stats.steps:.2f} ms, slots used {stats.utilisation:.2f}',
            flush=True,
        )


def memory(model_config, case):
    """Prints the temporaries of each update as preflight counts them for a GPU, with its margin and without."""
    for name, way in WAYS.items():
        way = dict(chunk=0, dtype='float16', remat='full', attention='splash') | way
        learner = build_learner(model_config, case, **way)
        fields, _ = compiler.compile_and_measure(learner.update.program.traced.lower())
        gib = fields['temporaries'] / 2**30
        print(
            f'  update, {name}: temporaries {gib:.2f} GiB, with the margin {gib * (1 + topology.MARGIN):.2f}, '
            f'compiled in {fields["seconds"]:.0f} s',
            flush=True,
        )


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--model', default='Qwen2.5-0.5B', help='a folder of configs/models')
    parser.add_argument('--lengths', choices=CASES, action='append', help='default: both')
    parser.add_argument('--part', choices=('updates', 'rollouts', 'memory'), help='default: the first two')
    parser.add_argument('--repeats', type=int, default=5)
    arguments = parser.parse_args()
    print(environment.describe())
    model_config = families.load_config(os.path.join(plan.MODELS, arguments.model))
    if arguments.part == 'memory':
        topology.stand_in()
        for lengths in arguments.lengths or CASES:
            memory(model_config, CASES[lengths])
        return
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), model_config)
    for lengths in arguments.lengths or CASES:
        print(f'{arguments.model}, {lengths} lengths', flush=True)
        experience = experience_of(CASES[lengths])
        for part in (updates, rollouts):
            if arguments.part in (None, part.__name__):
                part(model_config, params, CASES[lengths], experience, arguments.repeats)


if __name__ == '__main__':
    main()
