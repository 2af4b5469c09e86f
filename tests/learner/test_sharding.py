"""The same numbers on every mesh of 8 fake devices, with weights and moments really cut up."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from grpo_jax import algorithms
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.learner import Learning, Optimization, Optimizers, build_optimizer, partition
from grpo_jax.learner.programs import make_learner
from grpo_jax.models import linear, transformer
from grpo_jax.sampler import Sampling
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, specs, torus
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import Prompts

ALL = [
    (data, fsdp, context, 8 // (data * fsdp * context))
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    for context in (1, 2, 4, 8)
    if 8 % (data * fsdp * context) == 0
]
MESHES = [(2, 4, 1, 1), (1, 2, 2, 2)]
SHAPES = batches.Shapes(prompts=8, group_size=2, queries=6, tokens=10)
SAMPLING = Sampling(temperature=1.0, max_tokens=SHAPES.tokens, stop_tokens=(1, 2, 3, 4), pad_token=0)
MOMENTUM = optax.sgd(0.1, momentum=0.9)  # after one update its trace is the gradient itself


def make_mesh(shape):
    return meshes.make(dict(zip(meshes.AXES, shape, strict=True)))


def small_learner(c, mesh, *, shapes=SHAPES, minibatches=1, microbatches=2, attention='auto'):
    method = algorithms.make(default.get_config('dr_grpo').algorithm)
    learning = Learning(minibatches=minibatches, microbatches=microbatches, chunk=16, attention=attention)
    return make_learner(c, method, Optimizers(MOMENTUM), mesh, shapes, learning)


def learn(model, experience, shape, **options):
    """(state, metrics) after one update on a mesh of that shape."""
    c, params = model
    mesh = make_mesh(shape)
    learner = small_learner(c, mesh, **options)
    state = learner.initial(jax.device_put(params, specs.params(transformer.param_table(c), mesh)))
    on_policy = experience.replace(old_logprobs=None, ref_logprobs=None)
    return learner.update(state, batches.put_rows(on_policy, mesh), None)


def sample(model, shape):
    """A Rollout by a mesh of that shape."""
    c, params = model
    mesh = make_mesh(shape)
    rng = np.random.default_rng(0)
    mask = np.arange(6) >= 5 - np.arange(8)[:, None] % 6
    tokens = np.where(mask, rng.integers(2, 64, (8, 6)), 0).astype(np.int32)
    prompts = Prompts(tokens, mask, np.arange(8, dtype=np.int32))
    sampler = make_sampler(c, mesh, SHAPES, SAMPLING, {})
    params = jax.device_put(params, specs.params(transformer.param_table(c), mesh))
    return sampler(params, batches.put_rows(prompts, mesh), jax.random.key(0), 0)


@pytest.fixture(scope='module')
def model(tiny):
    """(ModelConfig, params) with heads for every size of the tensor axis."""
    c = dataclasses.replace(tiny[0], heads=16, kv_heads=8, qkv_bias=True, tie_embeddings=False)
    return c, jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), c)


@pytest.fixture(scope='module')
def learned_alone(model, wide_experience):
    return jax.device_get(learn(model, wide_experience, (1, 1, 1, 1)))


@pytest.fixture(scope='module', params=ALL, ids=str)
def shape(request):
    """A mesh of 8 devices; a few of them without --long."""
    if request.param not in MESHES and not request.config.getoption('--long'):
        pytest.skip('needs --long')
    return request.param


@pytest.fixture(scope='module')
def learned(shape, model, wide_experience):
    """(mesh shape, state, metrics)."""
    return shape, *learn(model, wide_experience, shape)


@pytest.fixture(scope='module')
def sampled_alone(model):
    return jax.device_get(sample(model, (1, 1, 1, 1)))


def test_loss_and_metrics_are_those_of_one_device(learned, learned_alone, assert_close):
    assert_close(learned[2], learned_alone[1], atol=1e-5)


def test_gradient_is_that_of_one_device(learned, learned_alone, assert_close):
    gradient, alone = (optax.tree_utils.tree_get(state.opt_state, 'trace') for state in (learned[1], learned_alone[0]))
    assert float(optax.tree.norm(alone)) > 0.01
    assert_close(gradient, alone, atol=1e-6)


def test_kernels_give_the_gradient_of_xla(model, wide_experience, learned_alone, assert_close):
    state, metrics = learn(model, wide_experience, (1, 2, 2, 2), attention='splash')
    assert_close(metrics, learned_alone[1], atol=1e-5)
    gradient, alone = (optax.tree_utils.tree_get(x.opt_state, 'trace') for x in (state, learned_alone[0]))
    assert_close(gradient, alone, atol=1e-6)


@pytest.mark.parametrize('shape', [(1, 2, 1, 1), *MESHES])
def test_what_remat_keeps_of_products_is_kept_on_a_mesh(model, shape):
    c, params = model
    mesh = make_mesh(shape)
    mesh_ops = partition.make_mesh_ops(c, mesh, Learning(attention='xla'))
    tokens = jnp.zeros((8, 16), jnp.int32)

    def products(remat):
        def loss(params):
            mask = jnp.ones(tokens.shape, bool)
            positions = transformer.positions_of(mask)
            return jnp.sum(transformer.forward(params, tokens, positions, mask, c, remat=remat, mesh_ops=mesh_ops))

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count(' = dot_general[')

    assert products('none') < products('dots') < products('full')


def test_kernels_are_refused_on_gpus():
    with pytest.raises(BadInput, match=r'learner\.attention.*choose auto'):
        partition._attend_by('splash', gpus_of('9.0'))


def test_gpus_attend_by_cudnn_where_it_is():
    assert [partition._attend_by('auto', gpus_of(kind)) for kind in ('7.5', '8.0', '10.3', 'gfx942')] == [
        'xla', 'cudnn', 'cudnn', 'xla',
    ]  # fmt: skip
    assert partition._attend_by('xla', gpus_of('9.0')) == 'xla'


def gpus_of(capability):
    """A mesh of one such GPU, as far as _attend_by reads it."""
    device = SimpleNamespace(platform='gpu', compute_capability=capability)
    return SimpleNamespace(devices=np.array([device]))


def test_parameters_and_moments_lie_in_shards(learned, model):
    shape, state, _ = learned
    sizes = dict(zip(meshes.AXES, shape, strict=True))

    def check(param, *arrays):
        cut = int(np.prod([sizes[axis] for axis in param.axes if axis], dtype=int))
        for array in arrays:
            assert {shard.data.size for shard in array.addressable_shards} == {array.size // cut}
            assert len(array.addressable_shards) == 8

    jax.tree.map(
        check,
        transformer.param_table(model[0]),
        state.params,
        optax.tree_utils.tree_get(state.opt_state, 'trace'),
        is_leaf=lambda node: isinstance(node, transformer.Param),
    )


def test_sampled_tokens_are_those_of_one_device(shape, model, sampled_alone):
    rollout = sample(model, shape)
    assert len(rollout.tokens.sharding.device_set) == 8
    np.testing.assert_array_equal(rollout.tokens, sampled_alone.tokens)
    np.testing.assert_array_equal(rollout.completion_mask, sampled_alone.completion_mask)
    np.testing.assert_allclose(rollout.logprobs, sampled_alone.logprobs, atol=1e-5)


def test_sampled_rows_end_at_different_places(sampled_alone):
    # or the comparison above would say little
    assert len(set(sampled_alone.completion_mask.sum(1).tolist())) > 2


def test_adamw_moments_and_reference_lie_like_the_parameters(tiny):
    c, mesh = tiny[0], make_mesh((2, 2, 1, 2))
    method = algorithms.make(default.get_config('grpo').algorithm)
    adamw = build_optimizer(Optimization.from_config(default.get_config().optimizer), 10)
    learner = make_learner(c, method, Optimizers(adamw), mesh, SHAPES, Learning())
    shardings = jax.tree.map(lambda x: x.sharding, learner.abstract_state)
    expected = specs.params(transformer.param_table(c), mesh)
    for name in ('mu', 'nu'):
        assert optax.tree_utils.tree_get(shardings.opt_state, name) == expected
    assert shardings.params == expected and shardings.ref_params == expected
    assert shardings.step == shardings.aux['bad_steps'] == specs.replicated(mesh)


def test_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(BadInput, match=r"^mesh = .*'data': 4.*: needs 16 devices and 8 are here; lower an axis"):
        make_mesh((4, 2, 1, 2))


def test_mesh_axis_below_one_is_refused():
    with pytest.raises(BadInput, match=r'^mesh\.fsdp = 0: must be a whole number at least 1'):
        make_mesh((1, 0, 1, 1))


@pytest.mark.parametrize(
    'sizes, message',
    [
        # 2 key heads do not split over 4; width 32 does not split over 3
        ((1, 1, 1, 4), r'^mesh.tensor = 4: does not divide layers/wk, shape \(2, 32, 2, 8\); lower it to 2'),
        ((1, 3, 1, 1), r'^mesh.fsdp = 3: does not divide embed, shape \(64, 32\); lower it to 2'),
    ],
)
def test_mesh_that_does_not_divide_a_parameter_is_refused(tiny, sizes, message):
    with pytest.raises(BadInput, match=message):
        specs.params(transformer.param_table(tiny[0]), make_mesh(sizes))


def test_prompts_that_do_not_divide_over_the_mesh_are_refused(model):
    with pytest.raises(
        BadInput, match=r'^data.prompts_per_step = 6: must be a multiple of .* = 4; choose 8, the next one'
    ):
        make_sampler(model[0], make_mesh((2, 2, 1, 1)), SHAPES._replace(prompts=6), SAMPLING, {})


def test_microbatches_that_do_not_divide_over_the_mesh_are_refused(model):
    with pytest.raises(
        BadInput, match=r'^rows of a microbatch = 4: must be a multiple of .* = 8; choose 8, the next one'
    ):
        small_learner(model[0], make_mesh((2, 4, 1, 1)), microbatches=4)


@pytest.mark.parametrize('minibatches, microbatches', [(3, 1), (16, 1), (1, 3), (8, 4)])
def test_cuts_that_do_not_divide_the_batch_are_refused(model, minibatches, microbatches):
    # 16 minibatches would halve groups
    if microbatches == 1:  # rows are packed
        message = f'learner.minibatches = {minibatches}: must divide the 8 prompts of a step; choose another number'
    else:
        message = (
            f'learner.minibatches, learner.microbatches = ({minibatches}, {microbatches}): minibatches must divide the '
            '8 prompts of a step, and minibatches x microbatches its 16 completions; choose other numbers'
        )
    with pytest.raises(BadInput, match=f'^{re.escape(message)}$'):
        small_learner(model[0], make_mesh((1, 1, 1, 1)), minibatches=minibatches, microbatches=microbatches)


@pytest.mark.parametrize('shape', [(2, 4, 1, 1), (1, 2, 2, 2), (2, 2, 1, 2), (1, 8, 1, 1)])
@pytest.mark.parametrize(
    'spec, axes', [('btd,dnh->btnh', ('fsdp', 'tensor', None)), ('btf,fd->btd', ('tensor', 'fsdp'))]
)
def test_gradients_of_cut_matrices_are_those_of_whole_ones(shape, spec, axes):
    """With sums that travel, as on TPUs, along whichever axis; x and dy come as a layer has them."""
    mesh = make_mesh(shape)
    along = torus.make_axis(mesh, 'fsdp')
    sizes = dict(b=16, t=8, d=16, f=24, n=8, h=3)
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal([sizes[i] for i in part]).astype(np.float32) for part in linear.axes_of(spec))

    def on_devices(function, in_specs, out_specs):
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    ops = partition._gather_scatter(on_devices, along._replace(platform='tpu'), *axes)
    part = jax.device_put(w, NamedSharding(mesh, PartitionSpec(*axes)))
    y, pulled = jax.vjp(jax.jit(lambda x, w: linear.matmul(spec, x, linear.FsdpMatrix(w, ops=ops))), x, part)
    whole, pulled_whole = jax.vjp(lambda x, w: jnp.einsum(spec, x, w), x, w)
    np.testing.assert_allclose(y, whole, rtol=1e-5, atol=1e-5)
    for own, reference in zip(pulled(jnp.asarray(dy)), pulled_whole(dy), strict=True):
        np.testing.assert_allclose(own, reference, rtol=1e-5, atol=1e-5)
