"""Figures of evaluations: pass@k, majority votes, means, intervals over prompts or examples, and those of classifiers.

N prompts, n completions of each; a figure has one number a prompt, and its value is their mean.
"""

import collections
import math

from jaxtyping import Bool, Float, Shaped
import numpy as np

from grpo_jax.errors import BadInput

PRIOR = 3  # prompts, in the variance of shares


def pass_at_k(correct: Bool[np.ndarray, 'N n'], k: int) -> Float[np.ndarray, ' N']:
    """1 - C(n - c, k) / C(n, k): the chance that k of the n completions hold one of the c correct ones.

    Unbiased (arXiv 2107.03374, eq. 1). pass@1 is c / n, which others call avg@n. BadInput for a k outside 1..n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise BadInput('pass@k', k, f'k must lie between 1 and the {n} completions of a prompt; sample more')
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


def average(values: Shaped[np.ndarray, 'N n']) -> Float[np.ndarray, ' N']:
    """Means over the finite values of each row, NaN for a row without one."""
    return np.ma.masked_invalid(values).mean(1).filled(np.nan)


def share_interval(values: Shaped[np.ndarray, ' N'], *, level: float) -> tuple[float, float]:
    """(low, high) of the mean of N prompts' shares in [0, 1]; NaN is no value.

    Wilson's interval, with Student's quantile, for as many trials as have the variance that the prompts' shares have;
    PRIOR prompts more count as either 0 or 1, since few prompts show too little of it. Unlike the bootstrap's, it keeps
    its level where an event is rare, and has a width where none was seen.
    """
    import scipy.special  # a third of a second

    known = values[np.isfinite(values)]
    count, mean, trials = len(known), float(known.mean()), float(len(known))
    spread = float(np.sum((known - mean) ** 2))
    if spread > 0:
        binomial = mean * (1 - mean)
        trials = count * binomial * (count - 1 + PRIOR) / (spread + PRIOR * binomial)
    z = float(scipy.special.stdtrit(max(count - 1, 1), (1 + level) / 2))
    centre, scale = mean + z**2 / (2 * trials), 1 + z**2 / trials
    half = z * math.sqrt(mean * (1 - mean) / trials + z**2 / (4 * trials**2))
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)


def mean_interval(values: Shaped[np.ndarray, ' n'], *, level: float) -> tuple[float, float]:
    """(low, high) of the mean of n independent numbers, by Student's t; infinite for a single one."""
    import scipy.special

    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return -math.inf, math.inf
    half = float(scipy.special.stdtrit(count - 1, (1 + level) / 2) * np.std(values, ddof=1) / math.sqrt(count))
    return mean - half, mean + half


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
