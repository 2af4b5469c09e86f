"""Advantages against hand numbers, then properties that hold for any rewards."""

import fixture
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import group_math

EPS = 1e-6
ESTIMATORS = ['group_norm', 'group_mean', 'leave_one_out']


def advantages(rewards, name, **numbers):
    """f32[P, G] through the public entry point."""
    method = fixture.algorithm_with('grpo', numbers, advantage=name)
    values = algorithms.compute_advantages(method, np.array(rewards))
    dead = group_math.find_equal(np.array(rewards))
    assert values.dtype == np.float32 and values.shape == (np.size(rewards), 1)
    assert dead.shape == (len(rewards),)
    return values.reshape(np.shape(rewards))


@pytest.mark.parametrize(
    'name, numbers, expected',
    [
        (
            'group_norm',
            dict(std_ddof=0, std_eps=EPS),
            [[0.999998, -0.999998, -0.999998, 0.999998], [0.577349, 0.577349, 0.577349, -1.732047]],
        ),
        (
            'group_norm',
            dict(std_ddof=1, std_eps=EPS),
            [[0.866024, -0.866024, -0.866024, 0.866024], [0.499999, 0.499999, 0.499999, -1.499997]],
        ),
        ('group_mean', {}, [[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75]]),
        ('leave_one_out', {}, [[0.666667, -0.666667, -0.666667, 0.666667], [0.333333, 0.333333, 0.333333, -1]]),
    ],
)
def test_estimator_gives_the_worked_numbers(name, numbers, expected):
    np.testing.assert_allclose(advantages(fixture.REWARDS, name, **numbers), expected, **fixture.ROUNDED)


@pytest.mark.parametrize(
    'preset, expected',
    [
        ('grpo', [0.866024, -0.866024, 0.499999, -1.499997]),  # ddof 1 is the default
        ('dapo', [0.866024, -0.866024, 0.499999, -1.499997]),
        ('dr_grpo', [0.5, -0.5, 0.25, -0.75]),
        ('rloo', [0.666667, -0.666667, 0.333333, -1]),
    ],
)
def test_preset_uses_its_papers_estimator(preset, expected):
    values = fixture.worked(fixture.algorithm(preset, **fixture.NO_KL)).advantages
    dead = group_math.find_equal(fixture.REWARDS)
    np.testing.assert_allclose(values[[0, 1, 4, 7], 0], expected, **fixture.ROUNDED)
    assert not dead.any()


@pytest.mark.parametrize('ddof, right, wrong', [(0, 0.774597, -1.290994), (1, 0.724569, -1.207615)])
def test_textbook_group_of_eight(ddof, right, wrong):
    # 5 of 8 right: mean .625, std sqrt(.625 * .375) = .484123 (ddof 0), .517549 (ddof 1)
    rewards = np.array([[1, 0, 1, 0, 1, 1, 0, 1.0]])
    values = advantages(rewards, 'group_norm', std_ddof=ddof, std_eps=1e-12)
    np.testing.assert_allclose(values, np.where(rewards == 1, right, wrong), **fixture.ROUNDED)


@pytest.mark.parametrize('hits', [1, 2, 5, 7])
def test_binary_rewards_give_the_odds(hits):
    # A+ = sqrt((1 - p) / p) and A- = -sqrt(p / (1 - p)) for a share p of right completions
    p = hits / 8
    values = advantages([[1.0] * hits + [0.0] * (8 - hits)], 'group_norm', std_ddof=0, std_eps=1e-12)
    np.testing.assert_allclose(values[0, 0], np.sqrt((1 - p) / p), rtol=1e-6)
    np.testing.assert_allclose(values[0, -1], -np.sqrt(p / (1 - p)), rtol=1e-6)


def test_almost_equal_rewards_are_not_dead():
    # mean .99975 and std .0005 (ddof 1): (1 - .99975) / .0005 = .5; a floor on the std would give less
    values = advantages([[1, 1, 1, 0.999]], 'group_norm', std_ddof=1, std_eps=1e-9)
    np.testing.assert_allclose(values, [[0.5, 0.5, 0.5, -1.5]], rtol=1e-5)


@pytest.mark.parametrize('name', ESTIMATORS)
@pytest.mark.parametrize('value', [0.1, 0.7, 1 / 3, 0.0, -1.0, 1e6])
@pytest.mark.parametrize('size', [4, 6, 64])
def test_dead_group_has_advantage_exactly_plus_zero(name, value, size):
    # 0.7 in float has a mean that is not 0.7, and a tiny std: eps alone would make advantages of about 1 from rounding
    rewards = np.stack([np.full(size, value), np.arange(size) % 2])
    values = advantages(rewards, name, std_eps=1e-9)
    assert values[0].tobytes() == np.zeros(size, np.float32).tobytes()  # bytes: -0.0 == 0.0
    assert np.all(values[1] != 0)
    dead = group_math.find_equal(rewards)
    np.testing.assert_array_equal(dead, [True, False])


def test_float32_rewards_of_a_dead_group_are_dead():
    values = advantages(np.full((1, 64), 0.7, np.float32), 'group_norm', std_eps=1e-9)
    assert values.tobytes() == np.zeros(64, np.float32).tobytes()


@pytest.mark.parametrize('name', ESTIMATORS)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_unscorable_completion_is_left_out_of_its_group(name, bad):
    # the others must get what they would get in a group of three, and the unscorable one exactly 0
    values = advantages([[1, bad, 0, 1]], name)
    np.testing.assert_array_equal(values[0, [0, 2, 3]], advantages([[1.0, 0, 1]], name)[0])
    assert values[0, 1] == 0


@pytest.mark.parametrize('name', ESTIMATORS)
@pytest.mark.parametrize('group', [[np.nan] * 4, [np.nan, np.nan, 1, np.nan], [1, np.nan, 1, 1]])
def test_group_without_two_different_scores_is_dead(name, group):
    method = fixture.algorithm('grpo', advantage=name)
    values = algorithms.compute_advantages(method, np.array([group, [0.0, 1, 0, 1]]))
    dead = group_math.find_equal(np.array([group, [0.0, 1, 0, 1]]))
    assert values[:4].tobytes() == np.zeros(4, np.float32).tobytes()
    np.testing.assert_array_equal(dead, [True, False])


def test_integer_rewards_are_accepted():
    np.testing.assert_array_equal(advantages([[1, 0, 0, 1]], 'group_mean'), [[0.5, -0.5, -0.5, 0.5]])


def test_groups_do_not_see_each_other():
    alone = advantages(fixture.REWARDS[1:], 'group_norm')
    together = advantages(np.concatenate([100 * fixture.REWARDS, fixture.REWARDS[1:]]), 'group_norm')
    np.testing.assert_array_equal(together[2:], alone)


groups = st.integers(2, 16).flatmap(
    lambda g: st.lists(st.lists(st.integers(-5, 5), min_size=g, max_size=g), min_size=1, max_size=4)
)


@settings(max_examples=50, deadline=None)
@given(groups, st.floats(0.1, 10), st.floats(-10, 10))
def test_group_norm_does_not_change_under_an_affine_map(rewards, scale, shift):
    rewards = np.array(rewards, float)
    np.testing.assert_allclose(
        advantages(scale * rewards + shift, 'group_norm', std_eps=1e-12),
        advantages(rewards, 'group_norm', std_eps=1e-12),
        rtol=1e-5,
        atol=1e-5,
    )


@settings(max_examples=50, deadline=None)
@given(groups, st.floats(-10, 10), st.sampled_from(['group_mean', 'leave_one_out']))
def test_other_estimators_do_not_change_under_a_shift(rewards, shift, name):
    rewards = np.array(rewards, float)
    np.testing.assert_allclose(advantages(rewards + shift, name), advantages(rewards, name), rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(groups, st.floats(0.1, 10), st.sampled_from(['group_mean', 'leave_one_out']))
def test_other_estimators_scale_with_the_rewards(rewards, scale, name):
    rewards = np.array(rewards, float)
    np.testing.assert_allclose(
        advantages(scale * rewards, name), scale * advantages(rewards, name), rtol=1e-5, atol=1e-5
    )


@settings(max_examples=50, deadline=None)
@given(groups)
def test_leave_one_out_is_a_multiple_of_group_mean(rewards):
    # r - mean of the others = (G r - sum) / (G - 1) = G / (G - 1) (r - mean)
    rewards = np.array(rewards, float)
    size = rewards.shape[1]
    others = (rewards.sum(1, keepdims=True) - rewards) / (size - 1)
    values = advantages(rewards, 'leave_one_out')
    np.testing.assert_allclose(values, rewards - others, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values, size / (size - 1) * advantages(rewards, 'group_mean'), rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(groups, st.sampled_from(ESTIMATORS))
def test_advantages_of_a_group_sum_to_zero_and_are_finite(rewards, name):
    values = advantages(rewards, name)
    assert np.all(np.isfinite(values))
    np.testing.assert_allclose(values.sum(1), 0, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(groups, st.randoms(use_true_random=False), st.sampled_from(ESTIMATORS))
def test_order_within_a_group_does_not_matter(rewards, random, name):
    rewards = np.array(rewards, float)
    order = list(range(rewards.shape[1]))
    random.shuffle(order)
    np.testing.assert_allclose(
        advantages(rewards[:, order], name), advantages(rewards, name)[:, order], rtol=1e-5, atol=1e-6
    )
