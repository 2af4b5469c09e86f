"""The rollout engine against the usual static loop: same model, same noise, same tokens out, in one process.

python -m benchmarks.rollout [--repeats=5] [--only=long-tailed]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment, static_sampler
from grpo_jax import sampler
from grpo_jax.models import transformer
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, mesh
from grpo_jax.types import Prompts

# 4 layers of width 256, as in the peers' drivers
MODEL = transformer.ModelConfig(
    vocab_size=512,
    width=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp=1024,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=(),
    qk_norm=False,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    tie_embeddings=False,
)


def long_tailed(count, mean, most, seed=0):
    """Log-normal lengths i32[count] with about that mean, cut at `most`, the longest being exactly `most`."""
    sigma = 0.75
    lengths = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    lengths = np.clip(lengths, 1, most).astype(np.int32)
    lengths[np.argmax(lengths)] = most
    return lengths


def compare(name, *, prompts, group, queries, lengths, repeats, full_rows=None, in_batches=True):
    """Times engine and static loop on completions of the given lengths; both must give the same tokens.

    full_rows: how many samples of full length the cache may hold at once (None: all). The static loop then
    runs batches of that many, in order, unless in_batches is False: then it may use more than the engine.
    """
    c, most = MODEL, int(lengths.max())
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), c)
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, c.vocab_size, (prompts, queries)), jnp.int32)
    batch = Prompts(tokens, jnp.ones_like(tokens, bool), jnp.arange(prompts, dtype=jnp.int32))
    key, step, rows = jax.random.key(7), 0, prompts * group
    budget = 0
    if full_rows:
        budget = 2 * 4 * c.layers * c.kv_heads * c.head_dim * full_rows * (queries + most)
    engine = make_sampler(
        c,
        mesh.make({}),
        batches.Shapes(prompts, group, queries, most),
        sampler.Sampling(temperature=1.0, max_tokens=most, stop_tokens=(), pad_token=0, cache_bytes=budget),
        {},
    )

    at_once = full_rows // group if full_rows and in_batches else prompts
    static = jax.jit(lambda params, batch, keys, limit: static_sampler.sample(params, batch, keys, limit, c, most, 1.0))

    def run_static(lengths=lengths):
        parts = []
        for start in range(0, prompts, at_once):
            part = Prompts(*(x[start : start + at_once] for x in (batch.tokens, batch.mask, batch.ids)))
            keys = sampler.row_keys(key, step, part.ids, group)
            parts.append(static(params, part, keys, lengths[start * group : (start + at_once) * group]))
        return [np.concatenate(arrays) for arrays in zip(*jax.device_get(parts), strict=True)]

    def run_engine():
        rollout, stats = jax.block_until_ready(engine.sample(params, batch, key, step, limit=lengths))
        return np.asarray(rollout.tokens[:, queries:]), np.asarray(rollout.logprobs), stats

    run_static(np.ones_like(lengths))  # compiles; the whole run is minutes long
    run_engine()
    seconds, results = environment.interleaved({'static': run_static, 'engine': run_engine}, repeats)
    (expected, logprobs), (got, got_logprobs, stats) = results['static'], results['engine']
    mask = np.arange(most) < lengths[:, None]
    same = np.mean([np.array_equal(a[m], b[m]) for a, b, m in zip(expected, got, mask, strict=True)])
    total = int(lengths.sum())
    print(
        f'\n{name}: {rows} rows of {prompts} prompts x {queries}, lengths mean {lengths.mean():.0f} max {most}'
        + (f', cache for {full_rows} full rows' if full_rows else '')
    )
    print(f'  static {seconds["static"]:8.2f} CPU-s  {total / seconds["static"]:7.0f} tokens/CPU-s')
    print(
        f'  engine {seconds["engine"]:8.2f} CPU-s  {total / seconds["engine"]:7.0f} tokens/CPU-s   '
        f'{seconds["static"] / seconds["engine"]:.2f} x static'
    )
    print(
        f'  rows with the same tokens {same:.1%}, largest difference of logprobs '
        f'{np.abs(np.where(mask, logprobs - got_logprobs, 0)).max():.1e}'
    )
    print(
        f'  steps {stats.steps} ({stats.steps / most:.3f} x longest), slot utilisation {stats.utilisation:.2f}, '
        f'decode batches {stats.decode_batches}, preempted {stats.preempted}, cache {stats.peak_bytes / 2**20:.0f} MiB'
        + (f' of {budget / 2**20:.0f}' if budget else '')
    )
    assert same == 1, 'the engine sampled other tokens than the static loop'
    assert not budget or stats.peak_bytes <= budget
    return seconds


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--only', default='')
    arguments = parser.parse_args()
    print(environment.describe())
    print(f'matrix rate {environment.matrix_rate() / 1e9:.0f} GFLOP per CPU-second, one thread, float32 1024 x 1024')
    cases = {
        'long-tailed': dict(
            prompts=16, group=8, queries=64, lengths=long_tailed(128, 200, 1024), full_rows=64, in_batches=False
        ),
        'equal': dict(prompts=8, group=8, queries=64, lengths=np.full(64, 128, np.int32)),
        'memory': dict(prompts=20, group=8, queries=64, lengths=long_tailed(160, 200, 1024), full_rows=16),
    }
    for name, case in cases.items():
        if arguments.only in name:
            compare(name, **case, repeats=arguments.repeats)


if __name__ == '__main__':
    main()
