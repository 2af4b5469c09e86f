"""GRPO on text, one page to fork: the real sampler and learner, compiled, on a mesh, with checkpoints and metrics.

    python examples/train_loop.py --workdir=runs/sums            # once more: it goes on where it was stopped
    python examples/train_loop.py --workdir=runs/sums8 --fsdp=8

A small model of characters first imitates demonstrations of one-digit sums, and most of them are wrong; then it learns
from its own samples which ones are right. grpo_jax/train.py adds configs, data sets, evaluation, monitors, and what
survives signals, full disks and changed settings.
"""

import argparse
import contextlib
import json
import os
import random

import jax
import numpy as np

from grpo_jax import algorithms
from grpo_jax.algorithms import Algorithm, advantages, kl, ratios, surrogates, weights
from grpo_jax.collect.demonstrations import SFT, as_rollout
from grpo_jax.collect.draw import decode_completions
from grpo_jax.learner import Learning, Optimization, Optimizers, build_optimizer
from grpo_jax.learner.experience import make_experience
from grpo_jax.learner.programs import make_learner
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.run import checkpoint
from grpo_jax.sampler import Sampling
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import Experience, Prompts

SEED, STEPS, IMITATED, SAVED = 0, 60, 150, 10  # steps of GRPO, updates of imitation, steps between checkpoints
SHAPES = batches.Shapes(prompts=16, group_size=8, queries=4, tokens=4)  # P, G, Q, C
LEARNING = Learning(minibatches=2)  # two updates a rollout; rows are packed, logits come in chunks
GRPO = Algorithm(
    advantage=lambda rewards: advantages.group_norm(rewards, std_ddof=1, std_eps=1e-6),
    ratio=ratios.token,
    surrogate=lambda ratio, advantages: surrogates.clip(ratio, advantages, clip_low=0.2, clip_high=0.28),
    weights=weights.token_mean,
    kl=kl.none,
)


def make_prompts(rng, tokenizer, count):
    """(Prompts of sums like 3+4=, on the host; their answers). A prompt's id sets the noise of its samples."""
    sums = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
    tokens = np.array([tokenizer.encode(f'{a}+{b}=', add_special_tokens=False) for a, b in sums], np.int32)
    assert tokens.shape[1] == SHAPES.queries, 'else pad on the left, and mask what is padded'
    ids = np.array([10 * a + b for a, b in sums], np.int32)
    return Prompts(tokens, np.ones(tokens.shape, bool), ids), [str(a + b) for a, b in sums]


def reward(completion, answer):
    """What a completion is paid: 1 for the right sum, 0 for all else."""
    return float(completion.strip() == answer)


def imitate(params, model_config, tokenizer, sampling, mesh):
    """The parameters after IMITATED supervised updates on demonstrations; six in ten of these are wrong."""
    shapes = SHAPES._replace(prompts=64, group_size=1)
    optimizer = build_optimizer(Optimization(3e-3, schedule='cosine', warmup=10), IMITATED)
    learner = make_learner(model_config, SFT, Optimizers(optimizer), mesh, shapes, Learning(pack_columns=0))
    state, rng = learner.initial(params), random.Random(SEED)
    for _ in range(IMITATED):
        prompts, answers = make_prompts(rng, tokenizer, shapes.prompts)
        shown = [answer if rng.random() < 0.4 else str(rng.randrange(19)) for answer in answers]
        completions = [[[*tokenizer.encode(text, add_special_tokens=False), *sampling.stop_tokens]] for text in shown]
        rollout, ones = (
            as_rollout(prompts, completions, shapes, sampling.pad_token),
            np.ones(shapes.prompts, np.float32),
        )
        groups = np.arange(shapes.prompts, dtype=np.int32)
        experience = batches.put_rows(Experience(rollout, ones[:, None], ones, None, None, groups), mesh)
        state, _ = learner.update(state, experience, None)
    return state.params


def run(workdir, fsdp=1, steps=STEPS):
    """The rows of metrics of the steps that were taken; all are in workdir/metrics.jsonl."""
    os.makedirs(workdir, exist_ok=True)
    # 1. The model, from a folder in Hugging Face's format; its weights are drawn.
    mesh, folder = meshes.make({'fsdp': fsdp}), hf.find('configs/models/characters')
    model_config, tokenizer = families.load_config(folder), hf.load_tokenizer(folder)
    stop_tokens = hf.stop_tokens(folder, tokenizer, model_config.vocab_size)
    sampling = Sampling(temperature=1.0, max_tokens=SHAPES.tokens, stop_tokens=stop_tokens, pad_token=stop_tokens[0])

    # 2. The sampler and the learner: programs for fixed shapes, which the first call compiles.
    sample = make_sampler(model_config, mesh, SHAPES, sampling, {})
    optimizer = build_optimizer(Optimization(3e-4), STEPS * LEARNING.updates)
    learner = make_learner(model_config, GRPO, Optimizers(optimizer), mesh, SHAPES, LEARNING)

    # 3. The first state: of the newest checkpoint, or after imitation.
    with contextlib.closing(checkpoint.manager(workdir, keep=2)) as checkpoints:
        state = checkpoint.restore(checkpoints, learner.abstract_state)
        if state is None:
            shardings = specs.params(transformer.param_table(model_config), mesh)
            draw = jax.jit(transformer.init, static_argnums=1, out_shardings=shardings)
            params = imitate(draw(jax.random.key(SEED), model_config), model_config, tokenizer, sampling, mesh)
            state = learner.initial(params)
        rows = []
        for step in range(int(state.step), steps):
            # 4. Prompts, a function of (seed, step), and G completions of each, whose noise is one of (seed, step, id).
            rng = random.Random(f'{SEED} {step}')
            prompts, answers = make_prompts(rng, tokenizer, SHAPES.prompts)
            rollout = sample(state.params, batches.put_rows(prompts, mesh), jax.random.key(SEED), step)

            # 5. Rewards of texts f64[P, G]; the logprobs that the update reads; group advantages. A group whose rewards
            # are all equal is dead: it teaches nothing.
            texts, _, lengths = decode_completions(tokenizer, rollout, stop_tokens)
            rewards = np.array([reward(text, answers[row // SHAPES.group_size]) for row, text in enumerate(texts)])
            rewards = rewards.reshape(SHAPES.prompts, SHAPES.group_size)
            packed = learner.pack(rollout)
            logprobs = learner.logprobs(state, rollout, packed)
            dead = algorithms.judge_groups('reward', rewards, None)
            experience, row = make_experience(GRPO, state, rollout, logprobs, rewards, {'dead': dead}, mesh)

            # 6. The update: minibatches x one optimizer step. The old state's memory is taken.
            state, learned = learner.update(state, experience, packed)
            row |= jax.device_get(learned) | {'step': step, 'length': lengths.mean()}
            rows.append({name: float(value) for name, value in row.items()})
            print(f'step {step}  reward {row["reward"]:.3f}  dead groups {row["dead_groups"]:.2f}', flush=True)
            with open(os.path.join(workdir, 'metrics.jsonl'), 'a', encoding='utf8') as file:
                file.write(json.dumps(rows[-1]) + '\n')

            # 7. A checkpoint: written beside the next steps, with a digest of each array.
            if (step + 1) % SAVED == 0 or step + 1 == steps:
                checkpoint.save(checkpoints, state)
    return rows


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--workdir', required=True)
    parser.add_argument('--fsdp', type=int, default=1, help='devices that parameters and rows are split over')
    given = parser.parse_args()
    run(given.workdir, given.fsdp)
