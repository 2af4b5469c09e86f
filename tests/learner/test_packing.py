"""Sequence packing: the same update and logprobs as of padded rows, with few padded tokens and fewer operations."""

import jax
import numpy as np
import optax
import pytest

from benchmarks.rollout import long_tailed
from grpo_jax import algorithms
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.learner import Learning, Optimizers, packing
from grpo_jax.learner.programs import make_learner
from grpo_jax.models import transformer
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.tools.preflight import flops

MOMENTUM = optax.sgd(0.1, momentum=0.9)  # after one update its trace is the gradient itself
SHAPES = batches.Shapes(prompts=8, group_size=2, queries=6, tokens=10)


def small_learner(c, preset, mesh, *, shapes=SHAPES, **options):
    method = algorithms.make(default.get_config(preset).algorithm)
    learning = Learning(**dict(chunk=16, pack_columns=0) | options)
    return make_learner(c, method, Optimizers(MOMENTUM), meshes.make(mesh), shapes, learning)


def learn(tiny, experience, preset, mesh, **options):
    """(parameters, gradient, metrics, logprobs) of an update."""
    c, params = tiny
    learner, mesh = small_learner(c, preset, mesh, **options), meshes.make(mesh)
    state = learner.initial(jax.device_put(params, specs.params(transformer.param_table(c), mesh)))
    experience = batches.put_rows(experience.replace(old_logprobs=None, ref_logprobs=None), mesh)
    packed = learner.pack(experience.rollout)
    logprobs = learner.logprobs(state, experience.rollout, packed)
    state, metrics = learner.update(state, experience.replace(**logprobs), packed)
    return jax.device_get((state.params, optax.tree_utils.tree_get(state.opt_state, 'trace'), metrics, logprobs))


# a reference and two updates; ratios of whole sequences; pairs, which no microbatch may part
@pytest.mark.parametrize(
    'preset, mesh, options',
    [
        ('grpo', {}, dict(minibatches=2, pack_columns=24, pack_rows=2)),
        ('grpo', {'fsdp': 2, 'context': 2}, dict(minibatches=2, pack_columns=-1)),
        ('gspo', {'data': 2, 'context': 2, 'tensor': 2}, dict(minibatches=2, pack_columns=64)),
        ('dpo', {}, dict(pack_columns=32)),
    ],
    ids=['grpo', 'chosen', 'gspo', 'dpo'],
)
def test_packed_rows_make_the_update_of_padded_ones(
    request, tiny, wide_experience, assert_close, preset, mesh, options
):
    if preset in ('dpo', 'gspo'):
        request.getfixturevalue('long')
    minibatches = options.get('minibatches', 1)
    # a group without a token, as one that was dropped
    rollout = wide_experience.rollout
    experience = wide_experience.replace(
        rollout=rollout.replace(completion_mask=rollout.completion_mask & (wide_experience.group_ids != 3)[:, None])
    )
    packed = learn(tiny, experience, preset, mesh, **options)
    padded = learn(tiny, experience, preset, {}, minibatches=minibatches)
    assert float(optax.tree.norm(padded[1])) > 0.001
    assert_close(packed, padded, atol=1e-5)


def masks_of(prompts, lengths, queries, most):
    """(prompt_mask, completion_mask) of prompt lengths [P] and completion lengths [B]."""
    group = len(lengths) // len(prompts)
    return (np.arange(queries) >= queries - np.repeat(prompts, group)[:, None], np.arange(most) < lengths[:, None])


@pytest.mark.filterwarnings('ignore:Error writing persistent compilation cache')
def test_options_that_a_compilation_cache_forbids_change_no_result(tiny, wide_experience, assert_close):
    """Tests run with such a cache, so this is where oneDNN's products are tested."""
    mesh, cache = meshes.make({}), jax.config.jax_compilation_cache_dir
    assert cache and not compiled.UNCACHED.items() & compiled.options_on(mesh).items()
    expected = learn(tiny, wide_experience, 'grpo', {}, pack_columns=64)
    try:
        jax.config.update('jax_compilation_cache_dir', None)
        if not compiled.UNCACHED.items() <= compiled.options_on(mesh).items():
            pytest.skip('this jaxlib has no oneDNN')
        assert_close(learn(tiny, wide_experience, 'grpo', {}, pack_columns=64), expected, atol=1e-5)
    finally:
        jax.config.update('jax_compilation_cache_dir', cache)


@pytest.mark.parametrize('seed', range(20))
def test_plan_holds_every_token_once_and_a_prompt_before_its_completions(seed):
    rng = np.random.default_rng(seed)
    group, queries, most, block = (int(rng.integers(*span)) for span in ((1, 6), (1, 20), (1, 40), (4, 9)))
    width, minibatches, prompts = queries + most, int(rng.integers(1, 3)), 8
    columns = -(-(queries + most * int(rng.integers(1, 4))) // block) * block
    sizes = packing.PackSizes(
        int(rng.integers(1, 4)), columns, block, group, queries, most, whole_groups=columns >= queries + group * most
    )
    masks = masks_of(rng.integers(1, queries + 1, prompts), rng.integers(0, most + 1, prompts * group), queries, most)
    packed = packing.pack(*masks, sizes, minibatches)
    assert packed.cells.shape == (minibatches, sizes.microbatches(prompts // minibatches), sizes.rows, columns)
    for part in range(minibatches):
        valid = np.concatenate(masks, 1).reshape(-1, minibatches, group, width)[:, part].reshape(-1, width)
        cells = packed.cells[part]
        assert (cells[packed.count[part] :] == -1).all() and (cells[: packed.count[part]] >= 0).any((1, 2)).all()
        used = cells[cells >= 0]
        assert valid.reshape(-1)[used].all()
        np.testing.assert_array_equal(
            np.sort(used[used % width >= queries]), np.flatnonzero(valid & (np.arange(width) >= queries))
        )
        for row in cells.reshape(-1, columns):
            _check_row(row, valid, queries, group, block)


def _check_row(row, valid, queries, group, block):
    """A group begins at a block, with its whole prompt; no completion stands elsewhere."""
    width, owner, seen = valid.shape[1], None, 0
    for column, cell in enumerate(row):
        if cell < 0:
            continue
        if cell % width < queries:
            goes_on = column and row[column - 1] == cell - 1
            assert goes_on or column % block == 0
            owner, seen = cell // width // group, seen + 1 if goes_on else 1
        assert cell // width // group == owner
        assert cell % width < queries or seen == valid[cell // width, :queries].sum()


@pytest.mark.parametrize(
    'sizes, share, whole_groups, platform, columns',
    [
        ((8, 8, 256, 1024), 16, False, 'tpu', 2304),  # a prompt and two completions
        ((8, 8, 256, 512), 16, False, 'tpu', 2304),  # and four
        ((8, 8, 256, 8192), 16, False, 'tpu', 8448),  # and one, already longer than needs be
        ((8, 8, 256, 8192), 16, True, 'tpu', 256 + 8 * 8192),
        ((8, 8, 256, 512), 2, False, 'tpu', 1280),  # all that a chip has
        ((32, 8, 8, 32), 256, False, 'cpu', 576),  # two groups of 264 tokens, each in blocks of 32
        ((2, 8, 128, 128), 16, False, 'cpu', 640),  # half a group; with 3 completions, 512, prompts come thrice
        ((8, 7, 256, 1024), 14, False, 'tpu', 2304),
        ((4, 4, 8, 12), 16, False, 'cpu', 256),  # the whole minibatch
        ((4, 1, 8, 12), 1, False, 'cpu', 32),
    ],
)
def test_columns_that_are_chosen(sizes, share, whole_groups, platform, columns):
    assert packing.choose_columns(batches.Shapes(*sizes), share, whole_groups, platform) == columns


@pytest.mark.parametrize(
    'options, columns', [({}, 0), (dict(pack_columns=-1), 256), (dict(pack_columns=-1, microbatches=2), 0)]
)
def test_rows_are_packed_unless_microbatches_are_asked_for(tiny, options, columns):
    learner = small_learner(tiny[0], 'dr_grpo', {}, **options)
    assert (learner.sizes.columns if learner.sizes else 0) == columns


def test_a_critic_s_padded_rows_are_cut_like_packed_ones():
    sizes = packing.PackSizes(4, 2304, 256, 8, 256, 1024, whole_groups=False)
    assert [packing.cut_padded(sizes, share) for share in (16, 6, 5, 1)] == [16, 6, 5, 1]
    assert [packing.cut_padded(sizes._replace(columns=4352), share) for share in (16, 6, 5, 1)] == [8, 2, 5, 1]


def test_less_than_a_tenth_is_padding_when_lengths_have_a_long_tail():
    rng = np.random.default_rng(0)
    lengths = long_tailed(256 * 8, 200, 1024)
    masks = masks_of(rng.integers(50, 257, 256), lengths, 256, 1024)
    sizes = packing.PackSizes(
        rows=4, columns=4096, block=64, group_size=8, queries=256, tokens=1024, whole_groups=False
    )
    packed = packing.pack(*masks, sizes, 1)
    computed = packed.count[0] * sizes.rows * sizes.columns
    assert np.concatenate(masks, 1).mean() < 0.3  # padded rows: most of it is padding
    assert (packed.cells >= 0).sum() > 0.9 * computed
    # prompts that are computed twice are few
    assert (packed.cells >= 0).sum() < 1.1 * (lengths.sum() + masks[0][::8].sum())


def test_shared_prompts_save_a_third_of_the_operations():
    c = transformer.ModelConfig(
        vocab_size=512,
        width=256,
        layers=4,
        heads=4,
        kv_heads=4,
        head_dim=64,
        mlp=1024,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=(),
        qk_norm=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tie_embeddings=True,
    )
    shapes = batches.Shapes(prompts=2, group_size=8, queries=128, tokens=128)
    padded, packed = (
        flops.count(
            small_learner(c, 'dr_grpo', {}, shapes=shapes, chunk=1024, **options).update.program.traced.jaxpr,
            trip_counts=(1,),
        )
        for options in ({}, dict(pack_columns=9 * 128, pack_rows=2))
    )
    assert not padded[1] and not packed[1]
    assert packed[0] < 0.65 * padded[0]


@pytest.mark.parametrize(
    'preset, options, message',
    [
        (
            'dr_grpo',
            dict(pack_columns=15),
            r'^learner.pack_columns = 15: is too short for a prompt of 6 tokens with a completion; choose 16 or',
        ),
        (
            'dpo',
            dict(pack_columns=24),
            r'^learner.pack_columns = 24: is too short for a prompt of 6 tokens with its group; choose 32 or',
        ),
        ('dr_grpo', dict(pack_columns=20), r'^learner.pack_columns = 20: must be a multiple of 8 .* raise it to 24'),
    ],
)
def test_sizes_that_cannot_work_are_refused(tiny, preset, options, message):
    with pytest.raises(BadInput, match=message):
        small_learner(tiny[0], preset, {}, **options)
