"""The figures of an evaluation: judges completions with the training's verifier, and computes means and intervals."""

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
RESAMPLES = 2000  # of the bootstrap
UNBOUNDED = ('reward', 'length')  # figures that are no shares
SUBJECTS = ('subject', 'level', 'source')  # fields of Example.meta with a table

Figures = dict[str, Float[np.ndarray, ' N']]  # name -> a number for each prompt, NaN if it has none


class Completions(NamedTuple):
    """n completions of each prompt, in the order of the prompts."""

    texts: list[str]
    truncated: list[Any]  # bools
    lengths: list[Any]  # in tokens


class Judged(NamedTuple):
    """Rewards and verdicts of completions: N prompts with n completions each.

    The keys of answers and correct are prefixes of figures: '', and 'strict/' for a verifier's stricter reading.
    """

    rewarded: Rewards  # of N * n rows
    answers: dict[str, Shaped[np.ndarray, 'N n']]  # the answer that was read, or None; {} if the verifier reads none
    correct: dict[str, Shaped[np.ndarray, 'N n']]  # bools; None for prompts without a verifier
    # of each source, where there are several: (indices of the source's prompts, their Judged)
    by_source: Sequence[tuple[list[int], Any]] = ()


def judge(reward_functions: RewardFunctions, examples: Sequence[Example], completions: Completions) -> Judged:
    """The Judged of N * n completions, n for each of N examples; one that the verifier cannot judge counts as wrong."""
    return read_rewards(reward_functions, examples, _compute_rewards(reward_functions, examples, completions))


def read_rewards(
    reward_functions: RewardFunctions, examples: Sequence[Example], rewarded: Rewards, strict: bool = True
) -> Judged:
    """The Judged of completions whose Rewards are known; strict: whether verifiers also judge by a stricter reading."""
    divided = reward_functions.divide(examples)
    if len(divided) > 1:
        return _read_sources(divided, examples, rewarded, strict)
    ((functions, _),) = divided
    shape, extract = (len(examples), -1), functions.extract
    answers = {'': _extract_answers(functions, extract, rewarded.texts, shape)} if extract else {}
    correct: dict[str, Any] = {'': rewarded.correct.reshape(shape) == 1} if functions.verifier else {}
    if functions.strict and strict:
        alone = functions._replace(
            parts={'strict': rewards.Part(functions.strict, 1.0)}, options=functions.options._replace(verifier='strict')
        )
        judged = _compute_rewards(alone, examples, Completions(*map(list, rewarded[:3])))
        correct['strict/'] = judged.correct.reshape(shape) == 1
        extract = functions.extract_strict or extract
        answers |= {'strict/': _extract_answers(functions, extract, rewarded.texts, shape)} if extract else {}
    return Judged(rewarded, answers, correct)


def _read_sources(divided, examples, rewarded, strict):
    """The Judged of examples from several sources. divided: [(reward functions, indices of their examples)]."""
    rows, by_source = np.arange(len(rewarded.texts)).reshape(len(examples), -1), []
    for functions, indices in divided:
        source_rewards = jax.tree.map(operator.itemgetter(rows[indices].reshape(-1)), rewarded)
        by_source.append((indices, read_rewards(functions, [examples[i] for i in indices], source_rewards, strict)))
    merged = {}
    for indices, judged in by_source:
        for field in ('answers', 'correct'):
            for prefix, values in getattr(judged, field).items():
                merged.setdefault((field, prefix), np.full(rows.shape, None))[indices] = values
    answers, correct = ({p: x for (f, p), x in merged.items() if f == field} for field in ('answers', 'correct'))
    return Judged(rewarded, answers, correct, by_source)


def recorded_rewards(rows: Sequence[Mapping[str, Any]]) -> Rewards:
    """Returns the Rewards that recorded rows of completions hold, without failures, which are not recorded."""

    def numbers(values):
        return np.array([np.nan if value is None else value for value in values], np.float64)

    texts = np.full(len(rows), None)
    texts[:] = [row['completion'] for row in rows]
    parts = {name: numbers(row['parts'][name] for row in rows) for name in rows[0]['parts']}
    rewarded, correct = (numbers(row[name] for row in rows) for name in ('reward', 'correct'))
    lengths, truncated = (np.array([row[name] for row in rows]) for name in ('length', 'truncated'))
    return Rewards(texts, truncated, lengths, rewarded, correct, parts, {})


def _extract_answers(reward_functions, extract, completions, shape):
    """Each completion's answer or None, in shape (N, n); a prompt's equal answers get the first one's spelling."""
    answers = np.full(len(completions), None)
    answers[:] = [extract(text) for text in completions]
    answers, same = answers.reshape(shape), reward_functions.same
    if not same:
        return answers
    for row in answers:
        firsts = []
        for i, answer in enumerate(row):
            if answer is not None:
                row[i] = next((first for first in firsts if first == answer or same(first, answer)), answer)
                if row[i] not in firsts:
                    firsts.append(row[i])
    return answers


def _compute_rewards(reward_functions, examples, completions):
    """The Rewards of completions; each process computes a part of the groups."""
    compute = functools.partial(rewards.compute_rewards, reward_functions)
    return processes.by_group(compute, examples, *completions)


def compute_figures(sampled: Judged, prompts: int, greedy: Judged | None = None) -> Figures:
    """Returns the Figures of an evaluation of N prompts; sampled has n completions a prompt, greedy one, if given.

    With a verifier: pass@k for n and the powers of two up to n, and greedy (whether the greedy completion is correct);
    if the verifier reads answers, also maj@n (statistics.majority) and unparsed (no answer could be read). Always:
    reward, length in tokens, truncated, and failed (for a part of the reward, see Rewards.failures). The prefix strict/
    marks the verifier's stricter reading, and greedy/ marks greedy completions; other figures are of the samples.
    """
    figures: Figures = {}
    for number, (indices, judged) in enumerate(sampled.by_source):
        part = compute_figures(judged, len(indices), greedy and greedy.by_source[number][1])
        for name, values in part.items():
            figures.setdefault(name, np.full(prompts, np.nan))[indices] = values
    if sampled.by_source:
        return figures
    for prefix in sampled.correct:
        if greedy:
            figures[f'{prefix}greedy'] = greedy.correct[prefix][:, 0].astype(float)
        figures |= _accuracy_figures(sampled, prefix)
    figures |= _mean_figures(sampled, prompts, '')
    return figures | _mean_figures(greedy, prompts, 'greedy/') if greedy else figures


def _accuracy_figures(sampled, prefix):
    """The Figures pass@k and maj@n of the verifier's reading `prefix`, '' or 'strict/'."""
    correct, figures = sampled.correct[prefix], {}
    n = correct.shape[1]
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        figures[f'{prefix}pass@{k}'] = statistics.pass_at_k(correct, k)
    if prefix in sampled.answers:
        figures[f'{prefix}maj@{n}'] = statistics.majority(sampled.answers[prefix], correct)
    return figures


def _mean_figures(judged, prompts, prefix):
    """The Figures that need no verdicts, with a prefix for their names: means over a prompt's completions."""
    rewarded, answers = judged.rewarded, judged.answers
    rows = {'reward': rewarded.rewards, 'length': rewarded.lengths, 'truncated': rewarded.truncated}
    if rewarded.failures:
        rows['failed'] = np.any(list(rewarded.failures.values()), 0)
    if '' in answers:
        rows['unparsed'] = np.array([text is None for text in answers[''].flat])
    return {prefix + name: statistics.average(np.reshape(values, (prompts, -1))) for name, values in rows.items()}


def summarize(figures: Figures, seed: int, rows: Any = slice(None)) -> dict[str, dict[str, float]]:
    """Returns {figure: {'mean', 'low', 'high'}} over prompts, without figures that no prompt has.

    seed: of the bootstrap; rows: indices of the prompts. Intervals of shares are statistics.share_interval, which holds
    for rare events too; intervals of rewards and lengths are bootstrapped.
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
    """Returns {field: {value: {'prompts', 'figures'}}} for fields of SUBJECTS with several values; see summarize."""
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
