"""Figures of an evaluation, in numpy alone: pass@k, majority votes, means, and intervals over prompts.

N prompts, n completions of each; a figure has one number a prompt, and its value is their mean.
"""

import collections
import math

import numpy as np


def pass_at_k(correct, k):
    """f64[N]: 1 - C(n - c, k) / C(n, k), the chance that k of the n hold one of the c correct; correct bool[N, n].

    Unbiased (arXiv 2107.03374, eq. 1). pass@1 is c / n, which others call avg@n.
    """
    n = correct.shape[1]
    ways = math.comb(n, k)  # in whole numbers, so that each chance is rounded once
    chances = np.array([(ways - math.comb(n - c, k)) / ways for c in range(n + 1)])
    return chances[correct.sum(1)]


def majority(answers, correct):
    """f64[N]: the share of correct completions among those with the most frequent answer; bool[N, n] correct.

    answers str or None [N, n]; None does not vote, and without any vote nothing is correct. A tie is a fair draw: the
    answers that are most frequent count alike.
    """
    shares = np.zeros(len(answers))
    for row, (said, hits) in enumerate(zip(answers, correct, strict=True)):
        votes = collections.Counter(answer for answer in said if answer is not None)
        if votes:
            most = max(votes.values())
            shares[row] = np.mean([hit for answer, hit in zip(said, hits, strict=True) if votes[answer] == most])
    return shares


def average(values):
    """f64[N]: means of f64[N, n] over what is a number, NaN where nothing is."""
    return np.ma.masked_invalid(values).mean(1).filled(np.nan)


def bootstrap(values, *, level, resamples, seed):
    """(low f64[F], high f64[F]): percentile intervals of the means over prompts of F figures, values f64[N, F].

    A resample draws N prompts with replacement, the same ones for every figure; NaN is no value. What all prompts agree
    on has an interval of no width: nothing is known of prompts that were not seen.
    """
    prompts = len(values)
    drawn = np.random.default_rng(seed).integers(prompts, size=(resamples, prompts))
    drawn += prompts * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.float64)
    known = np.isfinite(values)
    with np.errstate(invalid='ignore'):  # a resample may hold nothing that is known
        means = counts @ np.where(known, values, 0.0) / (counts @ known)
    tail = (1 - level) / 2
    low, high = np.nanquantile(means, [tail, 1 - tail], axis=0)
    return low, high
