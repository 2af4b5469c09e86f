"""Figures of an evaluation: against enumeration, by hand, and on data whose answer is known."""

import collections
import itertools
import math

import numpy as np
import pytest

from grpo_jax import statistics
from grpo_jax.errors import BadInput


@pytest.mark.parametrize('n', range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_correct_one(n):
    for k in range(1, n + 1):
        rows = np.array([np.arange(n) < c for c in range(n + 1)])
        enumerated = [
            np.mean([row[list(chosen)].any() for chosen in itertools.combinations(range(n), k)]) for row in rows
        ]
        np.testing.assert_allclose(statistics.pass_at_k(rows, k), enumerated, rtol=1e-14)


def test_pass_at_k_by_hand():
    # algorithms.md section K: n = 8, c = 3
    correct = np.array([[True, False, True, False, True, False, False, False]])
    found = [statistics.pass_at_k(correct, k)[0] for k in (1, 2, 4, 6)]
    np.testing.assert_allclose(found, [0.375, 0.642857, 0.928571, 1.0], atol=1e-6)


def test_pass_at_1_is_exactly_the_mean_and_many_samples_do_not_overflow():
    correct = np.random.default_rng(0).random((50, 1000)) < np.linspace(0, 1, 50)[:, None]
    np.testing.assert_array_equal(statistics.pass_at_k(correct, 1), correct.sum(1) / 1000)
    for k in (2, 500, 1000):
        found = statistics.pass_at_k(correct, k)
        assert np.isfinite(found).all() and found[0] == 0 and found[-1] == 1
        assert (np.diff(found[np.argsort(correct.sum(1))]) >= 0).all()


def vote(answers, correct):
    """The mean over all orders of a plurality vote that the first of the most frequent wins, with its first sample."""
    won = []
    for order in itertools.permutations(range(len(answers))):
        said = [answers[i] for i in order if answers[i] is not None]
        if not said:
            return 0.0
        winner = collections.Counter(said).most_common(1)[0][0]
        won.append(correct[next(i for i in order if answers[i] == winner)])
    return np.mean(won)


def test_majority_is_the_mean_of_a_vote_over_all_orders():
    rng = np.random.default_rng(1)
    answers = rng.choice(np.array(['a', 'b', 'c', None], object), (20, 5))
    for gold in ('a', 'b'):
        np.testing.assert_allclose(
            statistics.majority(answers, answers == gold), [vote(row, row == gold) for row in answers]
        )
    correct = rng.random((20, 5)) < 0.5  # a stricter reading may tell apart completions with the same answer
    np.testing.assert_allclose(statistics.majority(answers, correct), list(map(vote, answers, correct)))


@pytest.mark.parametrize(
    'answers, correct, expected',
    [
        (['1', '1', '2', None], [1, 1, 0, 0], 1),
        (['1', '2', '2', None], [1, 0, 0, 0], 0),
        (['1', '2', None, None], [1, 0, 0, 0], 1 / 2),
        (['1', '2', '3', '3', '2', '1'], [0, 1, 0, 0, 1, 0], 1 / 3),
        (['1', None, None, None], [1, 0, 0, 0], 1),  # what cannot be read does not vote
        ([None, None], [0, 0], 0),
        ([None, None], [1, 1], 0),
        (['1', '1', '2'], [1, 0, 1], 1 / 2),
    ],
)  # not all that say 1 are correct
def test_majority_by_hand(answers, correct, expected):
    found = statistics.majority(np.array([answers], object), np.array([correct], bool))
    np.testing.assert_allclose(found, [expected])


def test_averages_are_of_what_is_a_number():
    found = statistics.average(np.array([[1.0, np.nan], [np.nan, np.nan], [1.0, 2.0]]))
    np.testing.assert_array_equal(found, [1.0, np.nan, 1.5])
    np.testing.assert_array_equal(statistics.average(np.array([[True, False]])), [0.5])


def interval(values, level=0.95, resamples=2000, seed=0):
    low, high = statistics.bootstrap(np.reshape(values, (len(values), -1)), level=level, resamples=resamples, seed=seed)
    return np.array([low, high])


def test_interval_of_what_all_prompts_agree_on_has_no_width():
    np.testing.assert_allclose(interval([[0.3, 1.0]] * 20), [[0.3, 1.0]] * 2, rtol=1e-12)


def test_interval_of_two_prompts_by_hand():
    # means of two draws from 0 and 1: 0, 1/2 and 1 with chances 1/4, 1/2, 1/4
    np.testing.assert_array_equal(interval([0.0, 1.0])[:, 0], [0, 1])
    np.testing.assert_array_equal(interval([0.0, 1.0], level=0.4)[:, 0], [0.5, 0.5])


def test_interval_of_a_proportion_is_its_standard_error_to_both_sides():
    values = np.arange(400) < 120
    error = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    np.testing.assert_allclose(interval(values)[:, 0], [0.3 - error, 0.3 + error], atol=0.005)


def test_intervals_cover_the_truth_as_often_as_they_say():
    runs = np.random.default_rng(2).random((80, 1000))  # 1000 evaluations of 80 prompts
    for level in (0.8, 0.95):
        low, high = interval(runs, level=level, resamples=500)
        # 0.013 is the standard error of 1000 evaluations; short samples cover a little less
        assert np.mean((low < 0.5) & (0.5 < high)) == pytest.approx(level, abs=0.035)


def test_intervals_hang_on_the_seed_and_on_no_other_figure():
    values = np.random.default_rng(3).random((30, 3))
    np.testing.assert_array_equal(interval(values), interval(values))
    # another number of columns is another product of matrices, whose last bits depend on the machine
    np.testing.assert_allclose(interval(values[:, 1:2]), interval(values)[:, 1:2], rtol=1e-12)
    assert (interval(values) != interval(values, seed=1)).all()


def test_prompts_without_a_value_count_in_no_mean():
    values = np.random.default_rng(4).random(200)
    some = np.where(np.arange(200) % 2, values, np.nan)
    (low,), (high,) = interval(some)
    assert low < np.nanmean(some) < high
    assert high - low == pytest.approx(2 * 1.96 * np.nanstd(some) / 10, rel=0.15)  # of 100 prompts, not of 200
    np.testing.assert_allclose(interval([0.7] + [np.nan] * 9)[:, 0], [0.7, 0.7], rtol=1e-12)


def test_a_ratio_is_bounded_by_draws_of_rows_with_their_sizes():
    # two rows, 0 of 1 and 3 of 3: draws of both, or of one twice, give 0, 3/4 and 1 with chances 1/4, 1/2, 1/4
    totals, sizes = np.array([[0], [3]]), np.array([[1], [3]])
    for tail, expected in [(0.025, (0, 1)), (0.3, (0.75, 0.75))]:
        low, high = statistics.bootstrap_ratio(totals, sizes, tail=tail, resamples=2000, seed=0)
        assert (low[0], high[0]) == expected


def test_precision_and_recall_by_hand():
    predicted, actual = np.array([True, True, True, False]), np.array([True, True, False, False])
    assert statistics.precision_recall(predicted, actual) == {'precision': 2 / 3, 'recall': 1.0, 'f1': 4 / 5}
    nothing = np.zeros(2, bool)
    assert statistics.precision_recall(nothing, nothing) == {'precision': 0, 'recall': 0, 'f1': 0}


@pytest.mark.parametrize('k', [0, -1, 5])
def test_pass_at_k_of_more_than_was_sampled_is_refused(k):
    with pytest.raises(BadInput, match=rf'pass@k = {k}.*the 4 completions'):
        statistics.pass_at_k(np.ones((2, 4), bool), k)


def test_a_share_has_wilsons_interval():
    # 3 of 30: a spread of 30 p (1 - p), so 30 (29 + 3) / (30 + 3) trials; 2.045230 is Student's quantile of 29
    low, high = statistics.share_interval(np.repeat([1.0, 0.0], [3, 27]), level=0.95)
    z, n, p = 2.045230, 30 * 32 / 33, 0.1
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = [(p + z * z / (2 * n) + sign * half) / (1 + z * z / n) for sign in (-1, 1)]
    np.testing.assert_allclose([low, high], expected, rtol=1e-5)
    for value in (0.0, 1.0):  # an event that was never seen may occur
        low, high = statistics.share_interval(np.full(30, value), level=0.95)
        assert low <= value <= high and high - low == pytest.approx(z * z / (30 + z * z), rel=1e-4)
    low, high = statistics.share_interval(np.array([0.5, np.nan]), level=0.95)  # one prompt says next to nothing
    assert low < 0.05 and high > 0.95


@pytest.mark.parametrize('samples, alike', [(1, 1e9), (8, 1e9), (8, 0.5), (8, 2.0)])
@pytest.mark.parametrize('rate', [0.05, 0.5])
def test_intervals_of_shares_hold_what_they_say(samples, alike, rate):
    # 30 prompts whose own rates are spread as a beta distribution of this concentration
    rng = np.random.default_rng(0)
    rates = np.clip(rng.beta(rate * alike, (1 - rate) * alike, (2000, 30)), 0, 1) if alike < 1e9 else rate
    shares = rng.binomial(samples, rates, (2000, 30)) / samples
    intervals = np.array([statistics.share_interval(row, level=0.95) for row in shares])
    least = 0.92 if alike >= 2 else 0.9  # where the few prompts that have any right are most of what there is to see
    assert np.mean((intervals[:, 0] <= rate) & (rate <= intervals[:, 1])) >= least


def test_the_interval_of_a_mean_is_students():
    # mean 2, standard deviation 1, t of two degrees of freedom 4.30265: half width 4.30265 / sqrt(3)
    low, high = statistics.mean_interval(np.array([1.0, 2.0, 3.0]), level=0.95)
    assert (low, high) == (pytest.approx(2 - 2.48414, abs=1e-4), pytest.approx(2 + 2.48414, abs=1e-4))
    assert statistics.mean_interval(np.array([1.0, 1.0]), level=0.95) == (1.0, 1.0)
    assert statistics.mean_interval(np.array([1.0]), level=0.95) == (-math.inf, math.inf)
