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


@pytest.mark.parametrize('k', [-1, 0, 5])
def test_more_draws_than_completions_are_refused(k):
    with pytest.raises(BadInput, match=rf'k of pass@k = {k}: must lie between 1 and the 4'):
        statistics.pass_at_k(np.ones((2, 4), bool), k)


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


def test_equal_answers_of_other_spelling_are_joined():
    def same(a, b):
        return {a, b} in ({'1/2', '0.5'}, {'0.5', '.5'}, {'1/3', '0.333333'})

    answers = np.array([['1/2', '.5', '2', '0.5', None], ['1/3', '2', '0.333333', '2', '2']], object)
    joined = statistics.join_equal(answers, same)
    # 1/2 and .5 are joined by 0.5, which comes after them
    assert joined.tolist() == [['1/2', '1/2', '2', '1/2', None], ['1/3', '2', '1/3', '2', '2']]
    assert answers[0, 1] == '.5'
    correct = np.array([[1, 1, 0, 1, 0], [0, 1, 0, 1, 1]], bool)
    np.testing.assert_array_equal(statistics.majority(joined, correct), [1, 1])


def proportion(values, level=0.95):
    return np.array(statistics.proportion_interval(np.reshape(values, (len(values), -1)), level=level))[:, 0]


def test_intervals_of_proportions_are_wilsons():
    # 0 of 10: (0, z^2 / (n + z^2)); 1 of 10 after Newcombe 1998
    np.testing.assert_allclose(proportion([0.0] * 10), [0, 3.841459 / 13.841459], atol=1e-6)
    np.testing.assert_allclose(proportion([1.0] * 10), [10 / 13.841459, 1], atol=1e-6)
    np.testing.assert_allclose(proportion([1.0] + [0.0] * 19), [0.0089, 0.2361], atol=1e-4)
    np.testing.assert_allclose(proportion([1.0] + [np.nan] * 9 + [0.0] * 19), [0.0089, 0.2361], atol=1e-4)


def test_intervals_hold_at_rare_events():
    rng = np.random.default_rng(0)
    shares = {'greedy': rng.random((30, 4000)) < 0.05}
    for concentration in (0.1, 0.5, 2, 20):  # from prompts that are solved always or never, to prompts all alike
        chances = rng.beta(0.05 * concentration, 0.95 * concentration, (30, 4000))
        shares[f'pass@1 {concentration}'] = rng.binomial(8, chances) / 8
    covered, drawn = {}, {}
    for name, values in shares.items():
        low, high = statistics.proportion_interval(values.astype(float), level=0.95)
        covered[name] = np.mean((low <= 0.05) & (0.05 <= high))
        low, high = interval(values[:, :400].astype(float), resamples=400)
        drawn[name] = np.mean((low <= 0.05) & (0.05 <= high))
    assert min(covered.values()) >= 0.92, covered
    assert min(drawn.values()) < 0.85  # which is why draws are not used


def test_more_completions_of_a_prompt_make_intervals_shorter():
    rng = np.random.default_rng(1)
    once, often = proportion(rng.random(100) < 0.3), proportion(rng.binomial(32, 0.3, 100) / 32)
    assert np.diff(often) < np.diff(once) / 2


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
