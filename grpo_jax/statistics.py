"""Statistics of evaluations: pass@k, majority votes, means, confidence intervals, and scores of classifiers.

There are N prompts with n completions each. A figure has one number a prompt, and its value is the mean of these.
"""

import collections
import math

from jaxtyping import Bool, Float, Shaped
import numpy as np

from grpo_jax.errors import BadInput

PRIOR = 3  # how many prompts are added to the variance of shares; see share_interval


def pass_at_k(correct: Bool[np.ndarray, 'N n'], k: int) -> Float[np.ndarray, ' N']:
    """1 - C(n - c, k) / C(n, k) for c correct of n completions: the chance that k random ones hold a correct one.

    Unbiased (arXiv 2107.03374, eq. 1). pass@1 is c / n, which others call avg@n. Raises BadInput for a k outside 1..n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise BadInput('pass@k', k, f'k must lie between 1 and the {n} completions of a prompt; sample more')
    ways = math.comb(n, k)  # in whole numbers, so that each chance is rounded once
    chances = np.array([(ways - math.comb(n - c, k)) / ways for c in range(n + 1)])
    return chances[correct.sum(1)]


def majority(answers: Shaped[np.ndarray, 'N n'], correct: Bool[np.ndarray, 'N n']) -> Float[np.ndarray, ' N']:
    """The share of correct completions among those with the most frequent answer.

    Answers are str or None. None does not vote, and without any vote the share is 0. After a tie, the completions with
    any of the most frequent answers count alike.
    """
    shares = np.zeros(len(answers))
    for row, (texts, hits) in enumerate(zip(answers, correct, strict=True)):
        votes = collections.Counter(text for text in texts if text is not None)
        if votes:
            most = max(votes.values())
            shares[row] = np.mean([hit for text, hit in zip(texts, hits, strict=True) if votes[text] == most])
    return shares


def average(values: Shaped[np.ndarray, 'N n']) -> Float[np.ndarray, ' N']:
    """The mean over each row's finite values, NaN for a row without any."""
    return np.ma.masked_invalid(values).mean(1).filled(np.nan)


def share_interval(values: Shaped[np.ndarray, ' N'], *, level: float) -> tuple[float, float]:
    """(low, high): a confidence interval of the mean over N prompts' shares in [0, 1]; NaN shares are left out.

    It is Wilson's interval with Student's quantile. Its number of trials is the one for which a binomial proportion has
    the variance of these shares; since few prompts show too little variance, PRIOR prompts with shares 0 or 1 are added
    to it. Unlike a bootstrap interval, it keeps its level where an event is rare, and has a width where none was seen.
    """
    import scipy.special  # takes a third of a second

    shares = values[np.isfinite(values)]
    count, mean, trials = len(shares), float(shares.mean()), float(len(shares))
    squares = float(np.sum((shares - mean) ** 2))
    if squares > 0:
        binomial = mean * (1 - mean)
        trials = count * binomial * (count - 1 + PRIOR) / (squares + PRIOR * binomial)
    z = float(scipy.special.stdtrit(max(count - 1, 1), (1 + level) / 2))
    centre, scale = mean + z**2 / (2 * trials), 1 + z**2 / trials
    half = z * math.sqrt(mean * (1 - mean) / trials + z**2 / (4 * trials**2))
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)


def mean_interval(values: Shaped[np.ndarray, ' n'], *, level: float) -> tuple[float, float]:
    """(low, high): Student's confidence interval of the mean of n independent numbers; infinite for n = 1."""
    import scipy.special

    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return -math.inf, math.inf
    half = float(scipy.special.stdtrit(count - 1, (1 + level) / 2) * np.std(values, ddof=1) / math.sqrt(count))
    return mean - half, mean + half


def bootstrap(
    values: Shaped[np.ndarray, 'N F'], *, level: float, resamples: int, seed: int
) -> tuple[Float[np.ndarray, ' F'], Float[np.ndarray, ' F']]:
    """(low, high): percentile bootstrap intervals of F figures' means over N prompts; NaN values are left out."""
    finite = np.isfinite(values)
    return bootstrap_ratio(np.where(finite, values, 0.0), finite, tail=(1 - level) / 2, resamples=resamples, seed=seed)


def bootstrap_ratio(
    totals: Shaped[np.ndarray, 'N F'], sizes: Shaped[np.ndarray, 'N F'], *, tail: float, resamples: int, seed: int
) -> tuple[Float[np.ndarray, ' F'], Float[np.ndarray, ' F']]:
    """(low, high): percentile bootstrap intervals of sum(totals) / sum(sizes) for F figures over N rows.

    tail: the share that is left out on either side. A resample draws N rows with replacement, the same rows for all
    figures; if its sizes sum to 0 it does not count. A figure that is equal in all rows has an interval without width.
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
    """The chance that a right item has a higher value than a wrong one, ties counting half; None if a kind is absent.

    This is the area under the ROC curve, and Mann and Whitney's U divided by the number of pairs.
    """
    import scipy.stats  # takes half a second

    good, bad = values[right], values[~right]
    if not len(good) or not len(bad):
        return None
    return float(scipy.stats.mannwhitneyu(good, bad, method='asymptotic').statistic / len(good) / len(bad))


def precision_recall(predicted: Bool[np.ndarray, ' n'], actual: Bool[np.ndarray, ' n']) -> dict[str, float]:
    """{'precision', 'recall', 'f1'} of predictions; 0 where the divisor is 0."""
    hits = int(np.sum(predicted & actual))
    return {
        'precision': hits / max(int(predicted.sum()), 1),
        'recall': hits / max(int(actual.sum()), 1),
        'f1': 2 * hits / max(int(predicted.sum() + actual.sum()), 1),
    }
