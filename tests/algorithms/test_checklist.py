"""Lines of the numerical checklist, P.1 to P.20 of the specification, that no other test holds, and hand numbers of
what presets leave unused."""

import functools

import fixture
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import kl, pieces, ratios, regularizers, surrogates

MASK = fixture.MASK.reshape(2, 4, 5)


# P.3: clamps are counted


@pytest.mark.parametrize(
    'where, share', [([], 0), ([(0, 0)], 1 / 24), ([(0, 0), (4, 2), (7, 3)], 3 / 24), ([(0, 4), (3, 3)], 0)]
)
def test_tokens_with_a_clamped_ratio_are_counted(where, share):
    # the last two lie outside the mask
    old = fixture.OLD.copy()
    for place in where:
        old[place] -= 25
    method = fixture.algorithm('dapo')
    metrics = fixture.loss_and_gradient(method, fixture.worked(method, old=old))[2]
    assert metrics['ratio_clamped_share'] == pytest.approx(share)


@pytest.mark.parametrize(
    'ratio, shift', [('sequence_product', 15), ('sequence_geometric', 15), ('clipped_geometric', 15)]
)
def test_rows_with_a_clamped_ratio_are_counted(ratio, shift):
    # 2 tokens of 15 nats have a product of e^30, beyond e^20, and a mean of e^15, beyond e^10: no gradient is left
    changes = dict(ratio=ratio, surrogate='importance', **fixture.NO_KL)
    method = fixture.algorithm_with('grpo', dict(log_clip=100.0), **changes)
    old = fixture.LOGPROBS - np.where(np.arange(8)[:, None] == 0, shift, 0)
    _, gradient, metrics = fixture.loss_and_gradient(method, fixture.worked(method, old=old))
    assert np.all(gradient[0] == 0) and np.all(gradient[1, :4] != 0)
    assert metrics['ratio_clamped_share'] == pytest.approx(2 / 24)


@pytest.mark.parametrize('estimator', ['k2', 'k3'])
@pytest.mark.parametrize('difference', [1.0, 3.0, -12.0, 25.0])
def test_tokens_with_a_clamped_kl_are_counted(estimator, difference):
    # with A = 0 the KL alone has a gradient: those that lost it are those that count
    method = fixture.algorithm('grpo', kl=estimator)
    ref = fixture.LOGPROBS + np.where(np.arange(8)[:, None] % 2, difference, 0.1)
    experience = fixture.experience(np.zeros((8, 1), np.float32), ref=ref)
    _, gradient, metrics = fixture.loss_and_gradient(method, experience)
    assert metrics['kl_clamped_share'] == pytest.approx(np.mean(gradient[fixture.MASK] == 0))


@pytest.mark.parametrize('ratio', sorted(pieces.list_pieces(ratios)))
@pytest.mark.parametrize('sign', [1, -1])
def test_a_clamped_ratio_gives_no_gradient(ratio, sign):
    # 25 nats a token, away from the side that GMPO clips; without a clip only the clamp can stop the gradient
    method = fixture.algorithm('grpo', ratio=ratio, surrogate='importance', **fixture.NO_KL)
    experience = fixture.experience(np.full((8, 1), -sign, np.float32), old=fixture.LOGPROBS - 25 * sign)
    loss, gradient, _ = fixture.loss_and_gradient(method, experience)
    assert np.isfinite(loss) and np.all(gradient == 0)


@pytest.mark.parametrize(
    'estimator, difference',
    [('k2', 25), ('k2', -25), ('absolute', 25), ('k3', 25), ('k3', -25), ('k3', 3), ('k3_straight_through', 25)],
)
def test_a_clamped_kl_gives_no_gradient(estimator, difference):
    method = fixture.algorithm('grpo', kl=estimator)
    experience = fixture.experience(np.zeros((8, 1), np.float32), ref=fixture.LOGPROBS + difference)
    loss, gradient, _ = fixture.loss_and_gradient(method, experience)
    assert loss > 0 and np.all(gradient == 0)


# P.4: long sequences


@pytest.mark.parametrize('preset', ['rloo', 'gspo', 'gspo_token', 'gmpo'])
@pytest.mark.parametrize('drift', [0.03, -0.03])
def test_sequences_of_4000_tokens_that_drifted_stay_finite(preset, drift):
    method = fixture.algorithm(preset, **fixture.NO_KL)
    logprobs, mask = np.full((4, 4000), -1.0), np.ones((4, 4000), bool)
    experience = fixture.experience(
        np.array([[1.0], [1.0], [-1.0], [-1.0]]),
        mask=mask,
        old=logprobs - drift,
        ref=logprobs,
        sampler=logprobs,
        entropy=logprobs,
    )
    loss, gradient, metrics = fixture.loss_and_gradient(method, experience, logprobs)
    assert np.isfinite(loss) and np.all(np.isfinite(gradient)) and np.all(np.isfinite(list(metrics.values())))
    if preset in ('gspo', 'gspo_token'):
        # the side that clip leaves: e^drift / 4 rows / 4000 tokens
        rows, sign = (slice(2, 4), 1) if drift > 0 else (slice(0, 2), -1)
        np.testing.assert_allclose(gradient[rows], sign * np.exp(drift) / 16000, rtol=1e-3)


# P.12: gradients of what test_kl leaves out

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
TRUE = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jnp.log(Q))))(jnp.log(P))


@pytest.mark.parametrize(
    'estimator', [kl.k3_straight_through, lambda now, ref: kl.k3_importance(now, ref, jnp.exp(now - jnp.log(P)))]
)
def test_corrected_k3_has_the_gradient_of_the_reverse_kl(estimator):
    def loss(logits):
        return jnp.sum(P * estimator(jax.nn.log_softmax(logits), jnp.log(Q)))

    np.testing.assert_allclose(jax.grad(loss)(jnp.log(P)), TRUE, atol=1e-7)
    np.testing.assert_allclose(loss(jnp.log(P)), 0.025267, atol=1e-6)


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl():
    # a policy gradient with the reward -k1, over the samples 5, 3 and 2 times of the three tokens
    drawn = np.repeat(np.arange(3), [5, 3, 2])
    method = fixture.algorithm('reinforce', kl='k1', kl_placement='reward_sequence', kl_coef=1.0)
    found = algorithms.compute_advantages(
        method, np.zeros((1, 10)), mask=np.ones((1, 10, 1), bool), kl=np.log(P / Q)[drawn][None, :, None]
    )
    experience = fixture.experience(
        found,
        mask=np.ones((10, 1), bool),
        old=None,
        ref=np.zeros((10, 1)),
        sampler=np.zeros((10, 1)),
        group_ids=np.zeros(10),
    )
    experience = experience.replace(rewards=jnp.zeros(10))

    def loss(logits):
        return algorithms.policy_loss(method, jax.nn.log_softmax(logits)[drawn][:, None], experience)[0]

    np.testing.assert_allclose(jax.grad(loss)(jnp.log(P)), TRUE, atol=1e-6)


# P.14: the first update of a rollout


@pytest.mark.parametrize('preset', fixture.PRESETS)
def test_first_update_is_at_ratio_one_and_has_a_gradient(preset):
    method = fixture.algorithm_with(preset, fixture.SMALL)
    experience = fixture.worked(method, old=fixture.LOGPROBS, sampler=fixture.LOGPROBS)
    _, gradient, metrics = fixture.loss_and_gradient(method, experience)
    # what clip_low and clip_high count is every lost gradient: a row outside DPO's pair has A = 0 and neither sign
    zero = ('ratio_clamped_share', 'kl_old', 'clip_low_share', 'clip_high_share', 'sampler_gap_max')
    assert [metrics[name] for name in zero] == [0] * 5
    assert (metrics['ratio_mean'], metrics['ratio_max'], metrics['correction_mean']) == (1, 1, 1)
    assert metrics['sampler_ess'] == pytest.approx(1) and np.any(gradient)


# adaptation


@pytest.mark.parametrize(
    'seen, factor', [(0.1, 1), (0.11, 1.01), (0.09, 0.99), (0.12, 1.02), (10.0, 1.02), (0.0, 0.98)]
)
def test_kl_coefficient_moves_by_the_formula_and_no_further(seen, factor):
    # target .1, 100 rows of a horizon of 1000: 1 + clip(kl / .1 - 1, +-.2) / 10
    method = fixture.algorithm('grpo', kl_target=0.1, kl_horizon=1000.0)
    found = algorithms.adapt(method, {'kl_coef': 0.04, 'entropy_coef': 0.5}, {'kl_ref': np.float32(seen)}, 100)
    assert found['kl_coef'] == pytest.approx(0.04 * factor, rel=1e-5) and found['entropy_coef'] == 0.5


@pytest.mark.parametrize(
    'seen, before, after', [(0.9, 0.1, 0.105), (1.0, 0.1, 0.105), (1.1, 0.1, 0.095), (3.0, 0.1, 0.095), (3.0, 0.002, 0)]
)
def test_entropy_coefficient_moves_by_its_step_and_not_below_zero(seen, before, after):
    method = fixture.algorithm('grpo', regularizers=('entropy_bonus',), entropy_target=1.0)
    found = algorithms.adapt(
        method, {'kl_coef': 0.04, 'entropy_coef': np.float32(before)}, {'entropy': np.float32(seen)}, 100
    )
    assert found['entropy_coef'] == pytest.approx(after, abs=1e-7) and found['kl_coef'] == 0.04


def test_coefficients_without_a_target_stay():
    before = {'kl_coef': 0.04, 'entropy_coef': 0.1}
    assert algorithms.adapt(fixture.algorithm('grpo'), before, {}, 100) == before


@pytest.mark.parametrize('entropy, acts', [(0.5, True), (2.0, False)])
def test_entropy_bonus_with_a_target_acts_only_below_it(entropy, acts):
    numbers = dict(regularizers=('entropy_bonus',), entropy_coef=0.1)
    method = fixture.algorithm('dapo', entropy_target=1.0, **numbers)
    experience, logprobs = fixture.worked(method), jnp.asarray(fixture.LOGPROBS, jnp.float32)
    loss = algorithms.policy_loss(method, logprobs, experience, jnp.full((8, 5), entropy))[0]
    plain = algorithms.policy_loss(fixture.algorithm('dapo'), logprobs, experience)[0]
    assert float(plain - loss) == pytest.approx(0.1 * entropy * acts, abs=1e-6)


# what weights count


@pytest.mark.parametrize(
    'weights, expected',
    [
        # row 0 keeps 1 of its 2 tokens, row 1 both, row 2 none
        ('token_mean', [[1 / 3, 1 / 3], [1 / 3, 1 / 3], [0, 0]]),
        ('sequence_mean', [[1 / 2, 0], [1 / 4, 1 / 4], [0, 0]]),
    ],
)
def test_denominators_of_selected_tokens_leave_the_others_out(weights, expected):
    selection = jnp.array([[1.0, 0], [1, 1], [0, 0]])
    method = fixture.algorithm('gpg', weights=weights, denominator='selected')
    method = method._replace(selection=lambda mask: selection)
    experience = fixture.experience(
        np.ones((3, 1), np.float32),
        mask=np.ones((3, 2), bool),
        old=None,
        ref=None,
        sampler=np.zeros((3, 2)),
        entropy=None,
    )
    pushed = algorithms.gradient_coefficients(method, jnp.zeros((3, 2)), experience)
    np.testing.assert_allclose(pushed, np.array(expected) * selection, rtol=1e-6)
    everyone = algorithms.gradient_coefficients(method._replace(denominator='all'), jnp.zeros((3, 2)), experience)
    np.testing.assert_allclose(everyone, selection / 6, rtol=1e-6)


def test_denominators_of_selected_tokens_leave_masked_out_corrections_out():
    # rho 1, e^2 and 1: icepop drops the second, and each of the two that are left counts a half
    method = fixture.algorithm('gpg', weights='token_mean', denominator='selected', correction='icepop')
    old = np.zeros((1, 3))
    experience = fixture.experience(
        np.ones((1, 1), np.float32),
        mask=np.ones((1, 3), bool),
        old=old,
        ref=None,
        sampler=np.array([[0.0, -2, 0]]),
        entropy=None,
    )
    np.testing.assert_allclose(algorithms.gradient_coefficients(method, jnp.asarray(old), experience), [[0.5, 0, 0.5]])


def test_a_correction_weighs_the_kl_only_on_request():
    # A = 0, so the loss is the KL's: beta k3 times 1, or times min(rho, 2) = 2 on one token and e^-.9 on the other
    log_rho, ref = np.array([[1.8, -0.9]]), np.array([[0.5, 0.5]])
    k3 = np.exp(0.5) - 1.5
    for corrected, factors in [(False, [1, 1]), (True, [2, np.exp(-0.9)])]:
        method = fixture.algorithm('grpo', weights='token_mean', correction='truncated', kl_corrected=corrected)
        experience = fixture.experience(
            np.zeros((1, 1), np.float32), mask=np.ones((1, 2), bool), old=np.zeros((1, 2)), ref=ref, sampler=-log_rho
        )
        loss = fixture.loss_and_gradient(method, experience, np.zeros((1, 2)))[0]
        assert loss == pytest.approx(0.04 * k3 * np.mean(factors), rel=1e-5)


# LLDS


def test_llds_gates_each_span_of_a_row_by_itself():
    # two spans around a gap: the first lost .3 and won .1, the second lost .1 and won .4; A < 0 in the second row
    log_ratio = jnp.array([[-0.3, 0.1, -9.0, -0.1, 0.4]] * 2)
    mask = jnp.array([[1, 1, 0, 1, 1]] * 2, bool)
    term = functools.partial(regularizers.llds, llds_coef=0.2)
    np.testing.assert_allclose(
        term(log_ratio, jnp.array([[1.0], [-1.0]]), mask), [[0.06, 0, 0, 0, 0], [0] * 5], rtol=1e-6, atol=1e-9
    )
    slope = jax.grad(lambda x: jnp.sum(term(x, jnp.array([[0.0], [-1.0]]), mask)))(log_ratio)
    np.testing.assert_allclose(slope, [[-0.2, 0, 0, 0, 0], [0] * 5], rtol=1e-6)


def test_a_tool_output_parts_a_completion_into_spans():
    # through the loss: without the forced token, rows of 4 tokens lose -.1 in sum and the gate is shut
    method = fixture.algorithm('gpg', weights='token_mean', regularizers=('llds',))
    log_ratio = np.array([[-0.3, 0.1, 0, -0.1, 0.4]])
    experience = fixture.experience(
        np.zeros((1, 1), np.float32), mask=np.ones((1, 5), bool), old=-log_ratio, ref=None, sampler=-log_ratio
    )
    forced = experience.rollout.replace(forced=jnp.array([[0, 0, 1, 0, 0]], bool))
    losses = [
        fixture.loss_and_gradient(method, x, np.zeros((1, 5)))[0]
        for x in (experience, experience.replace(rollout=forced))
    ]
    np.testing.assert_allclose(losses, [0, 0.2 * 0.3 / 4], rtol=1e-6, atol=1e-9)


# pieces of one's own


def test_data_that_is_not_there_is_named():
    def mine(ratio, colour):
        return ratio * colour

    with pytest.raises(TypeError, match='mine reads colour, and there is only advantages, ratio'):
        pieces.call(mine, {'ratio': 1, 'advantages': 2})
    with pytest.raises(TypeError, match='clip reads advantages, and there is only ratio'):
        pieces.call(functools.partial(surrogates.clip, clip_low=0.2, clip_high=0.2), {'ratio': 1})


def test_only_data_that_is_named_is_computed():
    def never():
        raise AssertionError('nobody reads this')

    assert pieces.call(lambda ratio: ratio + 1, {'ratio': lambda: 1, 'covariance': never}) == 2


def test_an_estimator_without_its_data_names_it():
    with pytest.raises(TypeError, match='opo reads mask'):
        algorithms.compute_advantages(fixture.algorithm('opo'), fixture.REWARDS)


def test_an_advantage_and_a_surrogate_of_ones_own():
    # the reward in equal parts over a completion's tokens, and a surrogate -A x^2 / 2 with the slope -A x
    def spread(rewards, mask):
        return rewards[..., None] * mask / mask.sum(-1, keepdims=True)

    def half_square(ratio, advantages):
        return -advantages * ratio**2 / 2

    method = fixture.algorithm('dapo')._replace(advantage=spread, surrogate=half_square)
    found = algorithms.compute_advantages(method, fixture.REWARDS, mask=MASK)
    expected = fixture.REWARDS.reshape(8, 1) * fixture.MASK / fixture.LENGTHS[:, None]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert algorithms.is_by_token(method) and not algorithms.is_by_token(fixture.algorithm('dapo'))
    gradient = fixture.loss_and_gradient(method, fixture.experience(found))[1]
    ratio = np.exp(fixture.LOGPROBS - fixture.OLD)
    np.testing.assert_allclose(gradient, -expected * ratio**2 / 24, rtol=1e-5, atol=1e-9)
