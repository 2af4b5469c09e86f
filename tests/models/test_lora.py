"""Adapters: what they compute, how they begin, and which configs name some that cannot be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.models import lora, transformer
from grpo_jax.models.abstract import abstract_policy
from grpo_jax.models.linear import Adapted, Int8, matmul, to_float
from grpo_jax.models.lora import LoraOptions
from grpo_jax.run.settings import Settings
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import map_table


def adapted(tiny, options, seed=0, dtype='float32'):
    """The tiny policy with adapters of which both factors are noise."""
    c, params = tiny
    trained, _ = lora.split(lora.policy_table(c, options))
    noise = map_table(
        lambda path, param: 0.3 * jax.random.normal(jax.random.key(seed + len(path)), param.shape), trained
    )
    return lora.join(noise, lora.freeze(params, options, dtype))


def plain(policy):
    return {**policy, 'layers': lora.merge(policy['layers'])}


def hidden(c, params):
    tokens = jnp.arange(12).reshape(2, 6) * 5 % 64
    mask = jnp.arange(6) >= jnp.array([[0], [2]])
    return transformer.forward(params, tokens, transformer.positions_of(mask), mask, c)


def test_a_product_with_an_adapted_matrix_is_that_with_the_sum():
    # x = (1, 2), W = [[1, 0], [0, 1]], A = (3, 4), B = (5, 6): x W = (1, 2), x A = 11, scale x A B = 0.5 * (55, 66)
    w = Adapted(jnp.eye(2), jnp.array([[3.0], [4.0]]), jnp.array([[5.0, 6.0]]), 0.5)
    np.testing.assert_array_equal(matmul('bd,df->bf', jnp.array([[1.0, 2.0]]), w), [[28.5, 35.0]])


@pytest.mark.parametrize('targets', ['.*', 'w[qo]', 'w_down', 'w_(gate|up)|wv'])
def test_merged_weights_compute_what_adapters_do(tiny, targets):
    options = LoraOptions(rank=3, alpha=5.0, targets=targets)
    policy = adapted(tiny, options)
    with_adapters, merged, without = (hidden(tiny[0], x) for x in (policy, plain(policy), tiny[1]))
    np.testing.assert_allclose(with_adapters, merged, atol=1e-5)
    assert float(jnp.max(jnp.abs(with_adapters - without))) > 0.05


def test_a_product_with_an_int8_base_multiplies_its_scales():
    # W = [[1, -4], [2, 8]] * (0.5, 0.25) = [[0.5, -1], [1, 2]]: x W = (1, 2) W = (2.5, 3); adapters add 0.5 * (55, 66).
    # The gradient of the sum of x W is W (1, 1) = (-0.5, 3), and of the adapter's part 0.5 A (5 + 6) = (16.5, 22)
    base = Int8(jnp.array([[1, -4], [2, 8]], jnp.int8), jnp.array([[0.5, 0.25]]))
    w = Adapted(base, jnp.array([[3.0], [4.0]]), jnp.array([[5.0, 6.0]]), 0.5)
    x = jnp.array([[1.0, 2.0]])
    np.testing.assert_array_equal(matmul('bd,df->bf', x, w), [[30.0, 36.0]])
    np.testing.assert_array_equal(jax.grad(lambda x: matmul('bd,df->bf', x, w).sum())(x), [[16.0, 25.0]])


@pytest.mark.parametrize('targets', ['.*', 'w[qo]|w_up'])
def test_an_int8_base_is_what_its_numbers_stand_for(tiny, targets):
    c = tiny[0]
    options = LoraOptions(rank=3, alpha=5.0, targets=targets, base_dtype='int8')
    policy = adapted(tiny, options)
    np.testing.assert_allclose(hidden(c, policy), hidden(c, plain(policy)), atol=1e-5)
    exact = adapted(tiny, options._replace(base_dtype=''))
    error = jnp.abs(hidden(c, policy) - hidden(c, exact))
    assert 1e-4 < jnp.max(error) < 0.1 < jnp.std(hidden(c, exact))
    # of a column, the scale is its largest number over 127, and no number is off by more than half of it
    base, whole = policy['layers']['wo'].base, tiny[1]['layers']['wo']
    scale = jnp.max(jnp.abs(whole), (1, 2), keepdims=True) / 127
    np.testing.assert_allclose(base.scale, scale, rtol=1e-6)
    assert jnp.all(jnp.abs(to_float(base) - whole) <= 0.501 * scale)


def test_parameters_with_an_int8_base_are_the_announced_ones(tiny):
    options = LoraOptions(rank=2, base_dtype='int8')
    policy = adapted(tiny, options, dtype='bfloat16')
    announced = abstract_policy(tiny[0], options, 'bfloat16', meshes.make({}))
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype.name), (policy, announced))
    assert kinds[0] == kinds[1]
    assert {x.dtype.name for x in jax.tree.leaves(lora.split(policy)[1])} == {'bfloat16', 'int8', 'float32'}


def test_the_scale_is_alpha_over_the_rank_or_over_its_root():
    assert LoraOptions(rank=4, alpha=8.0).scale == 2
    assert LoraOptions(rank=4, alpha=8.0, rslora=True).scale == 4


def test_new_adapters_change_nothing_and_are_drawn_as_peft_draws_them(tiny):
    c, params = tiny
    options = LoraOptions(rank=8)
    trained = jax.jit(lora.init, static_argnums=(1, 2))(jax.random.key(1), c, options)
    policy = lora.join(trained, lora.freeze(params, options, 'float32'))
    jax.tree.map(np.testing.assert_array_equal, plain(policy), params)
    assert not any(factors['b'].any() for factors in trained['layers'].values())
    # uniform in +-1 / sqrt(inputs): 32 of wq, 4 heads of 8 of wo, 48 of w_down; its deviation is that over sqrt(3)
    for name, inputs in {'wq': 32, 'wo': 32, 'w_down': 48}.items():
        a = np.asarray(trained['layers'][name]['a'])
        assert inputs**-0.5 * 0.97 < np.abs(a).max() <= inputs**-0.5, name
        assert np.std(a) == pytest.approx((3 * inputs) ** -0.5, rel=0.1), name


def test_what_is_split_is_joined_again_and_plain_parameters_are_left_alone(tiny):
    policy = adapted(tiny, LoraOptions(rank=2, targets='wq|w_up'))
    trained, frozen = lora.split(policy)
    assert {name: [*factors] for name, factors in trained['layers'].items()} == {'wq': ['a', 'b'], 'w_up': ['a', 'b']}
    assert jax.tree.structure(lora.join(trained, frozen)) == jax.tree.structure(policy)
    jax.tree.map(np.testing.assert_array_equal, lora.join(trained, frozen), policy)
    assert lora.split(tiny[1]) == (tiny[1], None)
    assert lora.join(tiny[1], None) is tiny[1]
    assert lora.policy_table(tiny[0]) == transformer.param_table(tiny[0])


def test_the_table_has_peft_s_sizes_and_cuts_factors_like_their_matrix(tiny):
    layers = lora.policy_table(tiny[0], LoraOptions(rank=3))['layers']
    assert isinstance(layers['attn_norm'], transformer.Param)
    assert (layers['wq'].a.shape, layers['wq'].b.shape) == ((2, 32, 3), (2, 3, 4, 8))
    assert (layers['wq'].a.axes, layers['wq'].b.axes) == ((None, 'fsdp', None), (None, None, 'tensor', None))
    assert (layers['wo'].a.shape, layers['wo'].b.shape) == ((2, 4, 8, 3), (2, 3, 32))
    assert (layers['wo'].a.axes, layers['wo'].b.axes) == ((None, 'tensor', None, None), (None, None, 'fsdp'))


def inspect(policy, weights, dtype='float32'):
    """(checksum, share, due) of weights, merged or not, that a sampler in that dtype would have."""

    def as_sampled(layers):
        return jax.tree.map(lambda w: w.astype(dtype), layers)

    inspection = lora.inspect(as_sampled(weights['layers']), policy['layers'], as_sampled)
    return int(inspection.checksum), float(inspection.share), float(inspection.due)


def test_an_inspection_counts_what_adapters_have_changed(tiny):
    policy = adapted(tiny, LoraOptions(rank=2, targets='wq'))
    trained, frozen = lora.split(policy)
    checksum, share, due = inspect(policy, plain(policy))
    assert share == due == pytest.approx(1, abs=0.01)
    # of wq [2, 32, 4, 8], the first of two layers has an adapter that is not 0
    factors = trained['layers']['wq']
    half = lora.join({'layers': {'wq': factors | {'b': factors['b'].at[1].set(0)}}}, frozen)
    other, share, due = inspect(half, plain(half))
    assert share == due == pytest.approx(0.5, abs=0.01) and other != checksum
    base, share, due = inspect(policy, tiny[1])  # the sampler has the frozen weights
    assert share == 0 and due > 0.9 and base not in (checksum, other)
    none = lora.join({'layers': {'wq': factors | {'b': 0 * factors['b']}}}, frozen)
    assert inspect(none, plain(none)) == (base, 0, 0)


def test_an_inspection_of_more_layers_takes_no_more_memory():
    def temporaries(layers, width=64):
        base, a, b = (
            jax.ShapeDtypeStruct((layers, *shape), dtype)
            for shape, dtype in (((width, width), 'float16'), ((width, 4), 'float32'), ((4, width), 'float32'))
        )
        weights = tuple({'w': jax.ShapeDtypeStruct((width, width), 'float16')} for _ in range(layers))
        read = jax.jit(lambda weights, adapted: lora.inspect(weights, adapted, lambda layer: layer))
        compiled = read.lower(weights, {'w': lora.Adapted(base, a, b, 2.0)}).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(16) < 1.1 * temporaries(2)


def test_an_inspection_knows_what_rounding_takes_away(tiny):
    # changes of some 1e-5 of weights of some 0.2, of which bfloat16 has 8 bits
    policy = adapted(tiny, LoraOptions(rank=2, alpha=1e-4, targets='wq'), dtype='bfloat16')
    _, share, due = inspect(policy, plain(policy), 'bfloat16')
    assert 0 < share == due < 0.1


def test_bfloat16_weights_are_merged_before_they_are_rounded(tiny):
    policy = adapted(tiny, LoraOptions(rank=2, targets='wk'), dtype='bfloat16')
    assert policy['layers']['wk'].base.dtype == policy['layers']['wq'].dtype == jnp.bfloat16
    assert policy['layers']['wk'].a.dtype == jnp.float32
    merged, w = lora.merge(policy['layers'])['wk'], jax.device_get(policy['layers']['wk'])
    expected = w.base.astype(np.float64) + w.scale * np.einsum('ldr,lrkh->ldkh', w.a, w.b, dtype=np.float64)
    np.testing.assert_allclose(merged, expected, atol=1e-5)


@pytest.mark.parametrize(
    'key, value, message',
    [
        ('targets', 'wq|(', 'is no regular expression'),
        ('targets', 'q_proj', "target_modules=q_proj is model.lora.targets='wq' here"),
        ('targets', 'embed|lm_head|.*norm', 'must match one of'),
        ('rank', -1, 'at least 0'),
        ('rank', 10**6, 'at most 4096'),
        ('rank', 1.5, 'a whole number'),
        ('alpha', 0.0, 'above 0'),
        ('alpha', math.nan, 'finite'),
        ('rslora', 1, 'True or False'),
        ('path', 'runs/adapter', 'is not read with model.lora.rank = 0'),
    ],
)
def test_adapters_that_cannot_be_are_refused(key, value, message):
    config = default.get_config()
    with config.ignore_type():
        config.model.lora[key] = value
    with pytest.raises(BadInput, match=f'model.lora.{key}.*{message}'):
        Settings.from_config(config)
