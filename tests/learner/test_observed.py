"""What the update measures besides: means pooled over minibatches, by outcome, by completion, by part of the model."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import PooledMean
from grpo_jax.learner import ExtraMetrics, Learning, Optimizers, descent, options
from grpo_jax.learner.programs import make_learner
from grpo_jax.learner.update import UpdateSpec, new_aux, update
from grpo_jax.models import transformer
from grpo_jax.run import observers
from grpo_jax.sharding import batches, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import HeadOutput, TrainState
from tests.algorithms import fixture

CORRECT = np.array([1, 0, 0, 1, 1, np.nan, 1, 0], np.float32)


def pooled(method, correct=CORRECT):
    experience = fixture.worked(method).replace(correct=None if correct is None else jnp.asarray(correct))
    output = HeadOutput(jnp.asarray(fixture.LOGPROBS, jnp.float32), jnp.asarray(fixture.ENTROPY, jnp.float32))
    metrics = algorithms.pooled_metrics(method, output, experience)
    return {name: float(x.value if isinstance(x, PooledMean) else x) for name, x in metrics.items()}


def test_means_by_outcome_leave_out_what_the_verifier_cannot_judge():
    metrics, masks = pooled(fixture.algorithm('grpo')), {'right': CORRECT == 1, 'wrong': CORRECT == 0}
    for name, rows in masks.items():
        tokens = fixture.MASK & rows[:, None]
        assert metrics[f'logprob_{name}'] == pytest.approx(fixture.LOGPROBS[tokens].mean(), rel=1e-5)
        assert metrics[f'entropy_{name}'] == pytest.approx(fixture.ENTROPY[tokens].mean(), rel=1e-5)
    assert metrics['logprob'] == pytest.approx(fixture.LOGPROBS[fixture.MASK].mean(), rel=1e-5)


def test_the_kl_of_sequences_is_summed_over_tokens():
    metrics = pooled(fixture.algorithm('grpo'))

    def sums(reference):
        d = np.where(fixture.MASK, reference, 0.0)
        return np.sum(np.where(fixture.MASK, np.exp(d) - d - 1, 0), 1)

    ref, old = sums(fixture.REF - fixture.LOGPROBS), sums(fixture.LOGPROBS - fixture.OLD)
    assert metrics['kl_ref_sequence'] == pytest.approx(ref.mean(), rel=1e-4)
    assert metrics['kl_ref_sequence_max'] == pytest.approx(ref.max(), rel=1e-4)
    assert metrics['kl_old_sequence'] == pytest.approx(old.mean(), rel=1e-4)


def by_age(correction, age, **numbers):
    """age_metrics of the worked example, whose tokens have these ages."""
    method = fixture.algorithm('grpo', correction=correction, **numbers)
    output = HeadOutput(jnp.asarray(fixture.LOGPROBS, jnp.float32), jnp.asarray(fixture.ENTROPY, jnp.float32))
    metrics = algorithms.age_metrics(method, output, fixture.worked(method), jnp.asarray(age, jnp.int32))
    return {name: float(x.value if isinstance(x, PooledMean) else x) for name, x in metrics.items()}


def test_the_correction_is_measured_by_the_age_of_tokens():
    # rho is exp(old - sampler): exp(-0.9), 1, exp(1.8) or exp(0.9); 2 bounds the last two
    rho, age = np.exp(fixture.OLD - fixture.SAMPLER), np.arange(8)[:, None] // 2 + np.zeros((8, 5), int)
    metrics = by_age('truncated', age)
    for name, rows in {'0': age == 0, '1': age == 1, '2': age >= 2}.items():
        own = rho[rows & fixture.MASK]
        assert metrics[f'correction_age_{name}_mean'] == pytest.approx(np.minimum(own, 2).mean(), rel=1e-4)
        assert metrics[f'correction_age_{name}_max'] == pytest.approx(own.max(), rel=1e-4)
        assert metrics[f'correction_age_{name}_bound'] == pytest.approx((own > 2).mean(), abs=1e-6)
    assert metrics['correction_bound'] == pytest.approx((rho > 2)[fixture.MASK].mean(), abs=1e-6) and (rho > 2).any()
    old = rho[(age > 0) & fixture.MASK]
    assert metrics['stale_ess'] == pytest.approx(old.mean() ** 2 / (old**2).mean(), rel=1e-4)


def test_what_a_correction_drops_is_at_its_bound_and_what_it_leaves_is_not():
    none, age = np.zeros((8, 5)), np.ones((8, 5))
    rho = np.exp(fixture.OLD - fixture.SAMPLER)[fixture.MASK]
    dropped = {'icepop': ((rho < 0.5) | (rho > 5)).mean()}  # defaults
    worst = np.where(fixture.MASK, fixture.OLD - fixture.SAMPLER, 0).min(1)
    dropped['veto'] = np.mean((np.exp(worst)[:, None] < 0.5 + none)[fixture.MASK])
    assert by_age('icepop', age)['correction_age_1_bound'] == pytest.approx(dropped['icepop'], abs=1e-6)
    assert by_age('veto', age, veto_below=0.5)['correction_bound'] == pytest.approx(dropped['veto'], abs=1e-6)
    assert 0 < min(dropped.values()) < 1
    fresh = by_age('icepop', none)
    assert np.isnan(fresh['stale_ess']) and np.isnan(fresh['correction_age_1_mean'])
    assert fresh['correction_age_2_max'] == -np.inf and np.isfinite(fresh['correction_age_0_max'])
    assert set(by_age('none', age)) == {'stale_ess'}  # nothing is bounded


def test_quantiles_of_the_ratio_are_numpys():
    metrics, ratios = pooled(fixture.algorithm('grpo')), np.exp((fixture.LOGPROBS - fixture.OLD)[fixture.MASK])
    assert metrics['ratio_p01'] == pytest.approx(np.quantile(ratios, 0.01), rel=1e-5)
    assert metrics['ratio_p99'] == pytest.approx(np.quantile(ratios, 0.99), rel=1e-5)


def test_without_verdicts_there_is_nothing_by_outcome():
    method = fixture.algorithm('dr_grpo')
    names = {'logprob', 'kl_old_sequence', 'ratio_p01', 'ratio_p99'}
    assert set(pooled(method, correct=None)) == names
    unknown = pooled(method, correct=np.full(8, np.nan, np.float32))
    assert {name for name, value in unknown.items() if np.isnan(value)} == set(unknown) - names


def test_pooled_means_weigh_minibatches_by_what_they_hold():
    # 2 tokens of sum 4 and 6 of sum 0: 4 / 8, where the mean of the means 2 and 0 is 1; and nothing at all
    def gradient(params, part, packed):
        here = PooledMean(jnp.sum(part.x * part.loss_mask), jnp.sum(part.loss_mask, dtype=jnp.float32))
        return jnp.float32(0), params, {'here': here, 'nowhere': PooledMean(jnp.float32(0), jnp.float32(0))}

    batch = collections.namedtuple('Batch', 'x loss_mask')(
        jnp.array([[2.0, 2, 0, 0, 0, 0], [0.0] * 6]), jnp.array([[True, True, False, False, False, False], [True] * 6])
    )
    params, optimizer = {'embed': jnp.ones(3)}, optax.sgd(0.1)
    cut = options.Minibatching(1, epochs=2, minibatches=2)
    *_, metrics = descent.descend(params, optimizer.init(params), batch, None, gradient, optimizer, cut)
    assert metrics['here'] == 0.5 and np.isnan(metrics['nowhere'])


def observe(tiny, experience, method=None, **options):
    """Metrics of an update."""
    method = fixture.algorithm('dapo') if method is None else method
    optimizer = optax.sgd(0.1)
    setup = UpdateSpec(tiny[0], method, Learning(**dict(chunk=16) | options), optimizer, group_size=2)
    state = TrainState(jnp.int32(3), tiny[1], optimizer.init(tiny[1]), None, new_aux(method, tiny[1], None))
    return jax.jit(lambda state, experience: update(state, experience, None, setup))(state, experience)[1]


@pytest.fixture(scope='module')
def judged(experience):
    """One right completion, of the first group."""
    return experience.replace(correct=jnp.array([1.0, 0, 0, 0, 0, 0, 0, 0]), old_logprobs=None)


@pytest.fixture(scope='module')
def whole(tiny, judged):
    """Metrics of an update of all groups at once."""
    return observe(tiny, judged)


def test_right_answers_in_one_minibatch_alone_are_no_gap(tiny, judged, whole):
    cut = observe(tiny, judged, minibatches=2, microbatches=2)
    # before the first update both see the same policy; the second minibatch has no right completion
    assert float(cut['logprob_right']) == pytest.approx(float(whole['logprob_right']), abs=1e-5)
    assert np.isfinite(float(cut['entropy_right']))


def test_norms_by_part_make_the_whole(whole):
    parts = {name: float(x) for name, x in whole.items() if name.startswith('gradient_norm/')}
    assert set(parts) == {f'gradient_norm/{part}' for part in ('embedding', 'attention', 'mlp', 'norms')}
    assert sum(x**2 for x in parts.values()) == pytest.approx(float(whole['grad_norm']) ** 2, rel=1e-5)
    assert min(parts.values()) > 0


@pytest.mark.parametrize('mesh, options', [({}, dict(pack_columns=32)), ({'data': 2, 'context': 2}, {})])
def test_packed_rows_and_meshes_change_nothing(request, tiny, wide_experience, assert_close, mesh, options):
    if mesh:
        request.getfixturevalue('long')
    c, params = tiny
    method = fixture.algorithm('dr_grpo')
    correct = jnp.asarray(np.arange(16) % 3 == 0, jnp.float32)
    experience = wide_experience.replace(old_logprobs=None, ref_logprobs=None, correct=correct)

    def learn(sizes, **options):
        mesh = meshes.make(sizes)
        shapes = batches.Shapes(prompts=8, group_size=2, queries=6, tokens=10)
        learning = Learning(**dict(chunk=16, pack_columns=0) | options)
        made = make_learner(
            c, method, Optimizers(optax.sgd(0.1)), mesh, shapes, learning,
            extra=ExtraMetrics(outcomes=True, reference=True),
        )  # fmt: skip
        state = made.initial(jax.device_put(params, specs.params(transformer.param_table(c), mesh)))
        on_mesh = batches.put_rows(experience, mesh)
        packed = made.pack(on_mesh.rollout)
        away = state.replace(ref_params=jax.tree.map(lambda x: 1.1 * x, state.ref_params))
        observe = observers.observe_reference(made.scorer, observers.make_reference_metrics(shapes, mesh), 1)
        observed = observe(away, on_mesh, packed, None)[1]
        return jax.device_get(made.update(state, on_mesh, packed)[1]), observed

    (metrics, observed), (alone, observed_alone) = learn(mesh, **options), learn({})
    assert_close(metrics, alone, atol=1e-5)
    assert_close(observed, observed_alone, atol=1e-5)
    assert observed['kl_ref'] > 1e-3 and set(observed) == {'kl_ref', 'kl_ref_sequence', 'kl_ref_sequence_max'}
    assert np.isfinite(alone['logprob_right']) and alone['logprob_right'] != alone['logprob_wrong']


def test_the_state_keeps_a_reference_that_is_only_observed(tiny):
    c, _ = tiny
    shapes, mesh = batches.Shapes(4, 2, 5, 6), meshes.make({})

    def reference_of(preset, **extra):
        method = fixture.algorithm(preset)
        made = make_learner(
            c, method, Optimizers(optax.sgd(0.1)), mesh, shapes, Learning(), extra=ExtraMetrics(**extra)
        )
        return made.abstract_state.ref_params

    assert reference_of('dr_grpo', reference=True) is not None and reference_of('dr_grpo') is None
    assert reference_of('grpo') is not None
