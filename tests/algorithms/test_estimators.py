"""Estimators in unequal groups, with completions that no reward could score, and by hand (specification P.5, P.13)."""

import fixture
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import advantages, pieces
from grpo_jax.learner import critic

MASK = fixture.MASK.reshape(2, 4, 5)
SHUFFLED = np.array([5, 2, 7, 0, 3, 6, 1, 4])
ROW = np.arange(8.0)
# without ties, whose winner hangs on the order, and without one at its group's mean, whose sign hangs on rounding
DISTINCT = np.array([0.1, 0.7, 0.3, 0.9, 0.2, 0.8, 0.45, 0.65])
DATA = dict(
    mask=fixture.MASK,
    kl=np.where(fixture.MASK, fixture.OLD - fixture.REF, 0),
    old_entropy=fixture.ENTROPY,
    sampler_logprobs=fixture.SAMPLER,
    tokens=np.add.outer(np.arange(8), np.arange(5)) % 3,
    values=np.where(fixture.MASK, 0.1 * np.arange(5), 0),
    initial_entropy=0.0,
    run_baseline=0.35,
    prompt_baselines=np.where(np.arange(8) < 4, 0.15, 0.55),
    step_rewards=np.where(fixture.MASK & (np.arange(5) % 2 == 0), np.add.outer(ROW % 3, np.arange(5.0)), np.nan),
)
ESTIMATORS = sorted(pieces.list_pieces(advantages))
WITHIN_GROUPS = [
    'best_and_worst',
    'group_mean',
    'group_norm',
    'gtpo',
    'leave_one_out',
    'leave_one_out_norm',
    'maxrl',
    'opo',
    'pkpo',
    'process',
    'xrpo_sharpen',
]


def method_of(estimator, **numbers):
    numbers = dict(pass_k=2, efficient_share=0.5, entropy_cut=5.0) | numbers
    return fixture.algorithm_with('dapo', numbers, advantage=estimator, dead_groups='keep')


def of(rows, estimator, rewards=DISTINCT):
    """The data of some of the example's rows [8, ...], with reward parts where the estimator reads them."""
    data = {name: x[rows] if np.ndim(x) else x for name, x in DATA.items()}
    if estimator == 'gdpo':
        data |= dict(parts=np.stack([rewards, ROW % 2])[:, rows], part_weights=np.array([1.0, 0.5]))
    return data


def ragged(estimator, group_ids, rows=slice(None), rewards=DISTINCT, **numbers):
    return algorithms.compute_advantages(
        method_of(estimator, **numbers),
        rewards[rows],
        group_ids=np.asarray(group_ids)[rows],
        **of(rows, estimator, rewards),
    )


def grouped(estimator, rewards, **numbers):
    """The same of groups of 4, by shape."""
    data = of(slice(None), estimator, rewards)
    shaped = {name: x.reshape(2, 4, *x.shape[1:]) for name, x in data.items() if len(np.shape(x)) and len(x) == 8}
    if 'parts' in data:
        shaped['parts'] = data['parts'].reshape(2, 2, 4)
    return algorithms.compute_advantages(method_of(estimator, **numbers), rewards.reshape(2, 4), **data | shaped)


# P.5: zeros


@pytest.mark.parametrize('estimator', ESTIMATORS)
@pytest.mark.parametrize(
    'rewards', [np.full(8, 0.7), ROW * 0, np.full(8, np.nan), np.where(ROW % 4, np.nan, 1), np.where(ROW < 4, 1, ROW)]
)
def test_advantages_are_finite_without_minus_zero(estimator, rewards):
    found = grouped(estimator, rewards)
    assert np.all(np.isfinite(found)) and not np.any((found == 0) & np.signbit(found))
    assert np.all(found.reshape(8, -1)[np.isnan(rewards)] == (estimator == 'ones'))


@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_groups_of_one_give_finite_advantages(estimator):
    # nothing to compare with: 0, except for those whose peers are the batch, or none at all
    found = ragged(estimator, np.arange(8), rewards=1 + DISTINCT, pass_k=1)
    assert np.all(np.isfinite(found)) and not np.any((found == 0) & np.signbit(found))
    alone = {'ones', 'correct', 'reward', 'moving_mean', 'prompt_moving_mean', 'reinforce_pp', 'gae', 'gae_by_length'}
    # a completion's steps are compared among themselves
    assert np.any(found) == (estimator in alone | {'process'})


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
    ids, centred, numbers = [0] * 5 + [1] * 3, centred_by_hand(), dict(std_ddof=0, std_eps=1e-12)
    found = {name: ragged(name, ids, **numbers)[:, 0] for name in ('hybrid', 'batch_centred_std')}
    np.testing.assert_allclose(found['hybrid'], centred / DISTINCT.std(), rtol=1e-6)
    np.testing.assert_allclose(found['batch_centred_std'], centred / centred.std(), rtol=1e-6)
    by_token = np.repeat(centred, fixture.LENGTHS)
    np.testing.assert_allclose(
        ragged('group_mean_batch_std', ids, **numbers)[:, 0], (centred - by_token.mean()) / by_token.std(), rtol=1e-5
    )


@pytest.mark.parametrize(
    'estimator',
    ['reinforce_pp', 'gae', 'gae_by_length', 'reward', 'moving_mean', 'prompt_moving_mean', 'ones', 'correct'],
)
def test_estimators_that_do_not_compare_do_not_see_the_groups(estimator):
    np.testing.assert_allclose(ragged(estimator, np.arange(8)), ragged(estimator, [0] * 5 + [1] * 3), atol=1e-6)


def test_lambda_of_unequal_groups_ranks_them_by_their_own_pass_rates():
    # 3 of 5 are right and 2 of 3: the second is the efficient half, with lengths 3, 2, 4 of which 3 and 4 are right
    rewards = np.array([1.0, 1, 1, 0, 0, 1, 0, 1])
    found = ragged('grpo_lambda', [0] * 5 + [1] * 3, rewards=rewards, std_ddof=0, std_eps=1e-12)[:, 0]
    shaped = np.array([1 - 0.2 / (1 + np.e), 0, 1 - 0.2 / (1 + 1 / np.e)])
    np.testing.assert_allclose(found[5:], (shaped - shaped.mean()) / shaped.std(), rtol=1e-5)
    np.testing.assert_allclose(found[:5], (rewards[:5] - 0.6) / rewards[:5].std(), rtol=1e-5)


@pytest.mark.parametrize('estimator', [name for name in ESTIMATORS if name not in ('gdpo', 'process')])
def test_an_unscorable_completion_changes_nothing_for_the_others(estimator):
    # "outside every statistic": the others get what they get where it was never sampled
    rewards = np.where(ROW == 2, np.nan, DISTINCT)
    found, left = grouped(estimator, rewards), np.flatnonzero(ROW != 2)
    without = ragged(estimator, np.arange(8) // 4, left)
    np.testing.assert_allclose(found[left], without, rtol=1e-6, atol=1e-6)
    assert np.all(found[2] == (estimator == 'ones'))  # which imitates, whatever the reward


integers = st.lists(st.integers(-5, 5), min_size=8, max_size=8)


@settings(max_examples=30, deadline=None)
@given(
    integers,
    st.floats(0.1, 10),
    st.floats(-10, 10),
    st.sampled_from(['leave_one_out_norm', 'hybrid', 'batch_centred_std', 'group_mean_batch_std']),
)
def test_estimators_over_a_std_do_not_change_under_an_affine_map(rewards, scale, shift, estimator):
    rewards, numbers = np.array(rewards, float), dict(std_eps=1e-12)
    if np.ptp(rewards[:4]) + np.ptp(rewards[4:]) == 0:
        rewards[0] += 1  # without any difference, whitening divides by its own floor
    np.testing.assert_allclose(
        grouped(estimator, scale * rewards + shift, **numbers),
        grouped(estimator, rewards, **numbers),
        rtol=1e-4,
        atol=1e-4,
    )


@settings(max_examples=30, deadline=None)
@given(integers, st.floats(-10, 10))
def test_opo_does_not_change_under_a_shift(rewards, shift):
    rewards = np.array(rewards, float)
    np.testing.assert_allclose(grouped('opo', rewards + shift), grouped('opo', rewards), rtol=1e-5, atol=1e-5)


def test_maxrl_does_not_change_under_a_scale():
    np.testing.assert_allclose(
        grouped('maxrl', 7 * DISTINCT, std_eps=1e-12), grouped('maxrl', DISTINCT, std_eps=1e-12), rtol=1e-6
    )


# what advantages are made of

KL = np.array([[[0.1, 0.2, 9.0], [0.3, 9.0, 9.0]]])  # 9 is masked
SHORT = np.array([[[1, 1, 0], [1, 0, 0]]], bool)


def test_kl_of_the_sequence_is_taken_off_the_reward():
    # 1 - .5 (.1 + .2) = .85 and 0 - .5 * .3 = -.15; less their mean .35
    method = fixture.algorithm('dr_grpo', kl='k1', kl_placement='reward_sequence', kl_coef=0.5)
    found = algorithms.compute_advantages(method, np.array([[1.0, 0]]), mask=SHORT, kl=KL)
    np.testing.assert_allclose(found, [[0.5], [-0.5]], rtol=1e-6)
    twice = algorithms.compute_advantages(method, np.array([[1.0, 0.4]]), mask=SHORT, kl=KL * [[[2], [1]]], kl_coef=1.0)
    np.testing.assert_allclose(twice, [[0.15], [-0.15]], rtol=1e-6)  # 1 - .6 = .4 and .4 - .3 = .1


@pytest.mark.parametrize('preset, size', [('dr_grpo', 0.5), ('grpo', 0.5 / (np.sqrt(0.5) + 1e-6))])
def test_kl_of_the_token_is_taken_off_an_advantage_by_row(preset, size):
    # group_norm: +-.5 over the std (ddof 1) .707107 + 1e-6
    method = fixture.algorithm(preset, kl='k1', kl_placement='reward_token', kl_coef=0.5)
    found = algorithms.compute_advantages(method, np.array([[1.0, 0]]), mask=SHORT, kl=KL)
    expected = [[size - 0.05, size - 0.1], [-size - 0.15]]
    np.testing.assert_allclose(found[0, :2], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1, :1], expected[1], rtol=1e-6)
    twice = algorithms.compute_advantages(method, np.array([[1.0, 0]]), mask=SHORT, kl=KL, kl_coef=1.0)
    np.testing.assert_allclose(twice[SHORT[0]] - found[SHORT[0]], -0.5 * KL[SHORT], rtol=1e-5)
    # in a dead group the KL alone is left, and of an unscorable completion nothing
    dead = algorithms.compute_advantages(method, np.array([[1.0, 1]]), mask=SHORT, kl=KL)
    np.testing.assert_allclose(dead[SHORT[0]], -0.5 * KL[SHORT], rtol=1e-6)
    unknown = algorithms.compute_advantages(method, np.array([[np.nan, 1]]), mask=SHORT, kl=KL)
    assert not unknown[0].any() and unknown[1, 0] == np.float32(-0.15)


def test_a_group_of_equal_rewards_and_unequal_kl_has_advantages():
    method = fixture.algorithm('dr_grpo', kl='k1', kl_placement='reward_sequence', kl_coef=1.0)
    found = algorithms.compute_advantages(
        method, np.ones((1, 2)), mask=SHORT, kl=np.array([[[0.1, 0.3, 0], [0.2, 0, 0]]])
    )
    np.testing.assert_allclose(found, [[-0.1], [0.1]], rtol=1e-6)


def test_kl_of_the_token_is_taken_off_its_own_reward():
    # row 0: -.05, then 1 - .1 = .9: returns .85, .9; row 1: 0 - .15. Mean .533333, std (ddof 0) .483620
    method = fixture.algorithm('reinforce_pp', kl_coef=0.5, std_ddof=0)
    found = algorithms.compute_advantages(method, np.array([[1.0, 0]]), mask=SHORT, kl=KL)
    np.testing.assert_allclose(found, [[0.654786, 0.758176, 0], [-1.412961, 0, 0]], rtol=0, atol=2e-5)
    # kl_coef of the call, as it adapts, goes before the algorithm's
    free = algorithms.compute_advantages(method, np.array([[1.0, 0]]), mask=SHORT, kl=KL, kl_coef=0.0)
    np.testing.assert_allclose(free, [[0.707107, 0.707107, 0], [-1.414214, 0, 0]], rtol=0, atol=2e-5)


def test_discount_counts_trained_tokens():
    # one token in between is not trained: 1 at the end is .5 at the token before it and .25 at the first
    mask = np.array([[[1, 1, 0, 1], [1, 0, 0, 0]]], bool)
    method = fixture.algorithm('reinforce_pp', discount=0.5, std_ddof=0, **fixture.NO_KL)
    found = algorithms.compute_advantages(method, np.array([[1.0, 0]]), mask=mask)
    raw = np.array([0.25, 0.5, 1, 0])
    np.testing.assert_allclose(found[mask[0]], (raw - raw.mean()) / raw.std(), rtol=1e-5)


def test_gae_by_length_by_hand():
    # alpha .5: a row of 4 tokens has lambda 1 - 1 / 2, one of 2 tokens 1 - 1 / 1 = 0, one of 1 token not below 0
    mask = np.arange(4) < np.array([4, 2, 1, 4])[:, None]
    values = np.where(mask, [0.2, 0.4, 0.5, 0.8], 0.0)
    method = fixture.algorithm('vapo', length_alpha=0.5)
    found = algorithms.compute_advantages(method, np.array([[1.0, 1, 1, 1]]), mask=mask[None], values=values[None])
    half = [0.2 + 0.5 * (0.1 + 0.5 * (0.3 + 0.5 * 0.2)), 0.1 + 0.5 * (0.3 + 0.5 * 0.2), 0.3 + 0.5 * 0.2, 0.2]
    raw = np.array([*half, 0.2, 0.6, 0.8, *half])
    np.testing.assert_allclose(found[mask], (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-5)
    assert np.all(found[~mask] == 0)


def test_critic_learns_returns_by_its_own_lambda():
    # lambda 1: the reward to come; lambda 0: the next value
    values, mask = np.array([[[0.2, 0.4, 0.5, 0.8]]]), np.ones((1, 1, 4), bool)
    for lambda_, expected in [(1.0, [1, 1, 1, 1]), (0.0, [0.4, 0.5, 0.8, 1])]:
        method = fixture.algorithm('ppo', critic_lambda=lambda_, **fixture.NO_KL)
        found = critic.critic_targets(method, np.array([[1.0]]), kl_coef=0.0, mask=mask, values=values)
        np.testing.assert_allclose(found, [expected], rtol=1e-6)


@pytest.mark.parametrize(
    'group, expected',
    [
        ([1.0, 0, 0.5], [1, -1, 0]),
        ([1.0, 1, 0, 0], [1, 0, -1, 0]),
        ([0.0, 1, 0, 1], [-1, 1, 0, 0]),
        ([1.0, 1, 1], [0, 0, 0]),
        ([np.nan, 1, 0], [0, 1, -1]),
        ([1.0, np.nan, 1], [0, 0, 0]),
        ([np.nan] * 3, [0, 0, 0]),
        ([np.nan, 1, np.nan], [0, 0, 0]),
        ([np.inf, 1, 0], [0, 1, -1]),
    ],
)
def test_best_and_worst_take_the_first_of_equals_and_no_unscorable(group, expected):
    found = algorithms.compute_advantages(fixture.algorithm('dpo'), np.array([group]))
    np.testing.assert_array_equal(found[:, 0], expected)


# two parts of two groups of two: normalized [1, -1], [1, -1] and [-1, 1], [0, 0], the second counted half
PARTS = np.array([[[3.0, 1], [7, 5]], [[0, 0.2], [0.4, 0.4]]])


def test_gdpo_by_hand():
    total = np.array([0.5, -0.5, 1, -1])
    method = fixture.algorithm('grpo', advantage='gdpo', std_ddof=0, std_eps=1e-12, **fixture.NO_KL)
    found = algorithms.compute_advantages(method, PARTS[0], parts=PARTS, part_weights=np.array([1.0, 0.5]))
    np.testing.assert_allclose(found[:, 0], total / np.sqrt(0.625), rtol=1e-6)


def test_gdpo_leaves_unscorable_completions_out_of_the_batch():
    # a third completion that no part can score: the others as without it
    method = fixture.algorithm('grpo', advantage='gdpo', std_ddof=0, std_eps=1e-12, **fixture.NO_KL)
    parts = np.concatenate([PARTS, np.full((2, 2, 1), np.nan)], -1)
    found = algorithms.compute_advantages(method, parts[0], parts=parts, part_weights=np.array([1.0, 0.5]))
    np.testing.assert_allclose(found.reshape(2, 3), np.array([[0.5, -0.5, 0], [1, -1, 0]]) / np.sqrt(0.625), rtol=1e-6)


def test_gdpo_leaves_a_completion_that_one_part_cannot_judge_out_of_the_other_parts_too():
    method = fixture.algorithm('grpo', advantage='gdpo', std_ddof=0, std_eps=1e-12, **fixture.NO_KL)
    parts = np.concatenate([PARTS, np.array([[[np.nan], [np.nan]], [[7.0], [7.0]]])], -1)
    rewards = np.concatenate([PARTS[0], np.full((2, 1), np.nan)], -1)
    found = algorithms.compute_advantages(method, rewards, parts=parts, part_weights=np.array([1.0, 0.5]))
    np.testing.assert_allclose(found.reshape(2, 3), np.array([[0.5, -0.5, 0], [1, -1, 0]]) / np.sqrt(0.625), rtol=1e-6)


@pytest.mark.parametrize('bound, expected', [(0.0, [1, -1, 3, -3]), (2.0, [1, -1, 2, -2])])
def test_advantages_are_clipped_to_their_bound(bound, expected):
    method = fixture.algorithm('dr_grpo', advantage_clip=bound)
    found = algorithms.compute_advantages(method, np.array([[1.0, -1], [3, -3]]))
    np.testing.assert_array_equal(found[:, 0], expected)


def test_groups_that_differ_count_for_the_dead_ones():
    # two of three groups are dead, one of them for lack of scores: the third counts three times, alone and by ids
    method = fixture.algorithm('gpg')
    rewards = np.array([[1.0, 1], [1, np.nan], [1, 0]])
    expected = [0, 0, 0, 0, 1.5, -1.5]
    np.testing.assert_array_equal(algorithms.compute_advantages(method, rewards)[:, 0], expected)
    ids = np.repeat(np.arange(3), 2)
    np.testing.assert_array_equal(
        algorithms.compute_advantages(method, rewards.reshape(-1), group_ids=ids)[:, 0], expected
    )
    assert not np.any(algorithms.compute_advantages(method, rewards[:2]))
