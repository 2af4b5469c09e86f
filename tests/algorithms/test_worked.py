"""Every number of the worked example: advantages, losses, gradients, and the smaller examples beside it."""

import functools

import fixture
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import corrections, group_math, ratios, regularizers, selections, surrogates

MASK = fixture.MASK.reshape(2, 4, 5)
KL = (fixture.OLD - fixture.REF).reshape(2, 4, 5)
ADVANTAGES = {
    'ddof 0': np.array([0.999998, -0.999998, -0.999998, 0.999998, 0.577349, 0.577349, 0.577349, -1.732047]),
    'mean': np.array([0.5, -0.5, -0.5, 0.5, 0.25, 0.25, 0.25, -0.75]),
    'hybrid': np.array([1.032793, -1.032793, -1.032793, 1.032793, 0.51639672, 0.51639672, 0.51639672, -1.549190]),
    'leave one out': np.array([2, -2, -2, 2, 1, 1, 1, -3]) / 3,
    'ones': np.ones(8),
    'correct': fixture.REWARDS.reshape(-1),
}


def values(name, rewards=fixture.REWARDS, **numbers):
    """Advantages [P, G, ...] through the public entry point."""
    method = fixture.algorithm_with('cispo', numbers, advantage=name)
    found = algorithms.compute_advantages(method, rewards, mask=MASK, kl=KL)
    return found.reshape(*rewards.shape, -1)


@pytest.mark.parametrize(
    'name, numbers, expected',
    [
        (
            'hybrid',
            dict(std_ddof=0),
            [1.032793, -1.032793, -1.032793, 1.032793, 0.516397, 0.516397, 0.516397, -1.549190],
        ),
        (
            'hybrid',
            dict(std_ddof=1, std_eps=1e-4),
            [0.965905, -0.965905, -0.965905, 0.965905, 0.482953, 0.482953, 0.482953, -1.448858],
        ),
        (
            'group_mean_batch_std',
            dict(std_ddof=0),
            [1.308752, -0.857458, -0.857458, 1.308752, 0.767199, 0.767199, 0.767199, -1.399010],
        ),
        (
            'group_mean_batch_std',
            dict(std_ddof=1),
            [1.281196, -0.839404, -0.839404, 1.281196, 0.751046, 0.751046, 0.751046, -1.369554],
        ),
        ('maxrl', {}, [0.999998, -0.999998, -0.999998, 0.999998, 0.333333, 0.333333, 0.333333, -0.999999]),
        ('opo', {}, [0.7, -0.3, -0.3, 0.7, 0.285714, 0.285714, 0.285714, -0.714286]),
        # a mean of .5 and of .5 in the second group, where every pair holds a hit: no signal
        ('pkpo', dict(pass_k=2), [0.083333, -0.083333, -0.083333, 0.083333, 0, 0, 0, 0]),
    ],
)
def test_estimator(name, numbers, expected):
    np.testing.assert_allclose(values(name, **numbers).reshape(-1), expected, **fixture.ROUNDED)


def test_baselines_of_the_past_are_taken_off_each_reward():
    # rewards 1 0 0 1 and 1 1 1 0
    def less(name, rewards=fixture.REWARDS, **baselines):
        method = fixture.algorithm('reinforce_moving', advantage=name)
        return algorithms.compute_advantages(method, rewards, **baselines)[:, 0].tolist()

    assert less('moving_mean', run_baseline=0.25) == [0.75, -0.25, -0.25, 0.75, 0.75, 0.75, 0.75, -0.25]
    by_prompt = np.repeat([[0.25], [0.75]], 4, 1)
    assert less('prompt_moving_mean', prompt_baselines=by_prompt) == [0.75, -0.25, -0.25, 0.75, 0.25, 0.25, 0.25, -0.75]
    assert less('moving_mean', np.array([[1.0, 1.0, np.nan]]), run_baseline=0.75) == [0.25, 0.25, 0]  # of equals too


def test_pass_at_2_rewards():
    np.testing.assert_allclose(
        group_math.pass_at_k_rewards(fixture.REWARDS, 2), [[0.5, 1 / 3, 1 / 3, 0.5], [0.5, 0.5, 0.5, 0.5]], atol=1e-9
    )


def test_reinforce_pp_by_token():
    method = fixture.algorithm('reinforce_pp', std_ddof=0)
    found = algorithms.compute_advantages(method, fixture.REWARDS, mask=MASK, kl=KL)
    np.testing.assert_allclose(found[0], [0.912980, 0.921017, 0, 0, 0], **fixture.ROUNDED)
    np.testing.assert_allclose(found[7], [-1.080255, -1.082264, -1.086283, -1.083269, 0], **fixture.ROUNDED)


def test_hybrid_with_a_dead_group_added():
    rewards = np.concatenate([fixture.REWARDS, np.zeros((1, 4))])
    found = algorithms.compute_advantages(fixture.algorithm('lite_ppo', std_ddof=0), rewards)[:, 0]
    np.testing.assert_allclose(found[:4], [1.014183, -1.014183, -1.014183, 1.014183], **fixture.ROUNDED)
    assert np.all(found[8:] == 0)


# preset, its changes, advantages, loss, gradient of row 0 and row 5, sum of |gradient|
LOSSES = [
    ('grpo', {}, 'ddof 0', 0.020633, [-0.046063, -0.062500], [-0.017821, -0.024231, 0.000159], 0.887197),
    (
        'grpo',
        dict(kl='none', kl_coef=0.0),
        'ddof 0',
        0.020494,
        [-0.046301, -0.0625],
        [-0.017821, -0.024056, 0],
        0.888099,
    ),
    (
        'grpo',
        dict(kl='k3_importance'),
        'ddof 0',
        0.020640,
        [-0.046116, -0.0625],
        [-0.017821, -0.024223, 0.000225],
        0.887262,
    ),
    ('dapo', {}, 'ddof 0', 0.245004, [-0.030867, -0.041667], [-0.017821, -0.024056, 0], 0.877270),
    (
        'dapo',
        dict(surrogate='dual_clip', dual_clip=1.1),
        'ddof 0',
        0.209522,
        [-0.030867, -0.041667],
        [-0.017821, -0.024056, 0],
        0.591351,
    ),
    ('dr_grpo', dict(fixed_length=5), 'mean', 0.071571, [-0.009260, -0.0125], [-0.004630, -0.006250, 0], 0.243222),
    ('lite_ppo', {}, 'hybrid', 0.246394, [-0.031880, -0.043033], [-0.015940, -0.021517, 0], 0.837325),
    ('rloo', {}, 'leave one out', 0.048664, [-0.061735] * 2, [-0.041667] * 3, 1.602344),
    ('gspo', dict(clip_low=0.02, clip_high=0.03), 'ddof 0', 0.034433, [-0.053794] * 2, [-0.024056] * 3, 0.688871),
    ('gspo_token', dict(clip_low=0.02, clip_high=0.03), 'ddof 0', 0.034433, [-0.053794] * 2, [-0.024056] * 3, 0.688871),
    ('gspo', {}, 'ddof 0', 0.040595, [-0.053794] * 2, [-0.024056] * 3, 0.688871),
    ('gmpo', {}, 'ddof 0', 0.011421, [-0.053794] * 2, [-0.024056] * 3, 0.950068),
    ('cispo', {}, 'ddof 0', -0.115464, [-0.030867, -0.041667], [-0.017821, -0.024056, -0.032472], 0.973083),
    (
        'cispo',
        dict(cispo_cap=1.2),
        'ddof 0',
        -0.114311,
        [-0.030867, -0.041667],
        [-0.017821, -0.024056, -0.028867],
        0.948813,
    ),
    ('sapo', {}, 'ddof 0', -0.031836, [-0.045532, -0.0625], [-0.017525, -0.024056, -0.031499], 0.952880),
    ('dppo', {}, 'mean', 0.197017, [-0.006375, -0.020833], [-0.007742, -0.010417, -0.014036], 0.420088),
    ('scalerl', {}, 'hybrid', -0.136071, [-0.038256, -0.051640], [-0.013663, -0.018443, -0.024895], 0.940544),
    ('reinforce', dict(weights='token_mean'), 'mean', -0.054167, [-0.020833] * 2, [-0.010417] * 3, 0.4375),
    ('sft', {}, 'ones', 0.5, [-0.041667] * 2, [-0.041667] * 3, 1.0),
    ('rft', {}, 'correct', 0.305, [-0.0625] * 2, [-0.041667] * 3, 0.625),
]


@pytest.mark.parametrize('preset, changes, rows, loss, row_0, row_5, total', LOSSES)
def test_loss_and_gradient(preset, changes, rows, loss, row_0, row_5, total):
    method = fixture.algorithm(preset, **changes)
    experience = fixture.experience(ADVANTAGES[rows][:, None].astype(np.float32))
    found, gradient, _ = fixture.loss_and_gradient(method, experience)
    np.testing.assert_allclose(found, loss, **fixture.ROUNDED)
    np.testing.assert_allclose(gradient[0], row_0 + [0] * 3, **fixture.ROUNDED)
    np.testing.assert_allclose(gradient[5], row_5 + [0] * 2, **fixture.ROUNDED)
    np.testing.assert_allclose(np.abs(gradient).sum(), total, rtol=0, atol=5e-6)
    coefficients = algorithms.gradient_coefficients(method, jnp.asarray(fixture.LOGPROBS, jnp.float32), experience)
    np.testing.assert_array_equal(coefficients, -gradient)


@pytest.mark.parametrize(
    'preset, weights, value',
    [
        ('grpo', 'sequence_mean', 0),
        ('gspo', 'sequence_mean', 0),
        ('gspo_token', 'sequence_mean', 0),
        ('gmpo', 'sequence_mean', 0),
        ('sapo', 'sequence_mean', -0.044429),
        ('cispo', 'sequence_mean', -0.018096),
        ('gpg', 'sequence_mean', -0.018096),
        ('dapo', 'token_mean', 0.214779),
    ],
)
def test_on_policy_every_shape_has_the_gradient_of_the_policy(preset, weights, value):
    method = fixture.algorithm(preset, kl='none', kl_coef=0.0, weights=weights)
    experience = fixture.experience(ADVANTAGES['ddof 0'][:, None].astype(np.float32), old=fixture.LOGPROBS)
    found, gradient, _ = fixture.loss_and_gradient(method, experience)
    plain = fixture.loss_and_gradient(fixture.algorithm('gpg', weights=weights), experience)[1]
    np.testing.assert_allclose(found, value, **fixture.ROUNDED)
    np.testing.assert_allclose(gradient, plain, rtol=0, atol=2e-8)


def test_ratios():
    log_ratio = jnp.asarray(np.where(fixture.MASK, fixture.LOGPROBS - fixture.OLD, 0), jnp.float32)
    mask = jnp.asarray(fixture.MASK)
    geometric = ratios.sequence_geometric(log_ratio, mask)[:, 0]
    np.testing.assert_allclose(
        geometric, [0.860708, 0.927743, 1.051271, 1.161834, 1, 1, 1, 1.077884], **fixture.ROUNDED
    )
    product = ratios.sequence_product(log_ratio, mask)[:, 0]
    np.testing.assert_allclose(product, [0.740818, 0.740818, 1.161834, 1.161834, 1, 1, 1, 1.349859], **fixture.ROUNDED)


LOG_RHO = jnp.asarray(np.where(fixture.MASK, fixture.OLD - fixture.SAMPLER, 0), jnp.float32)
RHO = np.array(
    [
        [0.40657, 1, 1, 1, 1],
        [1, 6.049647, 1, 0.40657, 1],
        [1, 1, 0.40657, 1, 1],
        [6.049647, 1, 1, 1, 1],
        [0.40657, 1, 1, 6.049647, 0.40657],
        [1] * 5,
        [1] * 5,
        [1, 0.40657, 1, 1, 1],
    ]
)


def test_sampler_corrections():
    mask = jnp.asarray(fixture.MASK)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=5e-6)
    close(corrections.truncated(LOG_RHO, rho_max=2.0), np.minimum(RHO, 2))
    close(corrections.icepop(LOG_RHO, icepop_low=0.5, icepop_high=5.0), np.where((RHO < 0.5) | (RHO > 5), 0, RHO))
    products = [0.40657, 2.459603, 0.40657, 6.049647, 1, 1, 1, 0.40657]
    close(
        corrections.masked_product(LOG_RHO, mask, product_max=3.0)[:, 0],
        [0.40657, 2.459603, 0.40657, 0, 1, 1, 1, 0.40657],
    )
    close(corrections.truncated_product(LOG_RHO, mask, rho_max=2.0)[:, 0], np.minimum(products, 2))
    # geometric means: .637628, 1.252323, .740818, 6.049647, 1, 1, 1, .798516
    kept = np.array([0, 1, 1, 0, 1, 1, 1, 1])
    close(corrections.masked_geometric(LOG_RHO, mask, geometric_low=0.7, geometric_high=1.3), RHO * kept[:, None])
    close(corrections.veto(LOG_RHO, mask, veto_below=0.41)[:, 0], [0, 0, 0, 1, 0, 1, 1, 0])


def test_opsm_drops_the_negative_row_that_drifted():
    drift = jnp.asarray(np.where(fixture.MASK, fixture.OLD - fixture.LOGPROBS, 0), jnp.float32)
    kept = corrections.opsm(drift, jnp.asarray(fixture.MASK), ADVANTAGES['mean'][:, None], opsm_delta=0.05)
    np.testing.assert_array_equal(kept[:, 0], [1, 0, 1, 1, 1, 1, 1, 1])


def test_llds():
    log_ratio = jnp.asarray(np.where(fixture.MASK, fixture.LOGPROBS - fixture.OLD, 0), jnp.float32)
    term = regularizers.llds(log_ratio, ADVANTAGES['ddof 0'][:, None], jnp.asarray(fixture.MASK), llds_coef=0.2)
    assert float(jnp.sum(term) / fixture.MASK.sum()) == pytest.approx(0.0025, abs=1e-7)
    assert np.flatnonzero(np.any(term > 0, -1)).tolist() == [0]


@pytest.mark.parametrize(
    'lambda_, expected',
    [(1.0, [0.8, 0.6, 0.5, 0.2]), (0.95, [0.737225, 0.5655, 0.49, 0.2]), (0.0, [0.2, 0.1, 0.3, 0.2])],
)
def test_generalized_advantages(lambda_, expected):
    rewards, critic = np.array([0, 0, 0, 1.0]), np.array([0.2, 0.4, 0.5, 0.8])
    found = group_math.generalized_advantages(rewards, np.ones(4, bool), critic, 1.0, lambda_)
    np.testing.assert_allclose(found, expected, **fixture.ROUNDED)
    # a masked token in between changes nothing for the others
    gap = group_math.generalized_advantages(
        np.insert(rewards, 2, 9.0), np.array([1, 1, 0, 1, 1], bool), np.insert(critic, 2, 9.0), 1.0, lambda_
    )
    np.testing.assert_allclose(gap, np.insert(expected, 2, 0), **fixture.ROUNDED)


def test_process_rewards():
    steps = np.full((1, 2, 5), np.nan)
    steps[0, 0, 1], steps[0, 0, 3], steps[0, 1, 2], steps[0, 1, 4] = 0.2, 0.9, 0.4, 0.5
    method = fixture.algorithm('grpo_process', std_ddof=0, std_eps=1e-9)
    found = algorithms.compute_advantages(
        method, np.array([[1.0, 0]]), step_rewards=steps, mask=np.ones((1, 2, 5), bool)
    )
    np.testing.assert_allclose(
        found, [[0.392232, 0.392232, 1.568929, 1.568929, 0], [-0.392232, -0.392232, -0.392232, 0, 0]], **fixture.ROUNDED
    )


def test_dpo_pair():
    # one token each: chosen -12 against -13, rejected -15 against -14: z = .1 * (1 + 1)
    def loss(logprobs):
        method = functools.partial(surrogates.dpo, dpo_beta=0.1, dpo_length_norm=False)
        return jnp.mean(
            method(
                logprobs,
                jnp.array([[-13.0], [-14.0]]),
                jnp.array([[1.0], [-1.0]]),
                jnp.ones((2, 1), bool),
                jnp.zeros(2, jnp.int32),
            )
        )

    value, gradient = jax.value_and_grad(loss)(jnp.array([[-12.0], [-15.0]]))
    assert float(value) == pytest.approx(0.598139, abs=1e-6)
    np.testing.assert_allclose(gradient, [[-0.045017], [0.045017]], **fixture.ROUNDED)


def test_gtpo_conflict_weights():
    tokens = np.array([[1, 2, 9, 7, 4], [1, 2, 5, 6, 4], [1, 3, 5, 7, 4], [8, 2, 5, 7, 4]])
    found = group_math.conflict_weights(tokens, np.ones((4, 5), bool), np.array([1.0, -1, 1, -1]))
    np.testing.assert_array_equal(found, [[2, 2, 1, 2, 2], [0, 0, 0, 1, 0], [2, 1, 2, 2, 2], [1, 0, 0, 0, 0]])


def test_gtpo_counts_the_suffix_from_each_completions_own_end():
    tokens = np.array([[1, 5, 4, 0], [2, 3, 5, 4]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(
        group_math.conflict_weights(tokens, mask, np.array([1.0, -1])), [[1, 2, 2, 1], [1, 1, 0, 0]]
    )


def test_grpo_lambda_rewards():
    found = group_math.efficient_rewards(np.array([1, 1, 0, 1], bool), np.array([100, 200, 300, 400]), 0.2)
    np.testing.assert_allclose(found, [0.948883, 0.913284, 0, 0.841624], **fixture.ROUNDED)
    assert group_math.efficient_rewards(np.array([0, 1], bool), np.array([10, 20]), 0.2).tolist() == [0, 0.9]
    assert group_math.efficient_rewards(np.zeros(2, bool), np.array([10, 20]), 0.2).tolist() == [0, 0]


def test_xrpo_sharpening():
    method = fixture.algorithm('xrpo', std_ddof=0, std_eps=1e-9)
    logprobs = np.array([-1, -0.5, -0.8, -0.3])[None, :, None] * np.ones((1, 4, 3))
    found = algorithms.compute_advantages(
        method, np.array([[1.0, 1, 0, 1]]), mask=np.ones((1, 4, 3), bool), sampler_logprobs=logprobs
    )
    np.testing.assert_allclose(found[:, 0], [0.866025, 0.57735, -1.732051, 0.57735], **fixture.ROUNDED)


def test_high_entropy_selection():
    entropy = jnp.array([[0.1, 2, 0.3, 0], [1.5, 0.2, 0.05, 0.9]])
    mask = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    found = selections.high_entropy(entropy, mask, entropy_share=0.2)
    np.testing.assert_array_equal(found, [[0, 1, 0, 0], [1, 0, 0, 0]])


def test_m2po_selection():
    log_rho, mask = jnp.array([[2.0, -1, 0.3, 0.1, -0.2, 0]]), jnp.array([[1, 1, 1, 1, 1, 0]], bool)
    np.testing.assert_array_equal(selections.m2po(log_rho, mask, second_moment=0.04)[0, :5], [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(selections.m2po(log_rho, mask, second_moment=9.0)[0, :5], [1, 1, 1, 1, 1])


def test_gpg_factor_is_the_authors():
    # one of three groups dead: the others count 3 / 2 times
    rewards = np.concatenate([fixture.REWARDS, np.ones((1, 4))])
    found = algorithms.compute_advantages(fixture.algorithm('gpg'), rewards)[:, 0]
    np.testing.assert_allclose(found[:8], 1.5 * ADVANTAGES['mean'], rtol=1e-6)
    assert np.all(found[8:] == 0)
