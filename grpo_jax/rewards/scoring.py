"""Judges completions as they come, on threads beside the device, and adds up the parts of their rewards."""

import asyncio
from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import time
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.example import Example
from grpo_jax.grouping import Grouping
from grpo_jax.rewards.build import Part, RewardFunctions
from grpo_jax.workers import Died, Expired

# what ends a part without a reward, and what it is counted as; anything else that a reward raises stops the run
FAILURES = {Expired: 'expired', TimeoutError: 'expired', Died: 'died', RecursionError: 'died'}


class Rewards(NamedTuple):
    """The rewards of B completions, in the order of rows."""

    texts: np.ndarray  # str objects
    truncated: np.ndarray  # bool[B]
    lengths: np.ndarray  # i64[B] tokens
    rewards: np.ndarray  # f64[B] NaN: no part could tell
    correct: np.ndarray  # f64[B] what the verifier says: 1 right, 0 wrong; NaN: it cannot tell, or there is none
    parts: dict  # name -> f64[B]
    failures: dict  # expired, died -> bool[B]: a part ran out of time, or of memory


class RewardStream:
    """Judges a step's completions as they are handed over, while others still decode."""

    def __init__(self, reward_functions: RewardFunctions, examples: Sequence[Example], group_size: int, tokenizer: Any):
        self._reward_functions, self._tokenizer = reward_functions, tokenizer
        self._examples, self._group_size = examples, group_size
        self._rows = {}  # row -> (future, truncated)
        self.seconds = 0.0  # that judging took on all threads, known with the results

    def add(self, row: int | np.integer, tokens: Sequence | np.ndarray, truncated: bool | np.generic):
        """Takes the completion of a row: its token ids, and whether its budget ended before a stop came."""
        future = self._reward_functions.resources.threads.submit(self._begin, self._example(row), tokens)
        self._rows[row] = future, truncated

    @property
    def rows(self) -> list:
        """The numbers of the rows handed over, rising; with several processes, those of this process."""
        return sorted(self._rows)

    def results(self) -> Rewards:
        """The Rewards of the rows handed over."""
        order = self.rows
        started = [self._rows[row][0].result() for row in order]
        texts, lengths, values, seconds = zip(*started, strict=True) if started else ((), (), (), ())
        owners, truncated = [self._example(row) for row in order], [self._rows[row][1] for row in order]
        began = time.monotonic()
        rewarded = _add_up(self._reward_functions, owners, (texts, truncated, lengths), values)
        self.seconds = sum(seconds) + time.monotonic() - began
        return rewarded

    def _example(self, row):
        return self._examples[row // self._group_size]

    def _begin(self, example, tokens):
        text, began = self._tokenizer.decode(tokens, skip_special_tokens=True), time.monotonic()
        values = _begin_parts(self._reward_functions, text, example)
        return text, len(tokens), values, time.monotonic() - began


def compute_rewards(
    reward_functions: RewardFunctions,
    examples: Sequence[Example],
    texts: Sequence[str] | np.ndarray,
    truncated: Sequence | np.ndarray,
    lengths: Sequence | np.ndarray,
) -> Rewards:
    """Rewards of B completions at once; examples has P entries, B / P rows each."""
    owners = _repeat(examples, len(texts))
    begin = functools.partial(_begin_parts, reward_functions)
    values = list(reward_functions.resources.threads.map(begin, texts, owners))
    return _add_up(reward_functions, owners, (texts, truncated, lengths), values)


def _repeat(examples, rows):
    """The example of each row."""
    return [examples[row // (rows // len(examples))] for row in range(rows)]


def _begin_parts(reward_functions, text, example):
    """By name, of the parts that take one completion: a value, the failure that it ended in, or a future."""
    reward_functions = reward_functions.of(example)
    values, verifier = {}, reward_functions.verifier
    # the verifier first, since others may read its verdict
    for name, part in sorted(reward_functions.parts.items(), key=lambda item: item[0] != verifier):
        if part.batched:
            continue
        verdict = {'correct': _is_correct(reward_functions, values[verifier])} if part.reads_correct else {}
        try:
            values[name] = part.function(text, example, **verdict)
            if part.asynchronous:
                values[name] = _submit(reward_functions, values[name])
        except tuple(FAILURES) as failure:
            values[name] = failure
    return values


def _submit(reward_functions, coroutine):
    """The future of a coroutine that ends at the deadline, and has begun to run."""
    return reward_functions.resources.event_loop.submit(asyncio.wait_for(coroutine, reward_functions.options.deadline))


def judge_at_once(
    reward_functions: RewardFunctions, part: Part, texts: Sequence[str], owners: Sequence[Example]
) -> list[Any]:
    """By a part that is asynchronous or takes all completions: of each its value, or the failure that it ended in."""
    if part.asynchronous:
        futures = [_submit(reward_functions, part.function(*row)) for row in zip(texts, owners, strict=True)]
        return [_wait(future) for future in futures]
    try:
        return part.function(list(texts), list(owners))
    except tuple(FAILURES) as failure:
        return [failure] * len(texts)


def _is_correct(reward_functions, value):
    """The verdict of a verifier's value; None where it could not tell."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return None
    return not isinstance(value, Exception) and value >= reward_functions.options.correct_at


def _add_up(reward_functions, owners, columns, started):
    """The Rewards of rows of which the parts of one completion have started; columns: texts, truncated, lengths."""
    texts, truncated, lengths = columns
    options, parts, correct = reward_functions.options, {}, np.full(len(texts), np.nan)
    failures = {name: np.zeros(len(texts), bool) for name in FAILURES.values()}
    functions = [reward_functions.of(example) for example in owners]
    for name, part in reward_functions.every_part.items():
        parts[name] = np.full(len(texts), np.nan)
        rows = [row for row, own in enumerate(functions) if name in own.parts]
        if part.batched and rows:  # a process may have no row of a step
            values = judge_at_once(reward_functions, part, [texts[row] for row in rows], [owners[row] for row in rows])
        else:
            values = [_wait(started[row][name]) for row in rows]
        for row, value in zip(rows, values, strict=True):
            failed = isinstance(value, Exception)
            if failed:
                counted_as = next(counted for failure, counted in FAILURES.items() if isinstance(value, failure))
                failures[counted_as][row] = True
            if name == functions[row].verifier:
                verdict = _is_correct(functions[row], value)
                correct[row] = np.nan if verdict is None else verdict
            parts[name][row] = options.failed if failed else np.nan if value is None else value
    weights = np.array([part.weight for part in reward_functions.every_part.values()])
    stacked, truncated = np.stack(list(parts.values())), np.asarray(truncated, bool)
    total = np.nansum(weights[:, None] * stacked, 0) + options.truncated_reward * truncated
    total = np.where(np.isfinite(stacked).any(0), total, np.nan)
    return Rewards(np.array(texts, object), truncated, np.asarray(lengths), total, correct, parts, failures)


def _wait(value):
    """A value, or the failure that it ended in."""
    if not isinstance(value, concurrent.futures.Future):
        return value
    try:
        return value.result()
    except tuple(FAILURES) as failure:
        return failure


def shape_rewards(reward_functions: RewardFunctions, rewarded: Rewards, grouping: Grouping) -> Float[np.ndarray, 'P G']:
    """The rewards with the shaping by length, where there is one; NaN where a group has no completion."""
    shaped, weight = rewarded.rewards.copy(), reward_functions.options.length_shaping_weight
    if reward_functions.shaping:
        for rows in grouping.rows_by_size():
            shaped[rows] += weight * reward_functions.shaping(rewarded.lengths[rows], rewarded.correct[rows] == 1)
    return grouping.spread(shaped, np.nan)


def advantage_inputs(
    reward_functions: RewardFunctions,
    examples: Sequence[Example],
    rewarded: Rewards,
    shaped: Float[np.ndarray, 'P G'],
    fetch_tokens: Callable[[], tuple],
    tokenizer: Any,
    grouping: Grouping,
) -> dict[str, Any]:
    """What an advantage may read beside total rewards, by name; of functions, those are called that are read.

    examples are of equal parts of the rows; shaped are the total rewards; fetch_tokens() gives (rollout.tokens,
    rollout.completion_mask) on the host. NaN where a group has no completion.
    """
    parts = reward_functions.every_part.values()
    reward_steps: Any = reward_functions.steps

    def stack_parts():
        return np.stack([grouping.spread(part, np.nan) for part in rewarded.parts.values()])

    def compute_step_rewards():
        tokens, mask = fetch_tokens()
        steps = reward_steps(list(rewarded.texts), _repeat(examples, len(rewarded.texts)))
        outcomes = grouping.gather(shaped) if reward_functions.options.steps_with_outcome else None
        return grouping.spread(place_step_rewards(steps, outcomes, tokens, mask, tokenizer), np.nan)

    inputs = {
        'correct': grouping.spread(rewarded.correct, np.nan),
        'part_weights': np.array([part.weight for part in parts]),
        'parts': stack_parts,
    }
    return inputs | ({'step_rewards': compute_step_rewards} if reward_steps else {})


def place_step_rewards(
    steps: Sequence[Sequence[tuple[int, float]]],
    outcomes: Float[np.ndarray, ' B'] | None,
    tokens: Int[np.ndarray, 'B T'],
    mask: Bool[np.ndarray, 'B C'],
    tokenizer: Any,
) -> Float[np.ndarray, 'B C']:
    """The reward of each step, (end in characters, float), at its last token, and NaN elsewhere.

    outcomes: the completions' own rewards, each a further step at the last token; None: steps alone are paid.
    """
    tokens, placed = tokens[:, -mask.shape[1] :], np.full(mask.shape, np.nan)
    for row, row_steps in enumerate(steps):
        length = int(mask[row].sum())
        written = [len(tokenizer.decode(tokens[row, : n + 1], skip_special_tokens=True)) for n in range(length)]
        places = [(int(np.searchsorted(written, end)), value) for end, value in row_steps]
        if outcomes is not None:
            places.append((length - 1, outcomes[row]))
        for token, value in places:
            if 0 <= token < length:
                placed[row, token] = value + np.nan_to_num(placed[row, token])
    return placed
