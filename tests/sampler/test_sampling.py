"""The token distribution: what truncation keeps, what is drawn how often, and whose noise it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from grpo_jax.sampler import sampling

PROBABILITIES = np.array([0.1, 0.4, 0.2, 0.3])
LOGITS = np.log([0.02, 0.3, 0.08, 0.2, 0.05, 0.15, 0.12, 0.08])
WHOLE = dict(top_p=1.0, top_k=0, min_p=0.0)


def kept(probabilities, **options):
    """The set of tokens that truncation leaves."""
    logprobs = sampling.truncate(jnp.log(jnp.asarray(probabilities))[None], **WHOLE | options)[0]
    return set(np.flatnonzero(np.isfinite(logprobs)).tolist())


@pytest.mark.parametrize(
    'options, expected',
    [
        ({}, {0, 1, 2, 3}),
        (dict(top_k=1), {1}),
        (dict(top_k=2), {1, 3}),
        (dict(top_k=9), {0, 1, 2, 3}),
        (dict(top_p=0.05), {1}),  # never empty
        (dict(top_p=0.39), {1}),
        (dict(top_p=0.41), {1, 3}),  # the token that crosses the bound stays in
        (dict(top_p=0.69), {1, 3}),
        (dict(top_p=0.71), {1, 2, 3}),
        (dict(top_p=0.91), {0, 1, 2, 3}),
        (dict(min_p=0.2), {0, 1, 2, 3}),  # at least .08
        (dict(min_p=0.3), {1, 2, 3}),  # at least .12
        (dict(min_p=0.6), {1, 3}),  # at least .24
        (dict(min_p=1.0), {1}),
        (dict(top_k=2, top_p=0.55), {1}),  # renormalized .571 and .429: the best alone reaches .55
        (dict(min_p=0.6, top_p=0.55), {1}),
        (dict(top_k=3, min_p=0.6), {1, 3}),
    ],
)
def test_truncation_keeps_the_hand_made_set(options, expected):
    assert kept(PROBABILITIES, **options) == expected


def test_ties_at_the_bound_are_all_kept():
    assert kept([0.3, 0.3, 0.3, 0.1], top_k=2) == {0, 1, 2}
    assert kept([0.3, 0.3, 0.3, 0.1], top_p=0.5) == {0, 1, 2}


def test_kept_tokens_keep_their_logprobs_and_rows_are_truncated_apart():
    logprobs = jnp.log(jnp.asarray([PROBABILITIES, PROBABILITIES[::-1]]))
    truncated = sampling.truncate(logprobs, **WHOLE | dict(top_k=2))
    inside = jnp.asarray([[0, 1, 0, 1], [1, 0, 1, 0]], bool)
    np.testing.assert_array_equal(truncated, jnp.where(inside, logprobs, -jnp.inf))


def draw(count, *, temperature=1.0, seed=0, **options):
    """(tokens, logprobs) of `count` rows of LOGITS, each with its own key."""
    keys = jax.random.split(jax.random.key(seed), count)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (count, len(LOGITS)))
    tokens = sampling.draw(logits, keys, temperature=temperature, **WHOLE | options)
    return jax.device_get((tokens, sampling.logprob(logits, tokens, temperature)))


@pytest.mark.parametrize(
    'temperature, options, survivors',
    [
        (1.0, {}, range(8)),
        (0.7, {}, range(8)),
        (1.5, {}, range(8)),
        (1.0, dict(top_k=3), [1, 3, 5]),
        (1.0, dict(top_p=0.6), [1, 3, 5]),  # .3 .5 .65
        (0.5, dict(top_p=0.6), [1, 3]),  # squares .09 .04 .0225 .0144 ... of .1830: .492 .710
        (1.0, dict(min_p=0.35), [1, 3, 5, 6]),  # at least .105
    ],
)
def test_draws_follow_the_exact_distribution(temperature, options, survivors):
    # 8000 draws under a fixed key: a right sampler fails this bound for one key in a thousand
    tokens, _ = draw(8000, temperature=temperature, **options)
    exact = np.zeros(8)
    exact[list(survivors)] = np.exp(LOGITS[list(survivors)] / temperature)
    assert_follow(tokens, exact)


def assert_follow(tokens, weights):
    """Counts of 8000 draws fit the distribution that is proportional to the weights."""
    exact, counts = weights / weights.sum(), np.bincount(tokens, minlength=8)
    assert np.all(counts[exact == 0] == 0)
    assert stats.chisquare(counts[exact > 0], 8000 * exact[exact > 0]).pvalue > 1e-3


SIGNED = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5])


def draw_of(logits):
    """8000 draws of logits f32[8]."""
    keys = jax.random.split(jax.random.key(0), 8000)
    return jax.device_get(sampling.draw(jnp.broadcast_to(logits, (8000, 8)), keys, temperature=1.0, **WHOLE))


def test_draws_under_a_repetition_penalty_follow_the_exact_distribution():
    # seen tokens of positive logit are divided by 2, of negative ones doubled: both become rarer
    seen = jnp.isin(jnp.arange(8), jnp.asarray([0, 2, 4, 6]))
    penalized = sampling.penalize(jnp.asarray(SIGNED, jnp.float32)[None], seen[None], 2.0)[0]
    assert penalized.tolist() == [1, 1, 0.25, 0, -1, -1, -4, 1.5]
    assert_follow(draw_of(penalized), np.exp([1, 1, 0.25, 0, -1, -1, -4, 1.5]))


def test_a_penalty_of_one_changes_nothing():
    logits = jnp.asarray(SIGNED, jnp.float32)[None]
    np.testing.assert_array_equal(sampling.penalize(logits, jnp.ones((1, 8), bool), 1.0), logits)


def test_draws_without_banned_tokens_follow_the_rest_of_the_distribution():
    banned = np.isin(np.arange(8), [0, 5])
    assert_follow(
        draw_of(jnp.where(banned, sampling.NEVER_DRAWN, jnp.asarray(SIGNED, jnp.float32))),
        np.where(banned, 0, np.exp(SIGNED)),
    )


def test_truncation_counts_only_tokens_that_are_not_banned():
    logprobs = jnp.log(jnp.asarray(PROBABILITIES)).at[1].set(sampling.NEVER_DRAWN)
    survivors = [
        sampling.truncate(logprobs[None], **WHOLE | options)[0] > sampling.NEVER_DRAWN
        for options in (dict(top_k=2), dict(top_p=0.6), dict(min_p=0.5))
    ]
    # .1 .2 .3 are left, renormalized .167 .333 .5
    assert [np.flatnonzero(kept_).tolist() for kept_ in survivors] == [[2, 3], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    'options, expected',
    [
        ({}, False),
        (dict(top_p=0.9), True),
        (dict(top_k=5), True),
        (dict(min_p=0.1), True),
        (dict(repetition_penalty=1.1), True),
        (dict(min_tokens=3), True),
        (dict(thinking_tokens=3), False),
    ],
)
def test_sampling_says_whether_it_draws_from_another_distribution(options, expected):
    assert sampling.Sampling(0.7, 8, (1,), 0, **options).truncates == expected


def test_wrong_distribution_would_be_noticed():
    counts = np.bincount(draw(8000)[0], minlength=8)
    nearby = np.exp(LOGITS / 1.1) / np.exp(LOGITS / 1.1).sum()
    assert stats.chisquare(counts, 8000 * nearby).pvalue < 1e-3


@pytest.mark.parametrize('temperature, options', [(1.0, {}), (0.7, {}), (0.7, dict(top_p=0.6)), (1.0, dict(top_k=2))])
def test_logprobs_are_those_of_the_scaled_untruncated_distribution(temperature, options):
    tokens, logprobs = draw(50, temperature=temperature, **options)
    expected = np.log(np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum())
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-6)


def test_temperature_zero_takes_the_best_token_with_its_logprob_at_one():
    tokens, logprobs = draw(5, temperature=0.0)
    assert tokens.tolist() == [1] * 5
    np.testing.assert_allclose(logprobs, np.log(0.3), atol=1e-6)


def test_token_hangs_on_its_own_key_alone():
    assert draw(20)[0].tolist()[:5] == [int(_single(jax.random.split(jax.random.key(0), 20)[row])) for row in range(5)]


def _single(key):
    return sampling.draw(jnp.asarray(LOGITS, jnp.float32)[None], key[None], temperature=1.0, **WHOLE)[0]
