"""Scores completions as they come, on threads beside the device, and adds up what the parts say."""

import asyncio
import concurrent.futures
import functools
import threading
from typing import NamedTuple

import numpy as np

from grpo_jax.workers import pool

# what ends a part without a reward, and what it is counted as; anything else that a reward raises stops the run
FAILURES = {pool.Expired: 'expired', TimeoutError: 'expired', pool.Died: 'died', RecursionError: 'died'}


class Rewards(NamedTuple):
    """What came of B completions, in the order of rows."""

    texts: np.ndarray  # str objects
    truncated: np.ndarray  # bool[B]
    lengths: np.ndarray  # i64[B] tokens
    rewards: np.ndarray  # f64[B] NaN: no part could score it
    parts: dict  # name -> f64[B]
    failures: dict  # expired, died -> bool[B]: a part ran out of time, or of memory


class RewardStream:
    """Scores a step's completions as they are handed over while others still decode."""

    def __init__(self, reward_functions, examples, group_size, tokenizer):
        self._scorer, self._examples, self._group_size, self._tokenizer = (
            reward_functions,
            examples,
            group_size,
            tokenizer,
        )
        self._threads = concurrent.futures.ThreadPoolExecutor(reward_functions.threads, 'reward')
        self._rows = {}

    def add(self, row, tokens, truncated):
        """Takes the completion of a row: its token ids, and whether its budget ended before a stop came."""
        self._rows[row] = self._threads.submit(self._begin, self._examples[row // self._group_size], tokens), truncated

    @property
    def rows(self):
        """The numbers of the rows handed over, rising; with several processes they are this one's."""
        return sorted(self._rows)

    def results(self):
        """The Scored of the rows handed over."""
        order = self.rows
        begun = [self._rows[row][0].result() for row in order]
        self._threads.shutdown()
        texts, lengths, values = zip(*begun, strict=True) if begun else ((), (), ())
        owners = [self._examples[row // self._group_size] for row in order]
        return _add_up(self._scorer, owners, texts, [self._rows[row][1] for row in order], lengths, values)

    def _begin(self, example, tokens):
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text, len(tokens), begin(self._scorer, text, example)


def compute_rewards(reward_functions, examples, texts, truncated, lengths):
    """Scored of B completions at once; examples has P entries, B / P rows each."""
    owners = [examples[row // (len(texts) // len(examples))] for row in range(len(texts))]
    with concurrent.futures.ThreadPoolExecutor(reward_functions.threads, 'reward') as threads:
        values = list(threads.map(functools.partial(begin, reward_functions), texts, owners))
    return _add_up(reward_functions, owners, texts, truncated, lengths, values)


def score(reward_functions, examples, texts, truncated):
    """(rewards f64[B], parts dict of f64[B]) of B completions; see score_rows."""
    found = compute_rewards(reward_functions, examples, texts, truncated, np.zeros(len(texts), int))
    return found.rewards, found.parts


def begin(reward_functions, text, example):
    """What the parts that look at one completion say of it, by name: a value, what it failed of, or a future."""
    said = {}
    # the verifier first, since others may ask it
    for name, part in sorted(reward_functions.parts.items(), key=lambda item: item[0] != reward_functions.verifier):
        if part.batched:
            continue
        asked = {}
        if part.reads_correct:
            verdict = said[reward_functions.verifier]
            asked = {'correct': None if verdict is None else not isinstance(verdict, Exception) and verdict >= 1}
        try:
            said[name] = part.function(text, example, **asked)
            if part.asynchronous:
                waiting = asyncio.wait_for(said[name], reward_functions.deadline)
                said[name] = asyncio.run_coroutine_threadsafe(waiting, _loop())
        except tuple(FAILURES) as failure:
            said[name] = failure
    return said


def _add_up(reward_functions, owners, texts, truncated, lengths, begun):
    """The Scored of rows whose single parts have begun."""
    parts, failures = {}, {name: np.zeros(len(texts), bool) for name in FAILURES.values()}
    for name, part in reward_functions.parts.items():
        batched = part.batched and begun  # a process may have no row of a step
        said = part.function(list(texts), owners) if batched else [_settled(row[name]) for row in begun]
        for row, value in enumerate(said):
            if isinstance(value, Exception):
                failures[_kind(value)][row] = True
        parts[name] = np.array(
            [
                reward_functions.failed if isinstance(value, Exception) else np.nan if value is None else value
                for value in said
            ],
            np.float64,
        )
    weights = np.array([part.weight for part in reward_functions.parts.values()])
    stacked, truncated = np.stack(list(parts.values())), np.asarray(truncated, bool)
    total = np.nansum(weights[:, None] * stacked, 0) + reward_functions.truncated * truncated
    return Rewards(
        np.array(texts, object),
        truncated,
        np.asarray(lengths),
        np.where(np.isfinite(stacked).any(0), total, np.nan),
        parts,
        failures,
    )


def _settled(value):
    """A value, or the failure that it ended in."""
    if not isinstance(value, concurrent.futures.Future):
        return value
    try:
        return value.result()
    except tuple(FAILURES) as failure:
        return failure


def _kind(failure):
    return next(name for kind, name in FAILURES.items() if isinstance(failure, kind))


@functools.cache
def _loop():
    """The event loop of asynchronous rewards, on a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name='rewards', daemon=True).start()
    return loop


def shaped(reward_functions, rewarded, group_size):
    """f64[P, G]: the rewards with the shaping by length, where there is one."""
    rewards = rewarded.rewards.reshape(-1, group_size)
    if not reward_functions.length:
        return rewards
    correct = (
        rewarded.parts[reward_functions.verifier] >= 1 if reward_functions.verifier else rewarded.rewards > 0
    ).reshape(rewards.shape)
    return rewards + reward_functions.length_weight * reward_functions.length(
        rewarded.lengths.reshape(rewards.shape), correct
    )


def known(reward_functions, examples, rewarded, rollout, tokenizer):
    """What an advantage may read beside total rewards, by name; functions, so that only what is read is worked out."""
    found = {
        'part_weights': np.array([part.weight for part in reward_functions.parts.values()]),
        'parts': lambda: np.stack(list(rewarded.parts.values())).reshape(
            len(reward_functions.parts), len(examples), -1
        ),
    }
    if reward_functions.steps:
        found['step_rewards'] = lambda: step_rewards(reward_functions.steps, examples, rewarded, rollout, tokenizer)
    return found


def step_rewards(steps_of, examples, rewarded, rollout, tokenizer):
    """f64[P, G, C]: the reward of each step at its last token, the completion's own at its end, NaN elsewhere."""
    from grpo_jax.hosts import processes

    tokens, mask = processes.fetch((rollout.tokens, rollout.completion_mask))
    tokens, group = tokens[:, -mask.shape[1] :], len(mask) // len(examples)
    found = np.full(mask.shape, np.nan)
    owners = [examples[row // group] for row in range(len(mask))]
    for row, steps in enumerate(steps_of(list(rewarded.texts), owners)):
        length = int(mask[row].sum())
        written = [len(tokenizer.decode(tokens[row, : n + 1], skip_special_tokens=True)) for n in range(length)]
        places = [(int(np.searchsorted(written, end)), value) for end, value in steps]
        for token, value in [*places, (length - 1, rewarded.rewards[row])]:
            if 0 <= token < length:
                found[row, token] = value + np.nan_to_num(found[row, token])
    return found.reshape(len(examples), group, -1)
