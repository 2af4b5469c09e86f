"""Figures of evaluations: pass@k, majority votes, means, intervals over prompts or examples, and those of classifiers.

N prompts, n completions of each; a figure has one number a prompt, and its value is their mean.
"""

import collections
from collections.abc import Callable
import math
from statistics import NormalDist

from jaxtyping import Bool, Float, Shaped
import numpy as np

from grpo_jax.errors import BadInput

PRIOR = 10  # prompts of the widest spread that proportions add to those of a sample


def pass_at_k(correct: Bool[np.ndarray, 'N n'], k: int) -> Float[np.ndarray, ' N']:
    """1 - C(n - c, k) / C(n, k): the chance that k of the n completions hold one of the c correct ones.

    Unbiased (arXiv 2107.03374, eq. 1). pass@1 is c / n, which others call avg@n. BadInput for k below 1 or above n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise BadInput('k of pass@k', k, f'must lie between 1 and the {n} completions of a prompt')
    ways = math.comb(n, k)  # in whole numbers, so that each chance is rounded once
    chances = np.array([(ways - math.comb(n - c, k)) / ways for c in range(n + 1)])
    return chances[correct.sum(1)]


def majority(answers: Shaped[np.ndarray, 'N n'], correct: Bool[np.ndarray, 'N n']) -> Float[np.ndarray, ' N']:
    """The share of correct completions among those with the most frequent answer.

    Answers are str or None. None does not vote, and without any vote nothing is correct. A tie is a fair draw: the
    answers that are most frequent count alike.
    """
    shares = np.zeros(len(answers))
    for row, (texts, hits) in enumerate(zip(answers, correct, strict=True)):
        votes = collections.Counter(text for text in texts if text is not None)
        if votes:
            most = max(votes.values())
            shares[row] = np.mean([hit for text, hit in zip(texts, hits, strict=True) if votes[text] == most])
    return shares


def join_equal(answers: Shaped[np.ndarray, 'N n'], same: Callable[[str, str], bool]) -> Shaped[np.ndarray, 'N n']:
    """The answers, str or None, where those of a row that are the same answer have one spelling, their first.

    Answers that a third one is the same as are joined too.
    """
    joined = answers.copy()
    for row, texts in enumerate(answers):
        spelling = {}
        for text in dict.fromkeys(text for text in texts if text is not None):
            equal = dict.fromkeys(first for other, first in spelling.items() if same(other, text))
            first = next(iter(equal), text)
            spelling[text] = first
            spelling |= {other: first for other, old in spelling.items() if old in equal}
        joined[row] = [spelling.get(text) for text in texts]
    return joined


def average(values: Shaped[np.ndarray, 'N n']) -> Float[np.ndarray, ' N']:
    """Means over the finite values of each row, NaN for a row without one."""
    return np.ma.masked_invalid(values).mean(1).filled(np.nan)


def proportion_interval(
    values: Shaped[np.ndarray, 'N F'], *, level: float
) -> tuple[Float[np.ndarray, ' F'], Float[np.ndarray, ' F']]:
    """(low, high): Wilson's score intervals of the means over N prompts of F figures within 0 and 1; NaN is no value.

    They hold at rare events, where draws of prompts do not: a figure of all zeros has a width. Prompts with shares of
    several completions count as the number of yes-or-no prompts of the same variance, toward which PRIOR prompts of a
    yes or a no draw the variance of the sample.
    """
    known = np.isfinite(values)
    n = known.sum(0).astype(np.float64)
    with np.errstate(invalid='ignore', divide='ignore'):
        mean = np.where(known, values, 0.0).sum(0) / n
        widest = mean * (1 - mean)
        variance = np.where(known, (values - mean) ** 2, 0.0).sum(0) / (n - 1)
        share = np.where((widest > 0) & (n > 1), np.minimum(variance / widest, 1), 1.0)
        effective = n * (n + PRIOR) / (n * share + PRIOR)
        z = NormalDist().inv_cdf((1 + level) / 2)
        centre = (mean + z**2 / 2 / effective) / (1 + z**2 / effective)
        half = z / (1 + z**2 / effective) * np.sqrt(widest / effective + (z / 2 / effective) ** 2)
    return np.maximum(centre - half, 0), np.minimum(centre + half, 1)


def bootstrap(
    values: Shaped[np.ndarray, 'N F'], *, level: float, resamples: int, seed: int
) -> tuple[Float[np.ndarray, ' F'], Float[np.ndarray, ' F']]:
    """(low, high): percentile intervals of the means over N prompts of F figures; NaN is no value."""
    known = np.isfinite(values)
    return bootstrap_ratio(np.where(known, values, 0.0), known, tail=(1 - level) / 2, resamples=resamples, seed=seed)


def bootstrap_ratio(
    totals: Shaped[np.ndarray, 'N F'], sizes: Shaped[np.ndarray, 'N F'], *, tail: float, resamples: int, seed: int
) -> tuple[Float[np.ndarray, ' F'], Float[np.ndarray, ' F']]:
    """(low, high): percentile intervals of sum(totals) / sum(sizes), which leave out the share `tail` on either side.

    A resample draws N rows with replacement, the same ones for every figure; one without any size does not count. What
    all rows agree on has an interval of no width: nothing is known of rows that were not seen.
    """
    rows = len(totals)
    drawn = np.random.default_rng(seed).integers(rows, size=(resamples, rows))
    drawn += rows * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.float64)
    with np.errstate(invalid='ignore'):
        means = counts @ totals / (counts @ sizes)
    low, high = np.nanquantile(means, [tail, 1 - tail], axis=0)
    return low, high


def auc(values: Shaped[np.ndarray, ' n'], right: Bool[np.ndarray, ' n']) -> float | None:
    """The chance that a right one has a higher value than a wrong one, ties counting half; None without one of either.

    The area under the curve of true over false positives, which is Mann and Whitney's U over all pairs.
    """
    import scipy.stats  # half a second

    good, bad = values[right], values[~right]
    if not len(good) or not len(bad):
        return None
    return float(scipy.stats.mannwhitneyu(good, bad, method='asymptotic').statistic / len(good) / len(bad))


def precision_recall(predicted: Bool[np.ndarray, ' n'], actual: Bool[np.ndarray, ' n']) -> dict[str, float]:
    """{'precision', 'recall', 'f1'} of predictions; 0 where there is nothing to divide by."""
    hits = int(np.sum(predicted & actual))
    return {
        'precision': hits / max(int(predicted.sum()), 1),
        'recall': hits / max(int(actual.sum()), 1),
        'f1': 2 * hits / max(int(predicted.sum() + actual.sum()), 1),
    }
