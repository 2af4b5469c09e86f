"""The update with padded rows against packed ones, where a group's prompt is computed once.

python -m benchmarks.learner [--repeats=5] [--only=long-tailed] [--columns=768,2048]

A random model (4 layers, width 256, vocabulary 512, float32), one thread: CPU-seconds of an update, interleaved;
operations of matrix products counted in the program; the share of tokens that are padding. Packed rows are of the
default length, and of --columns besides. All make the same update, which is checked. Then the memory of the update at a
vocabulary of 151,936, with the head in chunks and whole.
"""

import argparse
import dataclasses
import os

os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_multi_thread_eigen=false'
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import environment
from benchmarks.rollout import MODEL, long_tailed
from grpo_jax import algorithms
from grpo_jax.configs import default
from grpo_jax.learner import Learning, Optimizers
from grpo_jax.learner.programs import make_learner
from grpo_jax.models import transformer
from grpo_jax.sharding import batches, mesh
from grpo_jax.tools.preflight import flops
from grpo_jax.types import Experience, Rollout

CASES = {
    'equal': dict(prompts=2, group=8, queries=128, most=128, mean=128),
    'long-tailed': dict(prompts=8, group=8, queries=64, most=256, mean=64),
}


def experience_of(case):
    """Experience of random tokens; prompts of equal length, completions of the case's lengths."""
    rows, queries, most = case['prompts'] * case['group'], case['queries'], case['most']
    lengths = np.full(rows, most) if case['mean'] == most else long_tailed(rows, case['mean'], most)
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(3, MODEL.vocab_size, (case['prompts'], queries)), case['group'], 0)
    completions = rng.integers(3, MODEL.vocab_size, (rows, most))
    mask = np.arange(most) < lengths[:, None]
    rollout = Rollout(
        tokens=jnp.asarray(np.concatenate([prompts, np.where(mask, completions, 0)], 1), jnp.int32),
        prompt_mask=jnp.ones((rows, queries), bool),
        completion_mask=jnp.asarray(mask),
        forced=jnp.zeros((rows, most), bool),
        logprobs=jnp.zeros((rows, most)),
        truncated=jnp.zeros(rows, bool),
        version=jnp.zeros((rows, most), jnp.int32),
    )
    return Experience(
        rollout=rollout,
        advantages=jnp.asarray(rng.normal(size=(rows, 1)), jnp.float32),
        rewards=jnp.zeros(rows),
        old_logprobs=None,
        ref_logprobs=None,
        group_ids=jnp.arange(rows, dtype=jnp.int32) // case['group'],
    )


def build_learner(model_config, case, **options):
    """Learner of dr_grpo by gradient descent; its new parameters show the gradient."""
    shapes = batches.Shapes(case['prompts'], case['group'], case['queries'], case['most'])
    return make_learner(
        model_config,
        algorithms.make(default.get_config('dr_grpo').algorithm),
        Optimizers(optax.sgd(1.0)),
        mesh.make({}),
        shapes,
        Learning(**dict(chunk=1024) | options),
    )


def count_products(learner, packed):
    """Operations of the matrix products of an update of these PackedCells; None: of padded rows."""
    trips = (1,) if packed is None else (int(packed.count[0]),)
    return flops.count(learner.update.program.traced.jaxpr, trips)[0]


def compare(name, case, repeats, lengths):
    """Prints how padded rows, packed ones of the default length and those of other lengths compare."""
    experience = experience_of(case)
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), MODEL)
    learners = {'padded': build_learner(MODEL, case, pack_columns=0), 'packed': build_learner(MODEL, case)}
    learners |= {f'packed in {columns}': build_learner(MODEL, case, pack_columns=columns) for columns in lengths}

    def run(learner):
        def once():
            state, packed = learner.initial(jax.tree.map(jnp.copy, params)), learner.pack(experience.rollout)
            state, _ = learner.update(state, experience, packed)
            return jax.block_until_ready(state.params)

        return once

    runs = {way: run(learner) for way, learner in learners.items()}
    for once in runs.values():
        once()
    seconds, results = environment.interleaved(runs, repeats)
    mask = experience.rollout.completion_mask
    print(
        f'{name}: {case["prompts"]} x {case["group"]} rows, prompts {case["queries"]}, completions mean '
        f'{float(mask.sum(1).mean()):.0f} max {case["most"]}'
    )
    for way, learner in learners.items():
        gap = max(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)), results[way], results['padded'])))
        assert gap < 1e-5, gap
        rows, used = learner.pack(experience.rollout), int(mask.sum() + experience.rollout.prompt_mask.sum())
        columns, cells = experience.rollout.tokens.shape[1], experience.rollout.tokens.size
        if rows is not None:
            columns, used = learner.sizes.columns, int(jnp.sum(rows.cells >= 0))
            cells = int(rows.count[0]) * learner.sizes.rows * columns
        print(
            f'  {way}: {seconds[way]:.3f} CPU-s, {1 - seconds[way] / seconds["padded"]:.0%} less; rows of {columns}, '
            f'{1 - used / cells:.1%} padding; {count_products(learner, rows) / 1e9:.1f} GFLOP; '
            f'largest difference of a parameter {gap:.1e}',
            flush=True,
        )


def memory():
    """Prints the compiled memory of an update at a large vocabulary, with the head in chunks and whole."""
    model_config = dataclasses.replace(MODEL, vocab_size=151936, tie_embeddings=True)
    case = dict(prompts=16, group=8, queries=16, most=128)
    needed = {
        chunk: build_learner(model_config, case, chunk=chunk, pack_columns=0)
        .update.program.compile()
        .memory.temp_size_in_bytes
        for chunk in (512, 16384)
    }
    print(
        f'vocabulary {model_config.vocab_size}, B*C = 16384: temporaries of the update '
        + ', '.join(f'{size / 2**30:.2f} GiB with chunks of {chunk}' for chunk, size in needed.items())
        + f': {needed[16384] / needed[512]:.1f} x',
        flush=True,
    )


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--only', default='')
    parser.add_argument('--columns', default='', help='lengths of packed rows')
    arguments = parser.parse_args()
    print(environment.describe())
    for name, case in CASES.items():
        if arguments.only in name:
            compare(name, case, arguments.repeats, [int(n) for n in arguments.columns.split(',') if n])
    if arguments.only in 'memory':
        memory()


if __name__ == '__main__':
    main()
