"""A step from rewards to the gradient in logprobs, for every preset, against plain numpy in float64 (plain.py)."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import corrections, kl, pieces, ratios, regularizers, selections, surrogates, weights
from grpo_jax.configs import algorithms as presets
from grpo_jax.configs import default
from grpo_jax.learner import critic
from grpo_jax.learner.experience import drop_truncated, make_experience
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import HeadOutput, Rollout, TrainState
from tests.learner import batches, plain

METHODS = plain.METHODS | plain.OTHERS
ALL = batches.RANDOM | batches.EDGES
FEW = {name: ALL[name] for name in ['random 0', 'random 1', 'random 2', *list(batches.EDGES)[-5:]]}
MESH = meshes.make({'data': 1, 'fsdp': 1, 'context': 1, 'tensor': 1})
NEAR = 1e-5  # of the largest number beside it
EXPERIENCES = {}


@functools.cache
def algorithm_of(name):
    config = default.get_config(plain.ORIGINS.get(name, name))
    if config.collection.source == 'demonstrations':
        config.collection.source = 'policy'
    config.algorithm.update(METHODS[name].changes)
    return algorithms.make(config.algorithm, config.collection)


@functools.cache
def sampled(label):
    """(Rollout, logprobs by name) of a batch."""
    batch, array = ALL[label], functools.partial(jnp.asarray, dtype=jnp.float32)
    rows, columns = batch.tokens.shape
    rollout = Rollout(
        tokens=jnp.asarray(np.concatenate([np.zeros((rows, 1)), batch.tokens], 1), jnp.int32),
        prompt_mask=jnp.ones((rows, 1), bool),
        completion_mask=jnp.asarray(batch.completion),
        forced=jnp.asarray(batch.forced),
        logprobs=array(batch.sampler),
        truncated=jnp.asarray(batch.completion[:, -1]),
        version=jnp.zeros((rows, columns), jnp.int32),
    )
    names = dict(old_logprobs='old', ref_logprobs='ref', old_entropy='entropy', values='values')
    names |= dict(teacher_logprobs='teacher', new='new')
    return rollout, {name: array(getattr(batch, field)) for name, field in names.items()}


def experience_of(algorithm, label):
    """The Experience of a batch; presets that differ in their losses alone share it."""
    in_reward = algorithm.kl_placement != 'loss' and algorithm.kl_coef
    settings = algorithm.advantage, algorithm.dead_groups, algorithm.gate, in_reward, algorithm.needs_teacher
    key = label, algorithm.kl_placement, repr(settings)  # two partials of one function are not equal, but look it
    if key not in EXPERIENCES:
        EXPERIENCES[key] = _make_experience(algorithm, label)
    return EXPERIENCES[key]


def _make_experience(algorithm, label):
    batch, (rollout, logprobs) = ALL[label], sampled(label)
    known = ['old_logprobs', 'ref_logprobs', 'old_entropy']
    known += ['values'] * algorithm.needs_values + ['teacher_logprobs'] * algorithm.needs_teacher
    aux = {'coefficients': algorithm.coefficients, 'initial_entropy': np.float32(batch.initial_entropy)}
    inputs = dict(
        dead=algorithms.judge_groups(algorithm.gate, batch.rewards, batch.correct),
        correct=batch.correct,
        step_rewards=batch.by_group(batch.steps),
        run_baseline=batch.run_baseline,
        prompt_baselines=batch.prompt_baselines,
    )
    state, logprobs = TrainState(0, {}, None, None, aux), {name: logprobs[name] for name in known}
    return make_experience(algorithm, state, rollout, logprobs, batch.rewards, inputs, MESH)[0]


@functools.partial(jax.jit, static_argnums=0)
def step_of(algorithm, new, entropy, experience):
    """(loss, gradient [B, C], metrics by name) of the package."""
    (loss, metrics), gradient = jax.value_and_grad(
        lambda x: algorithms.policy_loss(algorithm, x, experience, entropy), has_aux=True
    )(new)
    return loss, gradient, metrics | algorithms.pooled_metrics(algorithm, HeadOutput(new, entropy), experience)


def assert_near(found, expected, scale, *where):
    assert np.all(np.abs(np.asarray(found, float) - expected) <= NEAR * scale), (*where, found, expected)


@pytest.mark.parametrize('name', METHODS)
def test_a_step_is_that_of_plain_numpy(name):
    method, algorithm = METHODS[name], algorithm_of(name)
    for label, batch in (ALL if name in plain.METHODS else FEW).items():
        experience, x = experience_of(algorithm, label), plain.constants(method, batch)
        mask = np.asarray(experience.loss_mask)
        np.testing.assert_array_equal(mask, x.mask, label)
        found, expected = (np.broadcast_to(a, mask.shape)[mask] for a in (experience.advantages, x.a))
        assert_near(found, expected, np.abs(expected).max(initial=0), label, 'advantages')
        logprobs = sampled(label)[1]
        loss, gradient, metrics = step_of(algorithm, logprobs['new'], logprobs['old_entropy'], experience)
        expected_loss, expected_gradient, scale = plain.loss_and_gradient(method, x)
        assert_near(loss, expected_loss, scale, label, 'loss')
        assert_near(gradient, expected_gradient, np.abs(expected_gradient).max(), label, 'gradient')
        assert np.all(np.isfinite([value for value in metrics.values() if not isinstance(value, tuple)])), label
        for key, expected in plain.metrics(method, x).items():
            value = metrics[key]
            if isinstance(value, algorithms.PooledMean):
                assert (value.count == 0) == np.isnan(expected), (label, key)
                value = value.total / value.count if value.count else 0.0
            assert_near(value, np.nan_to_num(expected), np.nanmax([np.abs(expected), 0.1]), label, key)


@pytest.mark.parametrize('name', METHODS)
def test_what_a_method_lists_acts_on_the_batches(name):
    # a correction, selection or term without effect here would leave its gradient unseen
    method = METHODS[name]
    defaults = {'correction': plain.none, 'selection': plain.none, 'ratio': plain.token, 'kl': None, 'gate': 'reward'}
    defaults |= {'regularizers': (), 'token_kl': 0.0, 'sequence_kl': 0.0, 'kl_corrected': False, 'dead_groups': 'keep'}
    for piece, default_piece in defaults.items():
        without = method._replace(**{piece: default_piece})
        assert without == method or any(
            np.abs(gradient(method, batch) - gradient(without, batch)).max() > 1e-5 for batch in batches.RANDOM.values()
        ), piece


def gradient(method, batch):
    return plain.loss_and_gradient(method, plain.constants(method, batch))[1]


def test_every_preset_and_every_piece_of_the_device_is_in_the_tables():
    files = os.listdir(os.path.dirname(presets.__file__))
    assert {name + '.py' for name in plain.METHODS} == {name for name in files if name[0] != '_'}
    used = {
        id(getattr(piece, 'func', piece))
        for algorithm in map(algorithm_of, METHODS)
        for piece in (*algorithm[1:5], algorithm.correction, algorithm.selection, *algorithm.regularizers)
    }
    modules = (ratios, surrogates, weights, kl, corrections, selections, regularizers)
    left = {name for module in modules for name, piece in pieces.list_pieces(module).items() if id(piece) not in used}
    assert left == {'entropy_bonus'}  # it acts on the entropy and not on logprobs


def test_truncated_completions_that_are_dropped_leave_the_mean_over_tokens_and_stay_in_their_groups():
    algorithm, logprobs = algorithm_of('dapo'), sampled('random 2')[1]
    whole, cut = experience_of(algorithm, 'random 2'), np.arange(batches.B) % 3 == 0
    whole = whole.replace(rollout=whole.rollout.replace(truncated=jnp.asarray(cut)))
    dropped = drop_truncated(whole)
    np.testing.assert_array_equal(dropped.advantages, whole.advantages)
    gradient, expected = (
        step_of(algorithm, logprobs['new'], logprobs['old_entropy'], experience)[1] for experience in (dropped, whole)
    )
    assert np.any(gradient[~cut]) and np.any(expected[cut])
    left = jnp.sum(whole.loss_mask) / jnp.sum(whole.loss_mask[~cut])
    np.testing.assert_allclose(gradient, jnp.where(cut[:, None], 0, expected * left), atol=1e-7)


@pytest.mark.parametrize('preset, kl_coef', [('ppo', 0.05), ('vapo', 0.0)])
def test_the_critics_loss_is_that_of_plain_numpy(preset, kl_coef):
    for label, batch in ALL.items():
        rows = len(batch.tokens)
        lambdas = np.full(rows, 0.95 if preset == 'ppo' else 1.0)
        experience = experience_of(algorithm_of(preset), label)
        returns, mask = critic._targets(experience)
        error = critic.value_loss(jnp.asarray(batch.new_values, jnp.float32), experience.values, returns, 0.2)
        found = jnp.sum(jnp.where(mask, error, 0)) / jnp.maximum(jnp.sum(mask), 1)
        expected = plain.value_loss(batch, kl_coef, lambdas)
        assert_near(found, expected, max(expected, 1e-3), label)
