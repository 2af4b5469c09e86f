"""The kernel of decoding, interpreted, against XLA's form of it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import attention
from grpo_jax.models import cache as kv_cache
from grpo_jax.models.kernels import decode_kernel
from grpo_jax.tools.preflight import flops

B, HEADS, H, LAYERS, BLOCK = 8, 2, 16, 2, 16
MODEL = types.SimpleNamespace(layers=LAYERS, kv_heads=HEADS, head_dim=H)
START = np.array([0, 0, 3, 0, 20, 0, 0, 7])


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def cache_of(flat, length, chunks, prompts, dtype):
    """A KVCache with something everywhere: what may not be read would show."""

    def filled(seed, rows, columns, block):
        k, v = normal(seed, 2, LAYERS, rows, HEADS, columns, H)
        return kv_cache.prompt_chunk(
            k, v, kv_cache.empty_chunk(MODEL, rows, columns, block=block, dtype=dtype, flat=flat)
        )

    return kv_cache.KVCache(
        prompt=filled(0, prompts, 64, 32),
        prompt_start=jnp.asarray([33, 41, 64, 40][:prompts]),
        chunks=tuple(filled(i, B, n, BLOCK) for i, n in enumerate(chunks, 1)),
        start=jnp.minimum(START, length),
        length=jnp.int32(length),
    )


@pytest.mark.parametrize('prompts, fits', [(2, 8), (4, 1), (1, 2)])
@pytest.mark.parametrize(
    'chunks, length', [((64,), 0), ((64,), 15), ((64,), 16), ((64,), 63), ((32, 32), 33), ((32, 32, 64), 127)]
)
def test_same_attention_and_same_column_written(prompts, fits, chunks, length, monkeypatch):
    row = 2 * 2 * HEADS * H * 4 * (32 + BLOCK * len(chunks))
    monkeypatch.setattr(decode_kernel, 'MEMORY', fits * row)  # rows at once: of whole groups, or parts of one
    q, k, v = normal(7, B, 1, 6, H), normal(8, B, 1, HEADS, H), normal(9, B, 1, HEADS, H)
    angles = attention.rope_angles(jnp.arange(B)[:, None] * 7 + 3, H, 1e4, ())
    both = [cache_of(flat, length, chunks, prompts, jnp.float32) for flat in (False, True)]
    expected, written = jax.jit(kv_cache.append_and_attend)(q, k, v, angles, both[0], 1)
    out, flat = jax.jit(kv_cache.append_and_attend)(q, k, v, kv_cache.rope_factors(angles, HEADS), both[1], 1)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    for array, other in ((flat.k, written.k.transpose(0, 1, 2, 5, 3, 4)), (flat.v, written.v.swapaxes(3, 4))):
        np.testing.assert_allclose(array, other.reshape(array.shape), atol=1e-6)  # the new key is turned
    for old, new in ((both[1].chunks[-1].k, flat.k), (both[1].chunks[-1].v, flat.v)):
        assert np.sum(np.any(old != new, -1)) == B  # and nothing else is


def test_bfloat16_is_as_near_to_float32_as_before():
    q, k, v = normal(7, B, 1, 6, H), normal(8, B, 1, HEADS, H), normal(9, B, 1, HEADS, H)
    angles = attention.rope_angles(jnp.arange(B)[:, None], H, 1e4, ())

    def out(flat, dtype):
        factors = kv_cache.rope_factors(angles, HEADS) if flat else angles
        inputs = [x.astype(dtype) for x in (q, k, v)]
        cache = cache_of(flat, 40, (64,), 2, dtype)
        return jax.jit(kv_cache.append_and_attend)(*inputs, factors, cache, 0)[0].astype(jnp.float32)

    exact = out(False, jnp.float32)
    before, now = (np.abs(out(flat, jnp.bfloat16) - exact).max() for flat in (False, True))
    assert now < 1.5 * before < 0.05


def test_its_operations_are_those_it_tells():
    cache = cache_of(True, 40, (64,), 2, jnp.float32)
    angles = kv_cache.rope_factors(attention.rope_angles(jnp.zeros((B, 1), jnp.int32), H, 1e4, ()), HEADS)
    traced = jax.jit(kv_cache.append_and_attend).trace(
        normal(7, B, 1, 6, H), normal(8, B, 1, HEADS, H), normal(9, B, 1, HEADS, H), angles, cache, 1
    )
    lines = HEADS * 8  # of 3 queries a head, in whole tiles
    assert flops.count(traced.jaxpr) == (4 * B * lines * HEADS * H * (64 + 64), 0)
