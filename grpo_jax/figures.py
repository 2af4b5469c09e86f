"""The figures of an evaluation: completions judged by the training's own verifier, their means, and their intervals."""

from collections.abc import Mapping, Sequence
import functools
import operator
from typing import Any, NamedTuple

import jax
from jaxtyping import Float, Shaped
import numpy as np

from grpo_jax import rewards, statistics
from grpo_jax.hosts import processes
from grpo_jax.rewards import RewardFunctions, Rewards
from grpo_jax.types import Example

LEVEL = 0.95  # of intervals
RESAMPLES = 2000
UNBOUNDED = ('reward', 'length')  # figures that are no shares
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
    # by the prefix of their figures, '' and, where the verifier has a stricter reading, 'strict/':
    answers: dict[str, Shaped[np.ndarray, 'N n']]  # str or None: what it read; {} for one that reads none
    correct: dict[str, Shaped[np.ndarray, 'N n']]  # bools; None for prompts of a source without
    by_source: Sequence[
        tuple[list[int], Any]
    ] = ()  # of several sources: (indices of its prompts, their Judged) of each


def judge(reward_functions: RewardFunctions, examples: Sequence[Example], completions: Completions) -> Judged:
    """Judges N * n completions; what the verifier cannot score, or fails at, counts as wrong."""
    return read_rewards(reward_functions, examples, _compute_rewards(reward_functions, examples, completions))


def read_rewards(
    reward_functions: RewardFunctions, examples: Sequence[Example], rewarded: Rewards, strict: bool = True
) -> Judged:
    """What the verifiers make of completions whose rewards are known; strict: in their stricter readings too."""
    divided = reward_functions.divide(examples)
    if len(divided) > 1:
        return _read_sources(divided, examples, rewarded, strict)
    ((functions, _),) = divided
    shape, extract = (len(examples), -1), functions.extract
    answers = {'': _read(functions, extract, rewarded.texts, shape)} if extract else {}
    correct: dict[str, Any] = {'': rewarded.correct.reshape(shape) == 1} if functions.verifier else {}
    if functions.strict and strict:
        alone = functions._replace(
            parts={'strict': rewards.Part(functions.strict, 1.0)}, options=functions.options._replace(verifier='strict')
        )
        judged = _compute_rewards(alone, examples, Completions(*map(list, rewarded[:3])))
        correct['strict/'] = judged.correct.reshape(shape) == 1
        extract = functions.extract_strict or extract
        answers |= {'strict/': _read(functions, extract, rewarded.texts, shape)} if extract else {}
    return Judged(rewarded, answers, correct)


def _read_sources(divided, examples, rewarded, strict):
    """The Judged of examples that have several verifiers, or none: each source by its own."""
    rows, by_source = np.arange(len(rewarded.texts)).reshape(len(examples), -1), []
    for functions, indices in divided:
        own = jax.tree.map(operator.itemgetter(rows[indices].reshape(-1)), rewarded)
        by_source.append((indices, read_rewards(functions, [examples[i] for i in indices], own, strict)))
    merged = {}
    for indices, judged in by_source:
        for field in ('answers', 'correct'):
            for prefix, values in getattr(judged, field).items():
                merged.setdefault((field, prefix), np.full(rows.shape, None))[indices] = values
    answers, correct = ({p: x for (f, p), x in merged.items() if f == field} for field in ('answers', 'correct'))
    return Judged(rewarded, answers, correct, by_source)


def recorded_rewards(rows: Sequence[Mapping[str, Any]]) -> Rewards:
    """The Rewards that rows of run.dumps have written down; they do not say which of their parts failed."""

    def numbers(values):
        return np.array([np.nan if value is None else value for value in values], np.float64)

    texts = np.full(len(rows), None)
    texts[:] = [row['completion'] for row in rows]
    parts = {name: numbers(row['parts'][name] for row in rows) for name in rows[0]['parts']}
    rewarded, correct = (numbers(row[name] for row in rows) for name in ('reward', 'correct'))
    lengths, truncated = (np.array([row[name] for row in rows]) for name in ('length', 'truncated'))
    return Rewards(texts, truncated, lengths, rewarded, correct, parts, {})


def _read(reward_functions, extract, completions, shape):
    """The answer that each completion gives, or None; spellings of one answer are one."""
    answers = np.full(len(completions), None)
    answers[:] = [extract(text) for text in completions]
    answers, same = answers.reshape(shape), reward_functions.same
    if not same:
        return answers
    for row in answers:  # each becomes the first of its prompt that the verifier takes for the same
        firsts = []
        for i, answer in enumerate(row):
            if answer is not None:
                row[i] = next((first for first in firsts if first == answer or same(first, answer)), answer)
                if row[i] not in firsts:
                    firsts.append(row[i])
    return answers


def _compute_rewards(reward_functions, examples, completions):
    compute = functools.partial(rewards.compute_rewards, reward_functions)
    return processes.by_group(compute, examples, *completions)


def compute_figures(greedy: Judged, sampled: Judged) -> Figures:
    """One number a prompt by name of figure; greedy has one completion a prompt, sampled has n.

    With a verifier: greedy (is the argmax completion correct), pass@k for powers of two up to the n samples, and for n;
    where it reads answers, maj@n (statistics.majority) and unparsed (no answer could be read). Always: reward, length
    in tokens, truncated, and failed (a part of the reward ran out of time or memory). strict/ goes before figures of
    the verifier's stricter reading, greedy/ before those of greedy completions; the others are of the samples.
    """
    figures, prompts = {}, len(greedy.rewarded.texts)
    if sampled.by_source:
        pairs = zip(greedy.by_source, sampled.by_source, strict=True)
        return _join_sources([(indices, compute_figures(own, drawn)) for (indices, own), (_, drawn) in pairs], prompts)
    for prefix in sampled.correct:
        figures[f'{prefix}greedy'] = greedy.correct[prefix][:, 0].astype(float)
        figures |= _shares_right(sampled, prefix)
    return figures | _averages(sampled, prompts, '') | _averages(greedy, prompts, 'greedy/')


def compute_sampled_figures(sampled: Judged, prompts: int) -> Figures:
    """As compute_figures, of samples alone."""
    if sampled.by_source:
        pieces = [(indices, compute_sampled_figures(own, len(indices))) for indices, own in sampled.by_source]
        return _join_sources(pieces, prompts)
    shares = [_shares_right(sampled, prefix) for prefix in sampled.correct]
    return dict(item for figures in (*shares, _averages(sampled, prompts, '')) for item in figures.items())


def _join_sources(pieces, prompts):
    """The Figures of all prompts from (indices, Figures) of each source."""
    figures = {}
    for indices, own in pieces:
        for name, values in own.items():
            figures.setdefault(name, np.full(prompts, np.nan))[indices] = values
    return figures


def _shares_right(sampled, prefix):
    """pass@k and maj@n of the verifier's reading `prefix`."""
    correct, figures = sampled.correct[prefix], {}
    n = correct.shape[1]
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        figures[f'{prefix}pass@{k}'] = statistics.pass_at_k(correct, k)
    if prefix in sampled.answers:
        figures[f'{prefix}maj@{n}'] = statistics.majority(sampled.answers[prefix], correct)
    return figures


def _averages(judged, prompts, prefix):
    """What any completions have, by name behind the prefix."""
    rewarded, answers = judged.rewarded, judged.answers
    rows = {'reward': rewarded.rewards, 'length': rewarded.lengths, 'truncated': rewarded.truncated}
    if rewarded.failures:
        rows['failed'] = np.any(list(rewarded.failures.values()), 0)
    if '' in answers:
        rows['unparsed'] = np.array([text is None for text in answers[''].flat])
    return {prefix + name: statistics.average(np.reshape(values, (prompts, -1))) for name, values in rows.items()}


def summarize(figures: Figures, seed: int, rows: Any = slice(None)) -> dict[str, dict[str, float]]:
    """{'mean', 'low', 'high'} by name of the figures that any of the rows has: the value, and its interval.

    Shares have statistics.share_interval, which holds where an event is rare; rewards and lengths, the bootstrap.
    """
    chosen = {name: values[rows] for name, values in figures.items() if np.isfinite(values[rows]).any()}
    low, high = statistics.bootstrap(np.stack(list(chosen.values()), 1), level=LEVEL, resamples=RESAMPLES, seed=seed)
    intervals = {name: (low[i], high[i]) for i, name in enumerate(chosen)}
    shares = (name for name in chosen if name.removeprefix('greedy/') not in UNBOUNDED)
    intervals |= {name: statistics.share_interval(chosen[name], level=LEVEL) for name in shares}
    return {
        name: {'mean': float(np.nanmean(values)), 'low': float(intervals[name][0]), 'high': float(intervals[name][1])}
        for name, values in chosen.items()
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
