"""Attention in kernels beside XLA's, interpreted: outputs and gradients, whatever rows, lengths, windows and caps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import attention
from grpo_jax.models.attention import PackedMask, Rule
from grpo_jax.models.kernels import splash


def draw(rng, b, t, n, kv_heads, h):
    """(queries, keys, values) of that shape."""
    return tuple(jnp.asarray(rng.normal(size=(b, t, heads, h)), jnp.float32) for heads in (n, kv_heads, kv_heads))


def padded(rng, b, t):
    """(visible of rows with padding on both sides, the queries that attend to anything)."""
    first, end = rng.integers(0, t // 2, (b, 1)), rng.integers(t // 2 + 1, t + 1, (b, 1))
    visible = jnp.asarray((np.arange(t) >= first) & (np.arange(t) < end))
    return visible, visible


def packed(rng, b, t, block=32, prompt=40, completion=70):
    """The same of rows of groups of 1 to 3 completions, with a PackedMask for visible."""
    part, positions = np.full((b, t), -1), np.zeros((b, t), int)
    start, length = np.zeros((2, b, t // block), int)
    for row in range(b):
        column, number = 0, 0
        while column + prompt + 3 * completion <= t:
            begin, size = column, int(rng.integers(1, prompt + 1))
            sizes = [size, *(int(n) for n in rng.integers(1, completion + 1, rng.integers(1, 4)))]
            for i, tokens in enumerate(sizes):
                part[row, column : column + tokens] = number + i if i else 0
                positions[row, column : column + tokens] = np.arange(tokens) + (size if i else 0)
                column += tokens
            number, column = number + len(sizes), column + -column % block
            start[row, begin // block : column // block], length[row, begin // block : column // block] = begin, size
    arrays = (jnp.asarray(x, jnp.int32) for x in (part, positions, start, length))
    return PackedMask(*arrays, block, prompt, completion), jnp.asarray(part >= 0)


def compare(rng, q, k, v, visible, some, rule):
    """Output and gradients by the kernel and by XLA must agree at queries that attend to anything."""
    grad = jnp.where(some[..., None, None], jnp.asarray(rng.normal(size=q.shape), jnp.float32), 0)

    @jax.jit
    def both(q, k, v, grad):
        def value(by, q, k, v):
            out = attention.attend(q, k, v, visible, rule._replace(by=by))
            return jnp.where(some[..., None, None], out, 0)

        pairs = [jax.vjp(lambda *x, by=by: value(by, *x), q, k, v) for by in ('xla', 'splash')]
        return [(out, pull(grad)) for out, pull in pairs]

    (out, gradients), (kernel_out, kernel_gradients) = both(q, k, v, grad)
    assert float(jnp.max(jnp.abs(out))) > 0.1
    np.testing.assert_allclose(kernel_out, out, atol=1e-5)
    for one, other in zip(kernel_gradients, gradients, strict=True):
        assert float(jnp.max(jnp.abs(other))) > 0.1
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize('rows', ['padded', 'packed'])
@pytest.mark.parametrize('window', [None, 50])
def test_cudnn_is_asked_for_what_xla_computes(rows, window, monkeypatch):
    asked, attention_of_jax = [], jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        asked.append(implementation)
        return attention_of_jax(*arrays, implementation='xla', **options)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', by_xla)
    monkeypatch.setattr(attention, 'CHUNK_ABOVE_PAIRS', 2**12)
    rng = np.random.default_rng(3)
    visible, some = padded(rng, 2, 256) if rows == 'padded' else packed(rng, 2, 256)
    arrays = [x.astype(jnp.bfloat16) for x in draw(rng, 2, 256, 4, 2, 16)]
    rule = Rule(0.3, window=None if window is None else jnp.int32(window))

    def weighted(by, *arrays):
        out = attention.attend(*arrays, visible, rule._replace(by=by))
        return jnp.sum(jnp.where(some[..., None, None], out, 0).astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.value_and_grad(weighted, (1, 2, 3)), static_argnums=0)
    ways = {by: gradient(by, *arrays) for by in ('xla', 'cudnn')}
    assert asked and {*asked} == {'cudnn'}
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=3e-2, atol=3e-2), *ways.values())


@pytest.mark.parametrize(
    ('dtype', 'size', 'columns', 'cap'),
    [('float32', 16, 256, 0), ('bfloat16', 12, 256, 0), ('bfloat16', 256, 256, 0), ('bfloat16', 16, 255, 0)]
    + [('bfloat16', 16, 256, 5.0)],
)
def test_what_cudnn_does_not_take_is_computed_by_xla(dtype, size, columns, cap):
    q, k, v = (x.astype(dtype) for x in draw(np.random.default_rng(4), 1, columns, 2, 1, size))
    visible, rule = jnp.ones((1, columns), bool), Rule(cap=cap)
    out, expected = (attention.attend(q, k, v, visible, rule._replace(by=by)) for by in ('cudnn', 'xla'))
    np.testing.assert_array_equal(out, expected)


def test_queries_of_later_columns_see_the_keys_of_all(monkeypatch):
    monkeypatch.setattr(splash, 'BLOCK', 128)
    rng = np.random.default_rng(1)
    q, k, v = draw(rng, 1, 256, 2, 1, 16)
    visible, rule = jnp.arange(256)[None] >= 30, Rule(window=jnp.int32(170))
    expected = attention.attend(q[:, 128:], k, v, visible, rule, 128)
    out = attention.attend(q[:, 128:], k, v, visible, rule._replace(by='splash'), 128)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_query_that_attends_to_nothing_has_output_zero():
    q, k, v = draw(np.random.default_rng(2), 1, 16, 1, 1, 16)
    visible = jnp.arange(16)[None] >= 10
    out = np.asarray(attention.attend(q, k, v, visible, Rule(by='splash')))
    assert np.all(out[:, :10] == 0) and np.all(out[:, 10] == np.asarray(v[:, 10]))


def test_blocks_without_a_pair_are_not_read():
    tiling = splash.Tiling(1.0, 0.0, 1, 1, queries=128, keys=128, steps=6)
    column = np.arange(384)
    # a prompt in columns 0 to 9, a completion up to 127, and another one from 128 on, which sees 0 to 9
    runs = np.stack([np.where(column < 128, 0, 128), column + 1, 0 * column, np.where(column < 128, 0, 10)])
    needed = splash._needed_blocks(jnp.asarray(runs[None]), tiling, 384)
    np.testing.assert_array_equal(needed[0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    alone = splash._needed_blocks(jnp.asarray(runs[None, :2]), tiling, 384)
    np.testing.assert_array_equal(alone[0], [[1, 0, 0], [0, 1, 0], [0, 1, 1]])
    # where nothing is to be done the block of the step before stays, or that of the first step with work is there
    np.testing.assert_array_equal(splash._blocks_to_read(alone)[0], [[0, 0, 0], [1, 1, 1], [1, 1, 2]])


def test_pairs_of_blocks_that_cost():
    assert splash._count_steps(1280, 1280, 256, 256, 0) == 1 + 2 + 3 + 4 + 5
    assert splash._count_steps(256, 1280, 128, 256, 0) == 5 + 5  # the last queries see all keys: blocks 0 to 4
    # 256 + 1024 columns and a block's 256 lie in 6 blocks, and each of two runs may begin within one
    assert splash._count_steps(4352, 4352, 256, 256, 1280) == sum(range(1, 9)) + 9 * 8


RULES = {
    "Llama's": Rule(),
    'a window and a cap': Rule(0.3, 5.0, jnp.int32(50)),
    'an endless window': Rule(window=jnp.int32(2**30)),
}
SHAPES = [(1, 256, 4, 2, 16), (2, 384, 7, 1, 64), (1, 900, 24, 2, 128), (2, 100, 3, 3, 96)]


@pytest.mark.parametrize('rows', ['padded', 'packed'])
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_attention_and_gradients_are_those_of_xla(rows, rule, shape, request, monkeypatch):
    if shape != SHAPES[0] or rule == 'an endless window':
        request.getfixturevalue('long')
    rng = np.random.default_rng(0)
    monkeypatch.setattr(splash, 'BLOCK', 128)
    if rows == 'padded':
        visible, some = padded(rng, *shape[:2])
    else:  # of groups that fit into the row
        sizes = dict(prompt=10, completion=20) if shape[1] < 256 else {}
        visible, some = packed(rng, shape[0], shape[1] // 32 * 32, **sizes)
    q, k, v = draw(rng, shape[0], some.shape[1], *shape[2:])
    compare(rng, q, k, v, visible, some, RULES[rule])
