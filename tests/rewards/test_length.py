"""Shaping by length: numbers worked out by hand, then properties."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from grpo_jax.rewards import length

SHAPES = [
    (length.overlong, dict(limit=100, margin=20)),
    (length.kimi, {}),
    (length.mean_scaled, {}),
    (length.cosine, dict(limit=100, right=(1.0, 0.5), wrong=(-1.0, -0.5))),
]


def cosine(lengths, correct, **changes):
    return length.cosine(np.array(lengths), np.array(correct), **dict(SHAPES)[length.cosine] | changes)


def test_overlong_punishment_by_hand():
    found = length.overlong(np.array([[80, 85, 90, 100, 101]]), np.zeros((1, 5), bool), limit=100, margin=20)
    np.testing.assert_allclose(found, [[0, -0.25, -0.5, -1, -1]])


def test_kimi_length_reward_by_hand():
    correct = np.array([[True, False, True, False]])
    found = length.kimi(np.array([[100, 150, 200, 300]]), correct)
    np.testing.assert_allclose(found, [[0.5, 0, 0, -0.5]])
    np.testing.assert_array_equal(length.kimi(np.full((1, 4), 7), correct), np.zeros((1, 4)))


def test_cosine_by_hand():
    # 1 + cos(0, pi/3, pi/2, 2 pi/3, pi) = 2, 1.5, 1, .5, 0; right: .5 + .25 of that, less 1; wrong: -.5 - .25 of it
    lengths = [[0, 100, 150, 200, 300]]
    np.testing.assert_allclose(cosine(lengths, [[True] * 5], limit=300), [[0, -0.125, -0.25, -0.375, -0.5]], atol=1e-12)
    np.testing.assert_allclose(
        cosine(lengths, [[False] * 5], limit=300), [[-1, -0.875, -0.75, -0.625, -0.5]], atol=1e-12
    )


def test_cosine_stays_at_its_end_beyond_the_limit():
    # the cosine itself would come back up
    np.testing.assert_allclose(cosine([[100, 150, 200]], [[True, True, False]]), [[-0.5, -0.5, -0.5]])


def test_cosine_replaces_the_reward_of_correctness():
    # total = reward + term is the value of the range that the verdict chooses
    correct = np.array([[True, False]])
    total = correct * 1.0 + cosine([[0, 0]], correct, right=(2.0, 1.0), wrong=(-10.0, 0.0))
    np.testing.assert_allclose(total, [[2, -10]])


def test_mean_scaled_by_hand():
    # shares 1/2 and 0 of the groups are correct; n / max n: .25, 1 and .5, 1
    found = length.mean_scaled(np.array([[10, 40], [20, 40]]), np.array([[True, False], [False, False]]))
    np.testing.assert_allclose(found, [[-0.125, -0.5], [0, 0]])


@pytest.mark.parametrize('shape', [length.kimi, length.mean_scaled])
def test_groups_of_empty_completions_are_not_shaped(shape):
    correct = np.array([[True, False]])
    np.testing.assert_array_equal(shape(np.zeros((1, 2), int), correct), [[0, 0]])


# up to its own limit a longer right completion never gets more, whatever the shape
LENGTHS = st.lists(st.integers(1, 100), min_size=2, max_size=8)


@pytest.mark.parametrize('shape, numbers', SHAPES)
@given(lengths=LENGTHS)
def test_longer_right_completions_never_get_more(shape, numbers, lengths):
    lengths = np.sort(np.array([lengths]), 1)
    found = shape(lengths, np.ones(lengths.shape, bool), **numbers)
    assert found.shape == lengths.shape and found.dtype == np.float64
    assert np.all(np.diff(found) <= 1e-12)


@given(lengths=LENGTHS, right=st.integers(0, 255))
def test_groups_do_not_see_each_other(lengths, right):
    correct = np.array([[bool(right >> i & 1) for i in range(len(lengths))]])
    alone = np.array([lengths])
    for shape, numbers in SHAPES:
        both = shape(np.concatenate([alone, alone + 50]), np.concatenate([correct, ~correct]), **numbers)
        np.testing.assert_allclose(both[:1], shape(alone, correct, **numbers), atol=1e-12)
