"""Decode steps and CPU-seconds of a training step whose rows go on in the next step, and of one that waits for all.

python -m benchmarks.carried [--steps=8] [--in_flight=16] [--prompts=32] [--group=8] [--mean=100] [--most=512]

The sampler alone, with the model of benchmarks.rollout. The lengths of completions are simulated: log-normal, the same
for a prompt and sample in both; tokens are written in the place of those that are drawn, which costs the same. A step
learns from equally many groups in both. The first two steps, which compile and begin with nothing under way, do not
count.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from benchmarks.rollout import MODEL, long_tailed
from grpo_jax import data, sampler
from grpo_jax.collect.carry import make_carry
from grpo_jax.collect.draw import Drawer
from grpo_jax.collect.options import CollectOptions
from grpo_jax.configs import arithmetic
from grpo_jax.example import Example
from grpo_jax.models import transformer
from grpo_jax.run.open import open_run
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, mesh
from grpo_jax.types import TrainState

STOP, SKIPPED, PROMPTS = 1, 2, 512
CLOCKS = 'CPU-seconds', 'seconds'


def end_at(engine, lengths, group):
    """Makes an engine end each row at its length: all tokens are written, the stop token at the end."""
    columns = engine.programs.spec.shapes.tokens

    def given(prompts):
        own = lengths[np.asarray(prompts.ids)].reshape(-1)
        return jnp.asarray(np.where(np.arange(columns) == own[:, None] - 1, STOP, STOP + 1), jnp.int32)

    resume_state, new_state = engine.programs.resume_state, engine.programs.new_state

    def resumed(rollout, prompts, key, limit):
        return resume_state(rollout, prompts, key, limit).replace(given_tokens=given(prompts))

    def new(prompts, key, step, _, limit):
        return new_state(prompts, key, step, given(prompts), limit)

    engine.programs.resume_state, engine.programs.new_state = resumed, new


def make_drawer(options, run, in_flight):
    """The Drawer of 512 prompts of 64 random tokens, judged by the rewards of a Run."""
    one, numbers, vocabulary = mesh.make({}), np.random.default_rng(1), run.model.config.vocab_size
    shapes = batches.Shapes(options.prompts, options.group, 64, options.most)
    sampling = sampler.Sampling(temperature=1.0, max_tokens=options.most, stop_tokens=(STOP,), pad_token=0)
    tokens = [numbers.integers(3, vocabulary, 64).tolist() for _ in range(PROMPTS)]
    dataset = data.Dataset([Example('', '0', number, {}) for number in range(PROMPTS)], tokens)
    at_once, model = (
        shapes._replace(prompts=options.prompts + in_flight),
        dataclasses.replace(MODEL, vocab_size=vocabulary),
    )
    engine = make_sampler(model, one, at_once, sampling, {}, carried=in_flight)
    rows = long_tailed(PROMPTS * options.group, options.mean, options.most)
    end_at(engine, rows.reshape(PROMPTS, options.group), options.group)
    return Drawer(
        CollectOptions(in_flight=in_flight), dataset, None, engine, shapes, options.prompts, 0, one,
        run.model.tokenizer, sampling, run.rewards,
    ), transformer.init(jax.random.key(0), model)  # fmt: skip


def measure(options, run, in_flight):
    """Prints medians over the steps of what a step takes."""
    drawer, params = make_drawer(options, run, in_flight)
    collect = make_carry(drawer) if in_flight else drawer.draw
    state, rows = TrainState(jnp.int32(0), params, None, None, {'position': jnp.int32(0)}), []
    for step in range(options.steps + SKIPPED):
        began, at = time.process_time(), time.monotonic()
        draw, state = collect(state.replace(step=jnp.int32(step)), lambda *_: None)
        tokens = int(draw.finish_rewards().lengths.sum())
        stats = {'decode steps': draw.stats.steps, 'slot-steps': draw.stats.slot_steps, 'learned tokens': tokens}
        seconds = {'CPU-seconds': time.process_time() - began, 'seconds': time.monotonic() - at}
        rows.append(stats | seconds | draw.counts)
    figures = {name: [row[name] for row in rows[SKIPPED:]] for name in rows[-1]}
    line = ', '.join(f'{name} {statistics.mean(values):.4g}' for name, values in figures.items())
    print(f'in_flight {in_flight}: {line}', flush=True)
    return {name: statistics.mean(values) for name, values in figures.items()}


def main():
    """Measures both, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {'steps': 8, 'in_flight': 16, 'prompts': 32, 'group': 8, 'mean': 100, 'most': 512}.items():
        parser.add_argument(f'--{name}', type=int, default=default)
    options = parser.parse_args()
    print(environment.describe())
    run = open_run(arithmetic.get_config(), tempfile.mkdtemp())
    waiting, carried = (measure(options, run, in_flight) for in_flight in (0, options.in_flight))
    per_token = {name: waiting[name] / waiting['learned tokens'] for name in ('decode steps', *CLOCKS)}
    for name, value in per_token.items():
        print(
            f'{name} a learned token: {value * carried["learned tokens"] / carried[name]:.2f} x fewer when rows go on'
        )


if __name__ == '__main__':
    main()
