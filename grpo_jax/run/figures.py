"""The figures of an evaluation: completions judged by the training's own verifier, their means, and their intervals."""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Shaped
import numpy as np

from grpo_jax import rewards, statistics
from grpo_jax.hosts import processes
from grpo_jax.rewards import RewardFunctions, Rewards
from grpo_jax.types import Example

LEVEL = 0.95  # of intervals
RESAMPLES = 2000
UNBOUNDED = ('reward', 'length')  # figures that are no shares of completions
METHODS = {
    'proportions': "Wilson's score interval; shares of several completions by their variance",
    **dict.fromkeys(UNBOUNDED, 'percentiles of bootstrap draws'),
}
SUBJECTS = ('subject', 'level', 'source')  # fields of Example.meta that have a table

Figures = dict[str, Float[np.ndarray, ' N']]  # one number a prompt by name, NaN for a prompt without one


class Completions(NamedTuple):
    """Completions of prompts, the n of the first prompt first."""

    texts: list[str]
    truncated: list[Any]  # bools
    lengths: list[Any]  # in tokens


class Judged(NamedTuple):
    """What the reward and the verifier make of n completions of each of N prompts."""

    rewarded: Rewards  # of N * n rows
    answers: Shaped[np.ndarray, 'N n']  # str or None: what the verifier read
    correct: dict[str, Bool[np.ndarray, 'N n']]  # by the prefix of its figures: '' and, where there is one, 'strict/'
    votes: dict[str, Shaped[np.ndarray, 'N n']]  # by that prefix: answers as they vote, equal ones spelled alike


def judge(reward_functions: RewardFunctions, examples: Sequence[Example], completions: Completions) -> Judged:
    """Judges N * n completions; what the verifier cannot score, or fails at, counts as wrong."""
    rewarded = _compute_rewards(reward_functions, examples, completions)
    shape, correct = (len(examples), -1), {}
    answers = np.full(len(completions.texts), None)
    if reward_functions.verifier and reward_functions.extract:
        answers[:] = [reward_functions.extract(text) for text in completions.texts]
        correct[''] = rewarded.parts[reward_functions.verifier].reshape(shape) >= 1
    if reward_functions.strict:
        alone = reward_functions._replace(
            parts={'strict': rewards.Part(reward_functions.strict, 1.0)},
            options=reward_functions.options._replace(verifier='strict'),
        )
        strict = _compute_rewards(alone, examples, completions)
        correct['strict/'] = strict.parts['strict'].reshape(shape) >= 1
    answers = answers.reshape(shape)
    votes = {prefix: _votes(reward_functions, answers, completions.texts, prefix) for prefix in correct}
    return Judged(rewarded, answers, correct, votes)


def _votes(reward_functions, answers, texts, prefix):
    """What each completion votes for: its answer as the verifier, or its stricter reading, reads it."""
    if prefix and reward_functions.extract_strict:
        strict = np.full(answers.size, None)
        strict[:] = [reward_functions.extract_strict(text) for text in texts]
        answers = strict.reshape(answers.shape)
    return statistics.join_equal(answers, reward_functions.same) if reward_functions.same else answers


def _compute_rewards(reward_functions, examples, completions):
    compute = functools.partial(rewards.compute_rewards, reward_functions)
    return processes.by_group(compute, examples, *completions)


def compute_figures(greedy: Judged, sampled: Judged) -> Figures:
    """One number a prompt by name of figure; greedy has one completion a prompt, sampled has n.

    With a verifier: greedy (is the argmax completion correct), pass@k for powers of two up to the n samples, and for n,
    maj@n (statistics.majority), and unparsed (no answer could be read). Always: reward, length in tokens, truncated,
    and failed (a part of the reward ran out of time or memory). strict/ goes before figures of the verifier's stricter
    reading, greedy/ before those of greedy completions; the others are of the samples.
    """
    figures = {}
    for prefix, correct in sampled.correct.items():
        n = correct.shape[1]
        figures[f'{prefix}greedy'] = greedy.correct[prefix][:, 0].astype(float)
        for k in sorted({2**i for i in range(n.bit_length())} | {n}):
            figures[f'{prefix}pass@{k}'] = statistics.pass_at_k(correct, k)
        figures[f'{prefix}maj@{n}'] = statistics.majority(sampled.votes[prefix], correct)
    for prefix, (rewarded, answers, correct, _) in [('', sampled), ('greedy/', greedy)]:
        rows = {
            'reward': rewarded.rewards,
            'length': rewarded.lengths,
            'truncated': rewarded.truncated,
            'failed': np.any(list(rewarded.failures.values()), 0),
        }
        if correct:
            rows['unparsed'] = np.array([text is None for text in answers.flat])
        for name, values in rows.items():
            figures[prefix + name] = statistics.average(np.reshape(values, answers.shape))
    return figures


def summarize(figures: Figures, seed: int, rows: Any = slice(None)) -> dict[str, dict[str, float]]:
    """{'mean', 'low', 'high'} of the figures that any of the rows has, by name: value and interval (METHODS)."""
    chosen = {name: values[rows] for name, values in figures.items() if np.isfinite(values[rows]).any()}
    values = np.stack(list(chosen.values()), 1)
    low, high = statistics.proportion_interval(values, level=LEVEL)
    drawn = [i for i, name in enumerate(chosen) if name.rpartition('/')[2] in UNBOUNDED]
    if drawn:
        intervals = statistics.bootstrap(values[:, drawn], level=LEVEL, resamples=RESAMPLES, seed=seed)
        low[drawn], high[drawn] = intervals
    return {
        name: {'mean': float(np.nanmean(values)), 'low': float(low[i]), 'high': float(high[i])}
        for i, (name, values) in enumerate(chosen.items())
    }


def summarize_by_subject(figures: Figures, examples: Sequence[Example], seed: int) -> dict[str, dict[str, Any]]:
    """field -> value -> {'prompts', 'figures'} for the fields of SUBJECTS that divide the examples; see summarize."""
    tables = {}
    for field in SUBJECTS:
        rows = {}
        for row, example in enumerate(examples):
            if example.meta.get(field) is not None:
                rows.setdefault(str(example.meta[field]), []).append(row)
        if 1 < len(rows) < len(examples):
            tables[field] = {
                value: {'prompts': len(rows[value]), 'figures': summarize(figures, seed, rows[value])}
                for value in sorted(rows)
            }
    return tables
