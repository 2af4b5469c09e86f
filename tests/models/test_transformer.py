"""The decoder against itself: cache, padding, layers, chunks and remat change nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import attention, linear, transformer
from grpo_jax.models import cache as kv_cache

# whole functions, compiled once a shape and without optimizing: compiling is nearly all that these tests do
jit = functools.partial(
    jax.jit, compiler_options=dict(xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True)
)
forward = jit(transformer.forward, static_argnums=4, static_argnames='remat')
prefill = jit(transformer.prefill, static_argnums=4)
step = jit(transformer.decode, static_argnums=4)


@functools.partial(jit, static_argnums=3)
def logits(params, tokens, mask, c):
    """Logits f32[B, T, V] of whole rows, without a cache."""
    hidden = transformer.forward(params, tokens, transformer.positions_of(mask), mask, c)
    return transformer.unembed(params, hidden, c)


@pytest.fixture(scope='module')
def full(tiny):
    """(ModelConfig, params) with weights that tiny lacks, drawn from tiny's key."""
    c = dataclasses.replace(tiny[0], out_bias=True, mlp_bias=True, tie_embeddings=False)
    return c, transformer.init(jax.random.key(0), c)


def two_rows():
    """(tokens i32[2, 8], mask of ones)."""
    return jax.random.randint(jax.random.key(1), (2, 8), 0, 64), jnp.ones((2, 8), bool)


def prompts_and_completions():
    """(prompts i32[2, 8], mask with two columns of padding in the second row, completions i32[4, 6] of groups of 2)."""
    tokens, mask = two_rows()
    return tokens, mask.at[1, :2].set(False), jax.random.randint(jax.random.key(2), (4, 6), 0, 64)


def decode(params, c, prompts, mask, completions, chunks, *, block=1, dtype=jnp.float32, by_layer=False):
    """Logits f32[4, 6, V] by one column at a time over a cache that grows by chunks of the given columns."""
    if by_layer:
        layers = tuple(jax.tree.map(lambda w, i=i: w[i], params['layers']) for i in range(c.layers))
        params = {**params, 'layers': layers}

    def empty(rows, columns):
        return kv_cache.empty_chunk(c, rows, columns, block=block, dtype=dtype, by_layer=by_layer)

    k, v = prefill(params, prompts, transformer.positions_of(mask), mask, c)
    rows, lengths = len(completions), jnp.sum(mask, -1)
    bank = kv_cache.prompt_chunk(k, v, empty(*prompts.shape))
    cache = kv_cache.KVCache(
        prompt=bank,
        prompt_start=bank.columns - lengths,
        chunks=(empty(rows, chunks[0]),),
        start=jnp.zeros(rows, jnp.int32),
        length=jnp.int32(0),
    )
    positions = jnp.repeat(lengths, rows // len(prompts))
    out, ends = [], np.cumsum(chunks).tolist()
    for column in range(completions.shape[1]):
        if column in ends:
            cache = cache.replace(chunks=cache.chunks + (empty(rows, chunks[ends.index(column) + 1]),))
        hidden, cache = step(params, completions[:, column], positions + column, cache, c)
        out.append(transformer.unembed(params, hidden, c))
    return jnp.stack(out, 1)


def whole_rows(c, params):
    """Logits f32[4, 6, V] at the completions' columns, without a cache."""
    prompts, mask, completions = prompts_and_completions()
    rows = jnp.concatenate([jnp.repeat(prompts, 2, 0), completions], 1)
    row_mask = jnp.concatenate([jnp.repeat(mask, 2, 0), jnp.ones_like(completions, bool)], 1)
    return logits(params, rows, row_mask, c)[:, 8:]


@pytest.mark.parametrize(('chunks', 'block'), [([6], 1), ([6], 4), ([6], 8), ([1, 2, 3], 1), ([2, 4], 2), ([3, 3], 3)])
def test_decoding_with_a_cache_equals_the_forward_of_whole_rows(tiny, chunks, block):
    # blocks of 8 columns hold the prompt in one; of 3 there is a column of the bank that nothing fills
    c, params = tiny
    decoded = decode(params, c, *prompts_and_completions(), chunks, block=block)
    np.testing.assert_allclose(decoded, whole_rows(c, params), atol=1e-5)


@pytest.mark.parametrize(('chunks', 'block'), [([6], 1), ([6], 8), ([2, 4], 2)])
@pytest.mark.parametrize('name', ['tiny', 'windows'])
def test_layers_with_arrays_of_their_own_decode_the_same(tiny, name, chunks, block):
    c, params = tiny
    if name == 'windows':
        c = dataclasses.replace(c, windows=(5, 0), local_rope=(500.0, ()), attention_cap=5.0, unrotated=(1,))
    decoded = decode(params, c, *prompts_and_completions(), chunks, block=block, by_layer=True)
    np.testing.assert_allclose(decoded, whole_rows(c, params), atol=1e-5)


@pytest.mark.parametrize('by_layer', [False, True])
def test_an_int8_cache_is_close_to_the_float_one(tiny, by_layer):
    c, params = tiny
    decoded = decode(params, c, *prompts_and_completions(), [2, 4], block=2, dtype=jnp.int8, by_layer=by_layer)
    error = jnp.abs(decoded - whole_rows(c, params))
    assert 0 < jnp.max(error) < 0.05 and jnp.std(whole_rows(c, params)) > 0.5


def test_int8_weights_are_close_to_the_float_ones(full):
    c, params = full
    prompts, mask, _ = prompts_and_completions()
    rounded = linear.matrices_to_int8(params)
    exact, close = logits(params, prompts, mask, c)[mask], logits(rounded, prompts, mask, c)[mask]
    assert 0 < jnp.max(jnp.abs(close - exact)) < 0.2 and jnp.std(exact) > 0.5


@pytest.mark.parametrize('shape', [(5,), (2, 3, 8)])
def test_quantizing_moves_no_value_by_more_than_half_a_step(shape):
    x = jax.random.normal(jax.random.key(3), shape)
    values, scale = linear.to_int8(x, (-1,))
    assert values.dtype == jnp.int8 and scale.shape == (*shape[:-1], 1)
    assert jnp.all(jnp.abs(values * scale - x) <= scale * 0.5001)
    np.testing.assert_allclose(scale * 127, jnp.abs(x).max(-1, keepdims=True), rtol=1e-6)


def test_quantizing_zeros_gives_zeros():
    values, scale = linear.to_int8(jnp.zeros((2, 4)), (-1,))
    assert not np.any(values) and not np.any(scale)


def test_full_chunks_are_not_written_again(tiny):
    c, params = tiny
    full = jax.tree.map(lambda x: x + 7.0, kv_cache.empty_chunk(c, 4, 3, block=3, dtype=jnp.float32))
    fresh = kv_cache.empty_chunk(c, 4, 4, block=2, dtype=jnp.float32)
    cache = kv_cache.KVCache(
        prompt=kv_cache.empty_chunk(c, 4, 2, block=2, dtype=jnp.float32),
        prompt_start=jnp.full(4, 2),
        chunks=(full, fresh),
        start=jnp.zeros(4, jnp.int32),
        length=jnp.int32(3),
    )
    cache = step(params, jnp.ones(4, jnp.int32), jnp.full(4, 3), cache, c)[1]
    assert jnp.all(cache.chunks[0].k == 7) and jnp.all(cache.chunks[0].v == 7)
    # the new column is the last chunk's first; the others still wait
    k, v = cache.chunks[1].k, cache.chunks[1].v.swapaxes(-1, -2)
    for new in (k, v):
        assert jnp.all(jnp.any(new[:, 0, ..., 0] != 0, -1))
        assert jnp.all(new[:, 0, ..., 1:] == 0) and jnp.all(new[:, 1] == 0)
    assert cache.length == 4


def test_rows_of_a_group_read_their_own_prompt(tiny):
    c, params = tiny
    prompts, mask, completions = prompts_and_completions()
    swapped = decode(params, c, prompts[::-1], mask[::-1], completions[jnp.array([2, 3, 0, 1])], [6])
    straight = decode(params, c, prompts, mask, completions, [6])
    np.testing.assert_allclose(swapped[jnp.array([2, 3, 0, 1])], straight, atol=1e-5)
    assert jnp.max(jnp.abs(swapped - straight)) > 0.1  # else the prompts could not be told apart


@pytest.mark.parametrize(('left', 'right'), [(1, 0), (4, 0), (0, 4)])
def test_padding_changes_nothing_at_valid_positions(tiny, left, right):
    c, params = tiny
    tokens, valid = two_rows()
    # padding of random tokens: their identity must not leak either
    noise = jax.random.randint(jax.random.key(4), (2, left + right), 0, 64)
    padded = jnp.concatenate([noise[:, :left], tokens, noise[:, left:]], 1)
    mask = jnp.pad(valid, ((0, 0), (left, right)))
    np.testing.assert_allclose(
        logits(params, padded, mask, c)[:, left : left + 8], logits(params, tokens, valid, c), atol=1e-5
    )


def test_positions_count_valid_tokens_from_zero():
    mask = jnp.array([[0, 0, 1, 1], [1, 1, 1, 0]], bool)
    assert transformer.positions_of(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def test_a_later_token_changes_no_earlier_logits(tiny):
    c, params = tiny
    tokens, mask = two_rows()
    changed = (tokens.at[:, 5].add(1)) % 64
    change = jnp.abs(logits(params, changed, mask, c) - logits(params, tokens, mask, c)).max(-1)
    assert jnp.all(change[:, :5] == 0) and jnp.all(change[:, 5:] > 1e-4)


def test_only_differences_of_positions_matter(tiny):
    c, params = tiny
    tokens, mask = two_rows()
    positions = transformer.positions_of(mask)
    here, there, stretched = (forward(params, tokens, p, mask, c) for p in (positions, positions + 50, 2 * positions))
    np.testing.assert_allclose(there, here, atol=1e-4)
    assert jnp.max(jnp.abs(stretched - here)) > 1e-2


def test_the_scan_over_layers_equals_a_loop_over_blocks(tiny):
    c, params = tiny
    tokens, mask, _ = prompts_and_completions()
    positions = transformer.positions_of(mask)
    scanned, (keys, values) = forward(params, tokens, positions, mask, c), prefill(params, tokens, positions, mask, c)
    x, layers = params['embed'][tokens], []
    angles = attention.rope_angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)
    for index in range(c.layers):
        weights = {name: value[index] for name, value in params['layers'].items()}
        x, keys_values = transformer.block(
            weights, x, angles, c, lambda q, k, v: (attention.attend(q, k, v, mask), (k, v))
        )
        layers.append(keys_values)
    looped = transformer.rms_norm(x, params['final_norm'], c.norm_eps)
    np.testing.assert_allclose(jnp.where(mask[..., None], scanned - looped, 0), 0, atol=1e-5)
    for stacked, of_layers in zip((keys, values), zip(*layers, strict=True), strict=True):
        np.testing.assert_allclose(stacked.swapaxes(2, 3), jnp.stack(of_layers), atol=1e-5)


@functools.partial(jit, static_argnums=(1, 2))
def gradient(params, c, remat):
    tokens, mask, _ = prompts_and_completions()

    def loss(params):
        hidden = transformer.forward(params, tokens, transformer.positions_of(mask), mask, c, remat=remat)
        return jnp.sum(jnp.where(mask[..., None], hidden, 0) ** 3)

    return jax.grad(loss)(params)


@pytest.mark.parametrize('remat', ['dots', 'full'])
def test_remat_changes_no_gradient(tiny, remat):
    c, params = tiny
    plain, recomputed = gradient(params, c, 'none'), gradient(params, c, remat)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * scale), recomputed, plain)


def test_remat_recomputes_products_and_keeps_less(tiny):
    c, params = tiny
    traced = [gradient.trace(params, c, remat) for remat in ('none', 'dots', 'full')]
    none, dots, full = (str(program.jaxpr).count(' = dot_general[') for program in traced)
    assert none < dots < full
    none, dots, full = (program.lower().compile().memory_analysis().temp_size_in_bytes for program in traced)
    assert none > dots > full


def test_map_table_names_every_weight_by_its_path(tiny):
    table = transformer.param_table(tiny[0])
    paths = jax.tree.leaves(transformer.map_table(lambda path, _: path, table))
    assert sorted(paths) == [
        'embed',
        'final_norm',
        *(
            f'layers/{name}'
            for name in (
                'attn_norm',
                'k_norm',
                'mlp_norm',
                'q_norm',
                'w_down',
                'w_gate',
                'w_up',
                'wk',
                'wo',
                'wq',
                'wv',
            )
        ),
    ]


def test_the_table_counts_the_weights_of_a_model(tiny):
    # a layer: two norms 2*32, q and o 2*32*4*8, k and v 2*32*2*8, mlp 3*32*48, q and k norm 2*8
    layer = 64 + 2048 + 1024 + 4608 + 16
    counts = transformer.map_table(lambda _, param: np.prod(param.shape), transformer.param_table(tiny[0]))
    assert sum(jax.tree.leaves(counts)) == 64 * 32 + 2 * layer + 32 == 17600


def test_init_has_the_shapes_and_spreads_of_the_table(full):
    c, params = full

    def check(path, param):
        leaf = params
        for key in path.split('/'):
            leaf = leaf[key]
        assert leaf.shape == param.shape and len(param.axes) == len(param.shape) and leaf.dtype == jnp.float32, path
        # 512 values or more: the mean lies within 0.2 deviations of the offset, the deviation within 15 %
        assert abs(leaf.mean() - param.offset) <= 0.2 * param.scale, path
        assert abs(leaf.std() - param.scale) <= 0.15 * param.scale, path

    transformer.map_table(check, transformer.param_table(c))


def test_a_weight_at_init_does_not_depend_on_which_others_there_are(tiny, full):
    # tiny is drawn from the same key
    np.testing.assert_allclose(full[1]['layers']['w_up'], tiny[1]['layers']['w_up'], rtol=1e-6)
    assert jnp.max(jnp.abs(full[1]['layers']['w_up'] - full[1]['layers']['w_gate'])) > 0.1


def test_bfloat16_params_compute_in_bfloat16_and_give_float32_logits(tiny):
    c, params = tiny
    tokens, mask = two_rows()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def run(params):
        hidden = transformer.forward(params, tokens, transformer.positions_of(mask), mask, c)
        return hidden, transformer.unembed(params, hidden, c)

    hidden, scores = jax.eval_shape(run, half)
    assert (hidden.dtype, scores.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_row_without_any_allowed_key_stays_finite(tiny):
    c, params = tiny
    tokens, mask = two_rows()
    assert jnp.all(jnp.isfinite(logits(params, tokens, jnp.zeros_like(mask), c)))
