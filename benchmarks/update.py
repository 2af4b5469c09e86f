"""CPU-seconds and peak memory of one GRPO update beside Tunix's: 64 rows of 64 + 128 tokens, two vocabularies.

python -m benchmarks.update --tunix=PYTHON [--repeats=3] [--only=32768]

4 layers of width 256, tied embeddings, float32, AdamW, a KL to given reference logprobs; every process pinned to one
core. The peak is that of the whole process, compiling included.
"""

import os
import sys

CASES = {
    str(vocabulary): dict(prompts=8, group=8, queries=64, most=128, vocabulary=vocabulary)
    for vocabulary in (512, 32768)
}


def tokens_of(case):
    """(prompts i32[B, Q], completions i32[B, C]), the same for all."""
    import numpy as np

    rng, rows = np.random.default_rng(0), case['prompts'] * case['group']
    prompts = np.repeat(rng.integers(1, case['vocabulary'], (case['prompts'], case['queries'])), case['group'], 0)
    return prompts.astype(np.int32), rng.integers(1, case['vocabulary'], (rows, case['most'])).astype(np.int32)


def ours(case):
    """run() of an update with packed rows, each half a group."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from benchmarks.rollout import MODEL
    from grpo_jax import algorithms
    from grpo_jax.configs import default
    from grpo_jax.learner import Learning, Optimizers
    from grpo_jax.learner.programs import make_learner
    from grpo_jax.models import transformer
    from grpo_jax.sharding import batches, mesh
    from grpo_jax.types import Experience, Rollout

    model_config = dataclasses.replace(MODEL, vocab_size=case['vocabulary'], tie_embeddings=True)
    prompts, completions = tokens_of(case)
    rows, most = completions.shape
    columns = case['queries'] + case['group'] // 2 * most
    learner = make_learner(
        model_config,
        algorithms.make(default.get_config('grpo').algorithm),
        Optimizers(optax.adamw(1e-5)),
        mesh.make({}),
        batches.Shapes(case['prompts'], case['group'], case['queries'], most),
        Learning(chunk=2048, pack_columns=columns),
    )
    learner.update.program.compile()
    zeros = jnp.zeros((rows, most))
    rollout = Rollout(
        tokens=jnp.concatenate([prompts, completions], 1),
        prompt_mask=jnp.ones(prompts.shape, bool),
        completion_mask=jnp.ones((rows, most), bool),
        forced=jnp.zeros((rows, most), bool),
        logprobs=zeros,
        truncated=jnp.zeros(rows, bool),
        version=jnp.zeros((rows, most), jnp.int32),
    )
    advantages = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 1)), jnp.float32)
    experience = Experience(
        rollout,
        advantages,
        jnp.zeros(rows),
        None,
        zeros - jnp.log(model_config.vocab_size),
        jnp.arange(rows, dtype=jnp.int32) // case['group'],
    )
    state = learner.initial(jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), model_config))

    def run():
        nonlocal state
        state, _ = jax.block_until_ready(learner.update(state, experience, learner.pack(rollout)))

    return run


def tunix(case):
    """run() of the update of tunix.rl.grpo.grpo_learner.GRPOLearner."""
    import inspect

    from flax import nnx
    import jax
    import jax.numpy as jnp
    import numpy as np
    from tunix.rl.grpo import grpo_learner

    from benchmarks.iteration import tunix_learner

    cluster, _, one = tunix_learner(case, lambda **_: [], beta=0.04, tied=True)
    prompts, completions = map(jnp.asarray, tokens_of(case))
    example = grpo_learner.TrainExample(
        prompt_ids=prompts,
        prompt_mask=jnp.ones_like(prompts, bool),
        completion_ids=completions,
        completion_mask=jnp.ones_like(completions, bool),
        old_per_token_logps=None,
        ref_per_token_logps=jnp.full(completions.shape, -jnp.log(float(case['vocabulary']))),
        advantages=jnp.asarray(np.random.default_rng(1).normal(size=len(prompts)), jnp.float32),
    )
    trainer = cluster.actor_trainer
    with one:
        step, _ = trainer.jit_train_and_eval_step(False, True)
    flag = 'is_update_step' in inspect.signature(trainer._train_step).parameters

    def run():
        with one:
            jax.block_until_ready(step(example, is_update_step=jnp.array(True)) if flag else step(example))
            jax.block_until_ready(nnx.state(trainer.model, nnx.Param))

    return run


def main():
    """The command, and the worker that it starts."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from benchmarks import peers

    arguments = peers.parse(__doc__, 'tunix')
    if arguments.worker:
        peers.work({'ours': ours, 'tunix': tunix}[arguments.worker], arguments.case)
        return
    from benchmarks import environment

    print(environment.describe())
    for name, case in CASES.items():
        if arguments.only in name:
            figures = peers.medians(case, arguments, __file__)
            print(
                f'vocabulary {name}: '
                + ', '.join(
                    f'{peer} {seconds:.2f} CPU-s, {peak:.2f} GiB at most' for peer, (seconds, peak) in figures.items()
                ),
                flush=True,
            )


if __name__ == '__main__':
    main()
