"""Lines of the numerical checklist, P.1 to P.20 of the specification, that no other test holds, and hand numbers of
what presets leave unused."""
import functools

import fixture
from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import advantages, kl, pieces, regularizers, surrogates

MASK = fixture.MASK.reshape(2, 4, 5)
SHUFFLED = np.array([5, 2, 7, 0, 3, 6, 1, 4])
ROW = np.arange(8.0)
# without ties, whose winner hangs on the order, and without one at its group's mean, whose sign hangs on rounding
DISTINCT = np.array([.1, .7, .3, .9, .2, .8, .45, .65])
DATA = dict(
    mask=fixture.MASK, kl=np.where(fixture.MASK, fixture.OLD - fixture.REF, 0), old_entropy=fixture.ENTROPY,
    sampler_logprobs=fixture.SAMPLER, tokens=np.add.outer(np.arange(8), np.arange(5)) % 3,
    values=np.where(fixture.MASK, .1 * np.arange(5), 0), initial_entropy=0.0,
    step_rewards=np.where(fixture.MASK & (np.arange(5) % 2 == 0), np.add.outer(ROW % 3, np.arange(5.0)), np.nan))
ESTIMATORS = sorted(pieces.named(advantages))
WITHIN_GROUPS = ['best_and_worst', 'group_mean', 'group_norm', 'gtpo', 'leave_one_out', 'leave_one_out_norm', 'maxrl',
                 'opo', 'pkpo', 'process', 'xrpo_sharpen']


def method_of(estimator, **numbers):
    numbers = dict(pass_k=2, efficient_share=.5, entropy_cut=5.0) | numbers
    return fixture.algorithm('dapo', advantage=estimator, dead_groups='keep', **numbers)


def of(rows, estimator, rewards=DISTINCT):
    """The data of some of the example's rows [8, ...], with reward parts where the estimator reads them."""
    data = {name: x[rows] if np.ndim(x) else x for name, x in DATA.items()}
    if estimator == 'gdpo':
        data |= dict(parts=np.stack([rewards, ROW % 2])[:, rows], part_weights=np.array([1., .5]))
    return data


def ragged(estimator, group_ids, rows=slice(None), rewards=DISTINCT, **numbers):
    return algorithms.compute_advantages(method_of(estimator, **numbers), rewards[rows],
                                         group_ids=np.asarray(group_ids)[rows], **of(rows, estimator, rewards))


def grouped(estimator, rewards, **numbers):
    """The same of groups of 4, by shape."""
    data = of(slice(None), estimator, rewards)
    shaped = {name: x.reshape(2, 4, 5) for name, x in data.items() if np.shape(x) == (8, 5)}
    if 'parts' in data:
        shaped['parts'] = data['parts'].reshape(2, 2, 4)
    return algorithms.compute_advantages(method_of(estimator, **numbers), rewards.reshape(2, 4), **data | shaped)


# P.3: clamps are counted

@pytest.mark.parametrize('where, share', [([], 0), ([(0, 0)], 1 / 24), ([(0, 0), (4, 2), (7, 3)], 3 / 24),
                                          ([(0, 4), (3, 3)], 0)])
def test_tokens_with_a_clamped_ratio_are_counted(where, share):
    # the last two lie outside the mask
    old = fixture.OLD.copy()
    for place in where:
        old[place] -= 25
    method = fixture.algorithm('dapo')
    metrics = fixture.loss_and_gradient(method, fixture.worked(method, old=old))[2]
    assert metrics['ratio_clamped_share'] == pytest.approx(share)


@pytest.mark.parametrize('ratio, shift', [('sequence_product', 15), ('sequence_geometric', 15),
                                          ('clipped_geometric', 15)])
def test_rows_with_a_clamped_ratio_are_counted(ratio, shift):
    # 2 tokens of 15 nats have a product of e^30, beyond e^20, and a mean of e^15, beyond e^10: no gradient is left
    method = fixture.algorithm('grpo', ratio=ratio, surrogate='importance', log_clip=100.0, **fixture.NO_KL)
    old = fixture.LOGPROBS - np.where(np.arange(8)[:, None] == 0, shift, 0)
    _, gradient, metrics = fixture.loss_and_gradient(method, fixture.worked(method, old=old))
    assert np.all(gradient[0] == 0) and np.all(gradient[1, :4] != 0)
    assert metrics['ratio_clamped_share'] == pytest.approx(2 / 24)


@pytest.mark.parametrize('estimator', ['k2', 'k3'])
@pytest.mark.parametrize('difference', [1., 3., -12., 25.])
def test_tokens_with_a_clamped_kl_are_counted(estimator, difference):
    # with A = 0 the KL alone has a gradient: those that lost it are those that count
    method = fixture.algorithm('grpo', kl=estimator)
    ref = fixture.LOGPROBS + np.where(np.arange(8)[:, None] % 2, difference, .1)
    experience = fixture.experience(np.zeros((8, 1), np.float32), ref=ref)
    _, gradient, metrics = fixture.loss_and_gradient(method, experience)
    assert metrics['kl_clamped_share'] == pytest.approx(np.mean(gradient[fixture.MASK] == 0))


# P.4: long sequences

@pytest.mark.parametrize('preset', ['rloo', 'gspo', 'gspo_token', 'gmpo'])
@pytest.mark.parametrize('drift', [.03, -.03])
def test_sequences_of_4000_tokens_that_drifted_stay_finite(preset, drift):
    method = fixture.algorithm(preset, **fixture.NO_KL)
    logprobs, mask = np.full((4, 4000), -1.0), np.ones((4, 4000), bool)
    experience = fixture.experience(np.array([[1.], [1.], [-1.], [-1.]]), mask=mask, old=logprobs - drift,
                                    ref=logprobs, sampler=logprobs, entropy=logprobs)
    loss, gradient, metrics = fixture.loss_and_gradient(method, experience, logprobs)
    assert np.isfinite(loss) and np.all(np.isfinite(gradient)) and np.all(np.isfinite(list(metrics.values())))
    if preset in ('gspo', 'gspo_token'):
        # the side that clip leaves: e^drift / 4 rows / 4000 tokens
        rows, sign = (slice(2, 4), 1) if drift > 0 else (slice(0, 2), -1)
        np.testing.assert_allclose(gradient[rows], sign * np.exp(drift) / 16000, rtol=1e-3)


# P.5: zeros

@pytest.mark.parametrize('estimator', ESTIMATORS)
@pytest.mark.parametrize('rewards', [np.full(8, .7), ROW * 0, np.full(8, np.nan), np.where(ROW % 4, np.nan, 1),
                                     np.where(ROW < 4, 1, ROW)])
def test_advantages_are_finite_without_minus_zero(estimator, rewards):
    found = grouped(estimator, rewards)
    assert np.all(np.isfinite(found)) and not np.any((found == 0) & np.signbit(found))
    assert np.all(found.reshape(8, -1)[np.isnan(rewards)] == 0)


@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_groups_of_one_give_finite_advantages(estimator):
    # nothing to compare with: 0, except for those whose peers are the batch, or none at all
    found = ragged(estimator, np.arange(8), pass_k=1)
    assert np.all(np.isfinite(found)) and not np.any((found == 0) & np.signbit(found))
    alone = {'ones', 'correct', 'reward', 'reinforce_pp', 'gae', 'gae_by_length'}
    # a completion's steps are compared among themselves
    assert np.any(found) == (estimator in alone | {'process'})


# P.12: gradients of what test_kl leaves out

P, Q = np.array([.5, .3, .2]), np.array([.4, .4, .2])
TRUE = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jnp.log(Q))))(jnp.log(P))


@pytest.mark.parametrize('estimator', [kl.k3_straight_through,
                                       lambda now, ref: kl.k3_importance(now, ref, jnp.exp(now - jnp.log(P)))])
def test_corrected_k3_has_the_gradient_of_the_reverse_kl(estimator):
    def loss(logits):
        return jnp.sum(P * estimator(jax.nn.log_softmax(logits), jnp.log(Q)))

    np.testing.assert_allclose(jax.grad(loss)(jnp.log(P)), TRUE, atol=1e-7)
    np.testing.assert_allclose(loss(jnp.log(P)), .025267, atol=1e-6)


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl():
    # a policy gradient with the reward -k1, over the samples 5, 3 and 2 times of the three tokens
    drawn = np.repeat(np.arange(3), [5, 3, 2])
    method = fixture.algorithm('reinforce', kl='k1', kl_placement='reward_sequence', kl_coef=1.0)
    found = algorithms.compute_advantages(method, np.zeros((1, 10)), mask=np.ones((1, 10, 1), bool),
                                          kl=np.log(P / Q)[drawn][None, :, None])
    experience = fixture.experience(found, mask=np.ones((10, 1), bool), old=None, ref=np.zeros((10, 1)),
                                    sampler=np.zeros((10, 1)), group_ids=np.zeros(10))
    experience = experience.replace(rewards=jnp.zeros(10))

    def loss(logits):
        return algorithms.policy_loss(method, jax.nn.log_softmax(logits)[drawn][:, None], experience)[0]

    np.testing.assert_allclose(jax.grad(loss)(jnp.log(P)), TRUE, atol=1e-6)


# P.13: groups of any size, in any order

@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_group_ids_in_any_order_give_what_the_shape_gives(estimator):
    found = ragged(estimator, np.arange(8) // 4, SHUFFLED)
    np.testing.assert_allclose(found, grouped(estimator, DISTINCT)[SHUFFLED], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('estimator', ESTIMATORS)
@pytest.mark.parametrize('group_ids', [[0, 0, 0, 0, 0, 1, 1, 1], [7, 3, 7, 3, 7, 7, 3, 0]])
def test_order_of_rows_does_not_matter_to_groups_of_unequal_size(estimator, group_ids):
    found = ragged(estimator, group_ids)
    np.testing.assert_allclose(ragged(estimator, group_ids, SHUFFLED), found[SHUFFLED], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('estimator', WITHIN_GROUPS)
def test_each_of_two_unequal_groups_gets_what_it_gets_alone(estimator):
    found = ragged(estimator, [0] * 5 + [1] * 3)
    np.testing.assert_allclose(found[:5], ragged(estimator, [0] * 8, slice(0, 5)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[5:], ragged(estimator, [0] * 8, slice(5, 8)), rtol=1e-6, atol=1e-6)


def centred_by_hand():
    return np.concatenate([DISTINCT[:5] - DISTINCT[:5].mean(), DISTINCT[5:] - DISTINCT[5:].mean()])


def test_batch_statistics_of_unequal_groups_by_hand():
    ids, centred, numbers = [0] * 5 + [1] * 3, centred_by_hand(), dict(std_ddof=0, std_eps=0.0)
    found = {name: ragged(name, ids, **numbers)[:, 0] for name in ('hybrid', 'batch_centred_std')}
    np.testing.assert_allclose(found['hybrid'], centred / DISTINCT.std(), rtol=1e-6)
    np.testing.assert_allclose(found['batch_centred_std'], centred / centred.std(), rtol=1e-6)
    by_token = np.repeat(centred, fixture.LENGTHS)
    np.testing.assert_allclose(ragged('group_mean_batch_std', ids, **numbers)[:, 0],
                               (centred - by_token.mean()) / by_token.std(), rtol=1e-5)


@pytest.mark.parametrize('estimator', ['reinforce_pp', 'gae', 'gae_by_length', 'reward', 'ones', 'correct'])
def test_estimators_that_do_not_compare_do_not_see_the_groups(estimator):
    np.testing.assert_allclose(ragged(estimator, np.arange(8)), ragged(estimator, [0] * 5 + [1] * 3), atol=1e-6)


def test_lambda_of_unequal_groups_ranks_them_by_their_own_pass_rates():
    # 3 of 5 are right and 2 of 3: the second is the efficient half, with lengths 3, 2, 4 of which 3 and 4 are right
    rewards = np.array([1., 1, 1, 0, 0, 1, 0, 1])
    found = ragged('grpo_lambda', [0] * 5 + [1] * 3, rewards=rewards, std_ddof=0, std_eps=0.0)[:, 0]
    shaped = np.array([1 - .2 / (1 + np.e), 0, 1 - .2 / (1 + 1 / np.e)])
    np.testing.assert_allclose(found[5:], (shaped - shaped.mean()) / shaped.std(), rtol=1e-5)
    np.testing.assert_allclose(found[:5], (rewards[:5] - .6) / rewards[:5].std(), rtol=1e-5)


@pytest.mark.parametrize('estimator', [name for name in ESTIMATORS if name not in ('gdpo', 'process')])
def test_an_unscorable_completion_changes_nothing_for_the_others(estimator):
    # "outside every statistic": the others get what they get where it was never sampled
    rewards = np.where(ROW == 2, np.nan, DISTINCT)
    found, left = grouped(estimator, rewards), np.flatnonzero(ROW != 2)
    without = ragged(estimator, np.arange(8) // 4, left)
    np.testing.assert_allclose(found[left], without, rtol=1e-6, atol=1e-6)
    assert np.all(found[2] == 0)


integers = st.lists(st.integers(-5, 5), min_size=8, max_size=8)


@settings(max_examples=30, deadline=None)
@given(integers, st.floats(.1, 10), st.floats(-10, 10),
       st.sampled_from(['leave_one_out_norm', 'hybrid', 'batch_centred_std', 'group_mean_batch_std']))
def test_estimators_over_a_std_do_not_change_under_an_affine_map(rewards, scale, shift, estimator):
    rewards, numbers = np.array(rewards, float), dict(std_eps=1e-12)
    if np.ptp(rewards[:4]) + np.ptp(rewards[4:]) == 0:
        rewards[0] += 1  # without any difference, whitening divides by its own floor
    np.testing.assert_allclose(grouped(estimator, scale * rewards + shift, **numbers),
                               grouped(estimator, rewards, **numbers), rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(integers, st.floats(-10, 10))
def test_opo_does_not_change_under_a_shift(rewards, shift):
    rewards = np.array(rewards, float)
    np.testing.assert_allclose(grouped('opo', rewards + shift), grouped('opo', rewards), rtol=1e-5, atol=1e-5)


def test_maxrl_does_not_change_under_a_scale():
    np.testing.assert_allclose(grouped('maxrl', 7 * DISTINCT, std_eps=0.0), grouped('maxrl', DISTINCT, std_eps=0.0),
                               rtol=1e-6)


# P.14: the first update of a rollout

@pytest.mark.parametrize('preset', fixture.PRESETS)
def test_first_update_is_at_ratio_one_and_has_a_gradient(preset):
    method = fixture.algorithm(preset, fixed_length=5, pass_k=2)
    experience = fixture.worked(method, old=fixture.LOGPROBS, sampler=fixture.LOGPROBS)
    _, gradient, metrics = fixture.loss_and_gradient(method, experience)
    # what clip_low and clip_high count is every lost gradient: a row outside DPO's pair has A = 0 and neither sign
    zero = ('ratio_clamped_share', 'kl_old', 'clip_low_share', 'clip_high_share', 'sampler_gap_max')
    assert [metrics[name] for name in zero] == [0] * 5
    assert (metrics['ratio_mean'], metrics['ratio_max'], metrics['correction_mean']) == (1, 1, 1)
    assert metrics['sampler_ess'] == pytest.approx(1) and np.any(gradient)


# adaptation

@pytest.mark.parametrize('seen, factor', [(.1, 1), (.11, 1.01), (.09, .99), (.12, 1.02), (10., 1.02), (0., .98)])
def test_kl_coefficient_moves_by_the_formula_and_no_further(seen, factor):
    # target .1, 100 rows of a horizon of 1000: 1 + clip(kl / .1 - 1, +-.2) / 10
    method = fixture.algorithm('grpo', kl_target=.1, kl_horizon=1000.0)
    found = algorithms.adapt(method, {'kl_coef': .04, 'entropy_coef': .5}, {'kl_ref': np.float32(seen)}, 100)
    assert found['kl_coef'] == pytest.approx(.04 * factor, rel=1e-5) and found['entropy_coef'] == .5


@pytest.mark.parametrize('seen, before, after', [(.9, .1, .105), (1., .1, .105), (1.1, .1, .095), (3., .1, .095),
                                                 (3., .002, 0)])
def test_entropy_coefficient_moves_by_its_step_and_not_below_zero(seen, before, after):
    method = fixture.algorithm('grpo', regularizers=('entropy_bonus',), entropy_target=1.0)
    found = algorithms.adapt(method, {'kl_coef': .04, 'entropy_coef': np.float32(before)},
                             {'entropy': np.float32(seen)}, 100)
    assert found['entropy_coef'] == pytest.approx(after, abs=1e-7) and found['kl_coef'] == .04


def test_coefficients_without_a_target_stay():
    before = {'kl_coef': .04, 'entropy_coef': .1}
    assert algorithms.adapt(fixture.algorithm('grpo'), before, {}, 100) == before


@pytest.mark.parametrize('entropy, acts', [(.5, True), (2., False)])
def test_entropy_bonus_with_a_target_acts_only_below_it(entropy, acts):
    numbers = dict(regularizers=('entropy_bonus',), entropy_coef=.1)
    method = fixture.algorithm('dapo', entropy_target=1.0, **numbers)
    experience, logprobs = fixture.worked(method), jnp.asarray(fixture.LOGPROBS, jnp.float32)
    loss = algorithms.policy_loss(method, logprobs, experience, jnp.full((8, 5), entropy))[0]
    plain = algorithms.policy_loss(fixture.algorithm('dapo'), logprobs, experience)[0]
    assert float(plain - loss) == pytest.approx(.1 * entropy * acts, abs=1e-6)


# what advantages are made of

KL = np.array([[[.1, .2, 9.], [.3, 9., 9.]]])  # 9 is masked
SHORT = np.array([[[1, 1, 0], [1, 0, 0]]], bool)


def test_kl_of_the_sequence_is_taken_off_the_reward():
    # 1 - .5 (.1 + .2) = .85 and 0 - .5 * .3 = -.15; less their mean .35
    method = fixture.algorithm('dr_grpo', kl='k1', kl_placement='reward_sequence', kl_coef=.5)
    found = algorithms.compute_advantages(method, np.array([[1., 0]]), mask=SHORT, kl=KL)
    np.testing.assert_allclose(found, [[.5], [-.5]], rtol=1e-6)
    twice = algorithms.compute_advantages(method, np.array([[1., .4]]), mask=SHORT, kl=KL * [[[2], [1]]], kl_coef=1.0)
    np.testing.assert_allclose(twice, [[.15], [-.15]], rtol=1e-6)  # 1 - .6 = .4 and .4 - .3 = .1


def test_a_group_of_equal_rewards_and_unequal_kl_has_advantages():
    method = fixture.algorithm('dr_grpo', kl='k1', kl_placement='reward_sequence', kl_coef=1.0)
    found = algorithms.compute_advantages(method, np.ones((1, 2)), mask=SHORT, kl=np.array([[[.1, .3, 0], [.2, 0, 0]]]))
    np.testing.assert_allclose(found, [[-.1], [.1]], rtol=1e-6)


def test_kl_of_the_token_is_taken_off_its_own_reward():
    # row 0: -.05, then 1 - .1 = .9: returns .85, .9; row 1: 0 - .15. Mean .533333, std (ddof 0) .483620
    method = fixture.algorithm('reinforce_pp', kl_coef=.5, std_ddof=0)
    found = algorithms.compute_advantages(method, np.array([[1., 0]]), mask=SHORT, kl=KL)
    np.testing.assert_allclose(found, [[.654786, .758176, 0], [-1.412961, 0, 0]], rtol=0, atol=2e-5)
    # kl_coef of the call, as it adapts, goes before the algorithm's
    free = algorithms.compute_advantages(method, np.array([[1., 0]]), mask=SHORT, kl=KL, kl_coef=0.0)
    np.testing.assert_allclose(free, [[.707107, .707107, 0], [-1.414214, 0, 0]], rtol=0, atol=2e-5)


def test_discount_counts_trained_tokens():
    # one token in between is not trained: 1 at the end is .5 at the token before it and .25 at the first
    mask = np.array([[[1, 1, 0, 1], [1, 0, 0, 0]]], bool)
    method = fixture.algorithm('reinforce_pp', discount=.5, std_ddof=0, **fixture.NO_KL)
    found = algorithms.compute_advantages(method, np.array([[1., 0]]), mask=mask)
    raw = np.array([.25, .5, 1, 0])
    np.testing.assert_allclose(found[mask[0]], (raw - raw.mean()) / raw.std(), rtol=1e-5)


def test_gae_by_length_by_hand():
    # alpha .5: a row of 4 tokens has lambda 1 - 1 / 2, one of 2 tokens 1 - 1 / 1 = 0, one of 1 token not below 0
    mask = np.arange(4) < np.array([4, 2, 1, 4])[:, None]
    values = np.where(mask, [.2, .4, .5, .8], 0.0)
    method = fixture.algorithm('vapo', length_alpha=.5)
    found = algorithms.compute_advantages(method, np.array([[1., 1, 1, 1]]), mask=mask[None], values=values[None])
    half = [.2 + .5 * (.1 + .5 * (.3 + .5 * .2)), .1 + .5 * (.3 + .5 * .2), .3 + .5 * .2, .2]
    raw = np.array([*half, .2, .6, .8, *half])
    np.testing.assert_allclose(found[mask], (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-5)
    assert np.all(found[~mask] == 0)


def test_critic_learns_returns_by_its_own_lambda():
    # lambda 1: the reward to come; lambda 0: the next value
    values, mask = np.array([[[.2, .4, .5, .8]]]), np.ones((1, 1, 4), bool)
    for lambda_, expected in [(1.0, [1, 1, 1, 1]), (0.0, [.4, .5, .8, 1])]:
        method = fixture.algorithm('ppo', critic_lambda=lambda_, **fixture.NO_KL)
        found = algorithms.critic_targets(method, np.array([[1.]]), kl_coef=0.0, mask=mask, values=values)
        np.testing.assert_allclose(found, [expected], rtol=1e-6)


@pytest.mark.parametrize('group, expected', [
    ([1., 0, .5], [1, -1, 0]), ([1., 1, 0, 0], [1, 0, -1, 0]), ([0., 1, 0, 1], [-1, 1, 0, 0]), ([1., 1, 1], [0, 0, 0]),
    ([np.nan, 1, 0], [0, 1, -1]), ([1., np.nan, 1], [0, 0, 0]), ([np.nan] * 3, [0, 0, 0]),
    ([np.nan, 1, np.nan], [0, 0, 0]), ([np.inf, 1, 0], [0, 1, -1])])
def test_best_and_worst_take_the_first_of_equals_and_no_unscorable(group, expected):
    found = algorithms.compute_advantages(fixture.algorithm('dpo'), np.array([group]))
    np.testing.assert_array_equal(found[:, 0], expected)


# two parts of two groups of two: normalized [1, -1], [1, -1] and [-1, 1], [0, 0], the second counted half
PARTS = np.array([[[3., 1], [7, 5]], [[0, .2], [.4, .4]]])


def test_gdpo_by_hand():
    total = np.array([.5, -.5, 1, -1])
    method = fixture.algorithm('grpo', advantage='gdpo', std_ddof=0, std_eps=1e-12, **fixture.NO_KL)
    found = algorithms.compute_advantages(method, PARTS[0], parts=PARTS, part_weights=np.array([1., .5]))
    np.testing.assert_allclose(found[:, 0], total / np.sqrt(.625), rtol=1e-6)


def test_gdpo_leaves_unscorable_completions_out_of_the_batch():
    # a third completion that no part can score: the others as without it
    method = fixture.algorithm('grpo', advantage='gdpo', std_ddof=0, std_eps=1e-12, **fixture.NO_KL)
    parts = np.concatenate([PARTS, np.full((2, 2, 1), np.nan)], -1)
    found = algorithms.compute_advantages(method, parts[0], parts=parts, part_weights=np.array([1., .5]))
    np.testing.assert_allclose(found.reshape(2, 3), np.array([[.5, -.5, 0], [1, -1, 0]]) / np.sqrt(.625), rtol=1e-6)


@pytest.mark.parametrize('bound, expected', [(0., [1, -1, 3, -3]), (2., [1, -1, 2, -2])])
def test_advantages_are_clipped_to_their_bound(bound, expected):
    method = fixture.algorithm('dr_grpo', advantage_clip=bound)
    found = algorithms.compute_advantages(method, np.array([[1., -1], [3, -3]]))
    np.testing.assert_array_equal(found[:, 0], expected)


def test_groups_that_differ_count_for_the_dead_ones():
    # two of three groups are dead, one of them for lack of scores: the third counts three times, alone and by ids
    method = fixture.algorithm('gpg')
    rewards = np.array([[1., 1], [1, np.nan], [1, 0]])
    expected = [0, 0, 0, 0, 1.5, -1.5]
    np.testing.assert_array_equal(algorithms.compute_advantages(method, rewards)[:, 0], expected)
    ids = np.repeat(np.arange(3), 2)
    np.testing.assert_array_equal(algorithms.compute_advantages(method, rewards.reshape(-1), group_ids=ids)[:, 0],
                                  expected)
    assert not np.any(algorithms.compute_advantages(method, rewards[:2]))


# what weights count

@pytest.mark.parametrize('weights, expected', [
    # row 0 keeps 1 of its 2 tokens, row 1 both, row 2 none
    ('token_mean', [[1 / 3, 1 / 3], [1 / 3, 1 / 3], [0, 0]]),
    ('sequence_mean', [[1 / 2, 0], [1 / 4, 1 / 4], [0, 0]])])
def test_denominators_of_selected_tokens_leave_the_others_out(weights, expected):
    selection = jnp.array([[1., 0], [1, 1], [0, 0]])
    method = fixture.algorithm('gpg', weights=weights, denominator='selected')
    method = method._replace(selection=lambda mask: selection)
    experience = fixture.experience(np.ones((3, 1), np.float32), mask=np.ones((3, 2), bool), old=None, ref=None,
                                    sampler=np.zeros((3, 2)), entropy=None)
    pushed = algorithms.gradient_coefficients(method, jnp.zeros((3, 2)), experience)
    np.testing.assert_allclose(pushed, np.array(expected) * selection, rtol=1e-6)
    everyone = algorithms.gradient_coefficients(method._replace(denominator='all'), jnp.zeros((3, 2)), experience)
    np.testing.assert_allclose(everyone, selection / 6, rtol=1e-6)


def test_denominators_of_selected_tokens_leave_masked_out_corrections_out():
    # rho 1, e^2 and 1: icepop drops the second, and each of the two that are left counts a half
    method = fixture.algorithm('gpg', weights='token_mean', denominator='selected', correction='icepop')
    old = np.zeros((1, 3))
    experience = fixture.experience(np.ones((1, 1), np.float32), mask=np.ones((1, 3), bool), old=old, ref=None,
                                    sampler=np.array([[0., -2, 0]]), entropy=None)
    np.testing.assert_allclose(algorithms.gradient_coefficients(method, jnp.asarray(old), experience), [[.5, 0, .5]])


def test_a_correction_weighs_the_kl_only_on_request():
    # A = 0, so the loss is the KL's: beta k3 times 1, or times min(rho, 2) = 2 on one token and e^-.9 on the other
    log_rho, ref = np.array([[1.8, -.9]]), np.array([[.5, .5]])
    k3 = np.exp(.5) - 1.5
    for corrected, factors in [(False, [1, 1]), (True, [2, np.exp(-.9)])]:
        method = fixture.algorithm('grpo', weights='token_mean', correction='truncated', kl_corrected=corrected)
        experience = fixture.experience(np.zeros((1, 1), np.float32), mask=np.ones((1, 2), bool),
                                        old=np.zeros((1, 2)), ref=ref, sampler=-log_rho)
        loss = fixture.loss_and_gradient(method, experience, np.zeros((1, 2)))[0]
        assert loss == pytest.approx(.04 * k3 * np.mean(factors), rel=1e-5)


# LLDS

def test_llds_gates_each_span_of_a_row_by_itself():
    # two spans around a gap: the first lost .3 and won .1, the second lost .1 and won .4; A < 0 in the second row
    log_ratio = jnp.array([[-.3, .1, -9., -.1, .4]] * 2)
    mask = jnp.array([[1, 1, 0, 1, 1]] * 2, bool)
    term = functools.partial(regularizers.llds, llds_coef=.2)
    np.testing.assert_allclose(term(log_ratio, jnp.array([[1.], [-1.]]), mask), [[.06, 0, 0, 0, 0], [0] * 5],
                               rtol=1e-6, atol=1e-9)
    slope = jax.grad(lambda x: jnp.sum(term(x, jnp.array([[0.], [-1.]]), mask)))(log_ratio)
    np.testing.assert_allclose(slope, [[-.2, 0, 0, 0, 0], [0] * 5], rtol=1e-6)


def test_a_tool_output_parts_a_completion_into_spans():
    # through the loss: without the forced token, rows of 4 tokens lose -.1 in sum and the gate is shut
    method = fixture.algorithm('gpg', weights='token_mean', regularizers=('llds',))
    log_ratio = np.array([[-.3, .1, 0, -.1, .4]])
    experience = fixture.experience(np.zeros((1, 1), np.float32), mask=np.ones((1, 5), bool), old=-log_ratio, ref=None,
                                    sampler=-log_ratio)
    forced = experience.rollout.replace(forced=jnp.array([[0, 0, 1, 0, 0]], bool))
    losses = [fixture.loss_and_gradient(method, x, np.zeros((1, 5)))[0]
              for x in (experience, experience.replace(rollout=forced))]
    np.testing.assert_allclose(losses, [0, .2 * .3 / 4], rtol=1e-6, atol=1e-9)


# pieces of one's own

def test_data_that_is_not_there_is_named():
    def mine(ratio, colour):
        return ratio * colour

    with pytest.raises(TypeError, match='mine reads colour, and there is only advantages, ratio'):
        pieces.call(mine, {'ratio': 1, 'advantages': 2})
    with pytest.raises(TypeError, match='clip reads advantages, and there is only ratio'):
        pieces.call(functools.partial(surrogates.clip, clip_low=.2, clip_high=.2), {'ratio': 1})


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
        return -advantages * ratio ** 2 / 2

    method = fixture.algorithm('dapo')._replace(advantage=spread, surrogate=half_square)
    found = algorithms.compute_advantages(method, fixture.REWARDS, mask=MASK)
    expected = fixture.REWARDS.reshape(8, 1) * fixture.MASK / fixture.LENGTHS[:, None]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert algorithms.by_token(method) and not algorithms.by_token(fixture.algorithm('dapo'))
    gradient = fixture.loss_and_gradient(method, fixture.experience(found))[1]
    ratio = np.exp(fixture.LOGPROBS - fixture.OLD)
    np.testing.assert_allclose(gradient, -expected * ratio ** 2 / 24, rtol=1e-5, atol=1e-9)
