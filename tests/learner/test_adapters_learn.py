"""Adapters in learner and sampler: they alone learn, whatever the cut, the rows and the mesh, and both agree."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import algorithms
from grpo_jax.configs import default
from grpo_jax.learner import Learning, Optimization, Optimizers, build_optimizer
from grpo_jax.learner.programs import make_learner
from grpo_jax.models import lora, transformer
from grpo_jax.models.linear import Adapted, to_float
from grpo_jax.models.lora import LoraOptions
from grpo_jax.run.measure import sampler_metrics
from grpo_jax.sampler import Sampling
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import Prompts, map_table
from tests import small_model

OPTIONS = LoraOptions(rank=4, alpha=8.0)
INT8 = OPTIONS._replace(base_dtype='int8')
SHAPES = batches.Shapes(prompts=8, group_size=2, queries=6, tokens=10)
SAMPLING = Sampling(temperature=1.0, max_tokens=10, stop_tokens=(1, 2, 3, 4), pad_token=0)
SGD = optax.sgd(100.0)  # gradients are some 1e-4
ALONE, CUT = (1, 1, 1, 1), (2, 2, 1, 2)  # devices along data, fsdp, context, tensor


@pytest.fixture(scope='module')
def model(tiny):
    """(ModelConfig, params) with heads for every size of the tensor axis."""
    c = dataclasses.replace(tiny[0], heads=8, kv_heads=4)
    return c, jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), c)


@pytest.fixture(scope='module')
def policy(model):
    """The model with adapters, neither of whose factors is 0."""
    c, params = model
    trained = map_table(
        lambda path, param: 0.1 * jax.random.normal(jax.random.key(len(path) + ord(path[-1])), param.shape),
        lora.split(lora.policy_table(c, OPTIONS))[0],
    )
    return c, lora.join(trained, lora.freeze(params, OPTIONS, 'float32'))


def make_mesh(shape):
    return meshes.make(dict(zip(meshes.AXES, shape, strict=True)))


def put(params, c, options, mesh):
    """A copy of the parameters on the mesh: an update takes the memory of what it is given."""
    return jax.tree.map(jnp.copy, jax.device_put(params, specs.params(lora.policy_table(c, options), mesh)))


def learner_of(c, shape=ALONE, *, options=OPTIONS, optimizer=SGD, preset='dr_grpo', **learning):
    learning = Learning(chunk=16, lora=options, **learning)
    method = algorithms.make(default.get_config(preset).algorithm)
    return make_learner(c, method, Optimizers(optimizer), make_mesh(shape), SHAPES, learning)


def learn(policy, experience, shape=ALONE, **settings):
    """(state before, state after, metrics), on the host, of one update."""
    c, params = policy
    learner, mesh = learner_of(c, shape, **settings), make_mesh(shape)
    options = settings.get('options', OPTIONS)
    params = put(params, c, options, mesh)
    on_policy = batches.put_rows(experience.replace(old_logprobs=None, ref_logprobs=None), mesh)
    state = learner.initial(params)
    before = jax.tree.map(np.array, state)
    state, metrics = learner.update(state, on_policy, learner.pack(on_policy.rollout))
    return before, *jax.device_get((state, metrics))


@pytest.fixture(scope='module')
def learned(policy, wide_experience):
    return learn(policy, wide_experience)


def test_an_adapter_s_gradient_is_that_of_the_merged_weight_through_the_other_factor(learned, policy, wide_experience):
    # W + s A B: dA = s dW B', dB = s A' dW, and an update by SGD moves each by -100 times it
    before, after, _ = learned
    c, params = policy
    merged = c, {**params, 'layers': lora.merge(params['layers'])}
    whole_before, whole_after, _ = learn(merged, wide_experience, options=lora.OFF)
    for name, (axes, b_axes) in {'wq': ('ldnh', 'lrnh'), 'wo': ('lnhd', 'lrd'), 'w_down': ('lfd', 'lrd')}.items():
        old, new = before.params['layers'][name], after.params['layers'][name]
        dw = whole_after.params['layers'][name] - whole_before.params['layers'][name]
        a_axes = 'l' + ''.join(axis for axis in axes[1:] if axis not in b_axes) + 'r'
        expected_a = 2.0 * np.einsum(f'{axes},{b_axes}->{a_axes}', dw, old.b)
        expected_b = 2.0 * np.einsum(f'{a_axes},{axes}->{b_axes}', old.a, dw)
        assert np.abs(expected_a).max() > 1e-3
        np.testing.assert_allclose(new.a - old.a, expected_a, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(new.b - old.b, expected_b, atol=2e-5, err_msg=name)


def test_what_is_frozen_stays_bit_for_bit_and_has_no_moments(policy, wide_experience):
    adam = build_optimizer(Optimization(learning_rate=0.1, weight_decay=0.1), 10)
    before, after, metrics = learn(policy, wide_experience, optimizer=adam)
    trained, frozen = lora.split(after.params)
    jax.tree.map(np.testing.assert_array_equal, frozen, lora.split(before.params)[1])
    moved = jax.tree.map(lambda a, b: (a != b).any(), trained, lora.split(before.params)[0])
    assert all(jax.tree.leaves(moved))
    moments = [x.shape for x in jax.tree.leaves(after.opt_state) if x.ndim]
    assert sorted(moments) == sorted(2 * [x.shape for x in jax.tree.leaves(trained)])
    assert {name for name in metrics if name.startswith('gradient_norm')} == {
        'gradient_norm/attention',
        'gradient_norm/mlp',
    }


def test_no_gradient_of_a_frozen_matrix_is_computed(policy):
    c = policy[0]
    matrices = {tuple(sorted(param.shape[1:])) for param in transformer.param_table(c)['layers'].values()}
    matrices = {shape for shape in matrices if len(shape) > 1} | {(c.width, c.vocab_size)}

    def products(options):
        text = str(learner_of(c, options=options).update.program.traced.jaxpr)
        shapes = re.findall(r':f32\[([0-9,]+)\] = dot_general', text)
        return {tuple(sorted(map(int, shape.split(',')))) for shape in shapes}

    assert products(lora.OFF) >= matrices
    assert not products(OPTIONS) & matrices


def test_without_a_rank_the_programs_are_the_same_texts(policy):
    plain, named = (
        learner_of(policy[0], options=options).update.program.traced.lower().as_text()
        for options in (lora.OFF, LoraOptions(rank=0, alpha=3.0, targets='wq'))
    )
    assert plain == named


@pytest.mark.parametrize('settings', [dict(microbatches=4, remat='full'), dict(pack_columns=64, pack_rows=2)], ids=str)
def test_the_cut_changes_nothing(request, learned, policy, wide_experience, assert_close, settings):
    if 'remat' in settings:
        request.getfixturevalue('long')
    _, after, _ = learn(policy, wide_experience, **settings)
    assert_close(lora.split(after.params)[0], lora.split(learned[1].params)[0], atol=2e-5)


def test_adapters_on_8_devices_learn_as_on_one(learned, policy, wide_experience, assert_close):
    _, after, metrics = learn(policy, wide_experience, CUT, microbatches=2)
    assert_close(after.params, learned[1].params, atol=2e-5)
    assert_close(metrics, learned[2], atol=1e-5)


def rollout_of(policy, shape, dtype='float32', options=OPTIONS):
    c, params = policy
    mesh, rng = make_mesh(shape), np.random.default_rng(0)
    mask = np.arange(6) >= 5 - np.arange(8)[:, None] % 6
    tokens = np.where(mask, rng.integers(2, 64, (8, 6)), 0).astype(np.int32)
    prompts = Prompts(tokens, mask, np.arange(8, dtype=np.int32))
    sampler = make_sampler(c, mesh, SHAPES, SAMPLING._replace(lora=options, dtype=dtype), {})
    params = put(params, c, options, mesh)
    rollout, stats = sampler.sample(params, batches.put_rows(prompts, mesh), jax.random.key(0), 0)
    return rollout, params, stats


def gap(policy, rollout, params, shape=ALONE, options=OPTIONS):
    """The most by which logprobs of the sampler and of the learner differ."""
    learner = learner_of(policy[0], shape, options=options, preset='grpo', minibatches=2)  # which needs old logprobs
    logprobs = learner.logprobs(learner.initial(params), rollout, learner.pack(rollout))['old_logprobs']
    return float(np.max(np.abs(np.asarray(logprobs) - rollout.logprobs) * rollout.loss_mask))


@pytest.mark.parametrize('shape', [ALONE, CUT], ids=str)
def test_sampler_and_learner_agree(request, policy, shape):
    if shape == CUT:
        request.getfixturevalue('long')
    rollout, params, stats = rollout_of(policy, shape)
    assert gap(policy, rollout, params, shape) < 1e-4
    row = sampler_metrics(stats)
    assert row['sampler/merged_share'] == pytest.approx(1, abs=0.01) and row['sampler/checksum'] > 0


# a frozen base in int8


@pytest.fixture(scope='module')
def int8_policy(model, policy):
    """The policy with its base in int8."""
    c, params = model
    return c, lora.join(lora.split(policy[1])[0], lora.freeze(params, INT8, 'float32'))


def dequantized(params):
    """The same policy with its base in float32."""
    layers = {
        name: w.replace(base=to_float(w.base)) if isinstance(w, Adapted) else w for name, w in params['layers'].items()
    }
    return {**params, 'layers': layers}


@pytest.mark.parametrize('shape', [ALONE, CUT], ids=str)
def test_sampler_and_learner_agree_on_a_base_in_int8(request, int8_policy, shape):
    if shape == CUT:
        request.getfixturevalue('long')
    rollout, params, stats = rollout_of(int8_policy, shape, options=INT8)
    assert gap(int8_policy, rollout, params, shape, options=INT8) < 1e-4
    assert sampler_metrics(stats)['sampler/merged_share'] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize('settings', [{}, dict(pack_columns=64, pack_rows=2), dict(remat='full')], ids=str)
def test_adapters_learn_beside_int8_what_they_learn_beside_its_floats(
    request, int8_policy, wide_experience, assert_close, settings
):
    if settings:
        request.getfixturevalue('long')
    c, params = int8_policy
    before, after, metrics = learn(int8_policy, wide_experience, options=INT8, **settings)
    _, expected, expected_metrics = learn((c, dequantized(params)), wide_experience, **settings)
    trained, frozen = lora.split(after.params)
    jax.tree.map(np.testing.assert_array_equal, frozen, lora.split(before.params)[1])
    assert_close(trained, lora.split(expected.params)[0])
    assert metrics['loss'] == pytest.approx(float(expected_metrics['loss']), abs=1e-6)


def test_a_base_in_int8_takes_a_quarter_and_is_never_whole_as_floats(policy):
    c = dataclasses.replace(policy[0], width=256, mlp=512, layers=8)

    def used(options):
        learner = learner_of(c, options=options, microbatches=4)
        base = [w.base for w in learner.abstract_state.params['layers'].values() if isinstance(w, Adapted)]
        memory = learner.update.program.compile().memory
        bases = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(base))
        return memory.argument_size_in_bytes, memory.temp_size_in_bytes, bases

    arguments, temporary, floats = used(OPTIONS)
    fewer_arguments, as_int8_temporary, integers = used(INT8)
    assert integers == pytest.approx(floats / 4, rel=0.02)
    assert arguments - fewer_arguments == pytest.approx(floats - integers, rel=0.01)
    assert as_int8_temporary - temporary < floats / 3  # the layer at hand is, of eight


def test_a_sampler_that_does_not_merge_is_found_out(policy, monkeypatch):
    monkeypatch.setattr(lora, 'merge', small_model.without_adapters)
    policy = dataclasses.replace(policy[0], norm_eps=2e-6), policy[1]  # of which no other test has traced the programs
    rollout, params, stats = rollout_of(policy, ALONE)
    assert gap(policy, rollout, params) > 0.05
    with pytest.raises(RuntimeError, match='they were not merged'):
        sampler_metrics(stats)


def test_the_reference_takes_no_second_base(policy):
    c = dataclasses.replace(policy[0], width=256, mlp=512)

    def memory(preset, options=OPTIONS):
        learner = learner_of(c, options=options, preset=preset, minibatches=2, microbatches=4)
        adapters, frozen = (
            sum(4 * x.size for x in jax.tree.leaves(x)) for x in lora.split(learner.abstract_state.params)
        )
        used = learner.update.program.compile().memory
        return used.argument_size_in_bytes, used.temp_size_in_bytes, learner.abstract_state.ref_params, adapters, frozen

    arguments, temporary, reference, adapters, base = memory('deepseek_r1')
    assert jax.tree.structure(reference) == jax.tree.structure(lora.split(policy[1])[0])
    # weights, adapters with their moments and their reference, and the batch; never what is as large as the base
    assert base < arguments < base + 4 * adapters + 20_000 < 1.6 * base
    assert temporary < memory('deepseek_r1', lora.OFF)[1] - base  # which has a gradient of all
    fewer_arguments, fewer, none, *_ = memory('dr_grpo')
    assert none is None
    assert arguments - fewer_arguments + temporary - fewer < 2 * adapters < 0.3 * base
