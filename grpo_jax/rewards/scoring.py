"""Judges completions as they finish, on threads while the device decodes, and adds up the parts of their rewards.

A user's part that raises an exception is called again. If each call raises one, the first step of a run ends with bad
input. In later steps some completions may lack the part, since a service may have failed.
"""

import asyncio
from collections.abc import Callable, Sequence
import functools
import logging
import time
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.example import Example
from grpo_jax.grouping import Grouping
from grpo_jax.rewards.build import Part, RewardFunctions
from grpo_jax.rewards.custom import RewardError
from grpo_jax.text import completion_text, escape
from grpo_jax.workers import Died, Expired


class Refused(Exception):
    """Raised where a service refused a request, or gave an answer that is no verdict."""


# exceptions that count against a completion, and what they count as
FAILURES = {Expired: 'expired', TimeoutError: 'expired', Died: 'died', RecursionError: 'died', Refused: 'refused'}
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a part is called again, twice as long each time
LONGEST = 500  # characters of an exception's text

logger = logging.getLogger('grpo_jax')


class Rewards(NamedTuple):
    """The texts, lengths, rewards and verdicts of B completions, in the order of rows."""

    texts: np.ndarray  # str objects [B]
    truncated: np.ndarray  # bool[B]
    lengths: np.ndarray  # i64[B] tokens
    rewards: np.ndarray  # f64[B] the weighted sums of parts; NaN: unscorable, a part with a weight could not tell
    correct: np.ndarray  # f64[B] the verifier's verdict: 1 right, 0 wrong; NaN: it cannot tell, or there is none
    parts: dict  # name -> f64[B]
    # 'expired', 'died', 'refused', 'missing' -> bool[B]: some part ran out of time, died (of memory, of recursion, or
    # with its worker), was refused by its service (only where a part has one), or raised an exception in each call
    failures: dict
    retried: Any = ()  # bool[B]: some part was called more than once
    errors: Any = ()  # str objects [B]: the last exception of a part that is missing; '' where none is
    learned: Any = ()  # f64[B]: the rewards with shaping by length, from which a step learns; () outside of training
    step_rewards: Any = ()  # f64[B, C]: the rewards of steps that were learned from, NaN elsewhere; () without


class Outcome(NamedTuple):
    """The result of a part's calls for a completion, or for all of them."""

    value: Any  # a number, None, or an exception in FAILURES; of a part that takes all completions, a list of numbers
    retried: bool  # whether the part was called more than once
    error: Exception | None = None  # of the last call, where every call raised one; value is None then


class RewardsMissing(RewardError):
    """Raised by all processes at once when too many completions of a step lack a part of their reward."""


class RewardStream:
    """Judges a step's completions as they are added, while others still decode."""

    def __init__(
        self,
        reward_functions: RewardFunctions,
        examples: Sequence[Example],
        group_size: int,
        tokenizer: Any,
        stop_tokens: Sequence[int] = (),
    ):
        """examples: one for each group of group_size rows; tokenizer, stop_tokens: see completion_text."""
        self._reward_functions, self._tokenizer, self._stop_tokens = reward_functions, tokenizer, stop_tokens
        self._examples, self._group_size = examples, group_size
        self._rows = {}  # row -> (future, truncated)
        self.seconds = self.waited = 0.0  # of judging, summed over threads; of waiting in `results`, which sets both

    def add(self, row: int | np.integer, tokens: Sequence | np.ndarray, truncated: bool | np.generic):
        """Begins to judge a row's completion: its token ids, and whether the budget ended before a stop token."""
        submit = self._reward_functions.resources.threads.submit
        future = submit(self._begin, self._example(row), tokens, bool(truncated))
        self._rows[row] = future, truncated

    @property
    def rows(self) -> list:
        """The added rows' numbers, rising; with several processes, the rows of this process."""
        return sorted(self._rows)

    def results(self) -> Rewards:
        """Waits for all parts; returns the Rewards of the added rows in rising order, and sets seconds and waited."""
        order, asked = self.rows, time.monotonic()
        started = [self._rows[row][0].result() for row in order]
        texts, lengths, values, seconds = zip(*started, strict=True) if started else ((), (), (), ())
        examples, truncated = [self._example(row) for row in order], [self._rows[row][1] for row in order]
        began = time.monotonic()
        rewards = _add_up(self._reward_functions, examples, (texts, truncated, lengths), values)
        ended = time.monotonic()
        self.seconds, self.waited = sum(seconds) + ended - began, ended - asked
        return rewards

    def _example(self, row):
        return self._examples[row // self._group_size]

    def _begin(self, example, tokens, truncated):
        """Decodes and judges a completion: (text, number of tokens, outcomes of _begin_parts, seconds of judging)."""
        text, began = completion_text(self._tokenizer, tokens, self._stop_tokens), time.monotonic()
        values = _begin_parts(self._reward_functions, text, example, truncated)
        return text, len(tokens), values, time.monotonic() - began


def compute_rewards(
    reward_functions: RewardFunctions,
    examples: Sequence[Example],
    texts: Sequence[str] | np.ndarray,
    truncated: Sequence | np.ndarray,
    lengths: Sequence | np.ndarray,
) -> Rewards:
    """The Rewards of B completions, judged in one call.

    examples: P of them, each for B / P neighbouring rows; texts, truncated, lengths: one a row, as in Rewards.
    """
    row_examples = _repeat(examples, len(texts))
    begin = functools.partial(_begin_parts, reward_functions)
    values = list(reward_functions.resources.threads.map(begin, texts, row_examples, map(bool, truncated)))
    return _add_up(reward_functions, row_examples, (texts, truncated, lengths), values)


def _repeat(examples, rows):
    """The example of each of `rows` rows; an example has equally many neighbouring rows."""
    return [examples[row // (rows // len(examples))] for row in range(rows)]


def _begin_parts(reward_functions, text, example, truncated):
    """Calls the parts that take one completion; returns {name: Outcome, or the future of an asynchronous part's}."""
    functions = reward_functions.of(example)
    outcomes, verifier = {}, functions.verifier
    # the verifier first, since others may read its verdict
    for name, part in sorted(functions.parts.items(), key=lambda item: item[0] != verifier):
        if part.batched:
            continue
        known = part.tell(truncated, reward_functions.step)  # a source's own functions have no step
        if part.reads_correct:
            known['correct'] = _is_correct(functions, outcomes[verifier].value)
        call = _submit if part.asynchronous else call_part
        outcomes[name] = call(reward_functions, part, text, example, **known)
    return outcomes


def call_part(reward_functions: RewardFunctions, part: Part, *arguments: Any, **known: Any) -> Outcome:
    """Calls a part that is not asynchronous until it gives an Outcome; _after_exception says what is called again.

    arguments: a completion and its example, or lists of all; known: `correct`, `truncated` and `step`, each where the
    part reads it. Raises an exception that the run does not tolerate.
    """
    retry = 0
    while True:
        try:
            return Outcome(part.function(*arguments, **known), retry > 0)
        except Exception as error:
            outcome = _after_exception(reward_functions, part, retry, error)
        if outcome:
            return outcome
        time.sleep(pause_before(retry))
        retry += 1


def _submit(reward_functions, part, *arguments, **known):
    """The future of an asynchronous part's Outcome. A call for one completion ends at reward.deadline."""

    async def call():
        retry = 0
        while True:
            # a service has its own deadline, after which the completion lacks the part
            limit = asyncio.timeout(None if part.batched or part.remote else reward_functions.options.deadline)
            try:
                async with limit:
                    return Outcome(await part.function(*arguments, **known), retry > 0)
            except Exception as error:
                failure = Expired('was still running at its deadline') if limit.expired() else error
                outcome = _after_exception(reward_functions, part, retry, failure)
            if outcome:
                return outcome
            await asyncio.sleep(pause_before(retry))
            retry += 1

    return reward_functions.resources.event_loop.submit(call())


def _after_exception(reward_functions, part, retry, error):
    """The Outcome after an exception in call number `retry`, from 0, of a part; None where the part is called again.

    A user's part is called again up to reward.retries times for an exception that may pass: a TimeoutError, or one that
    FAILURES lacks. A service's client has asked again already. After that an exception that FAILURES lacks is
    raised, unless the part is the user's or a service's and may be lacking (RewardFunctions.tolerant).
    """
    counted = isinstance(error, tuple(FAILURES))
    passing = not counted or isinstance(error, TimeoutError)  # a user's function raises it when its service is slow
    if part.own and passing and retry < reward_functions.options.retries:
        return None
    if counted:
        return Outcome(error, retry > 0)
    if reward_functions.tolerant and (part.own or (part.remote and isinstance(error, RewardError))):
        return Outcome(None, retry > 0, error)
    raise error


def pause_before(retry: int) -> float:
    """Seconds to wait after failed call number `retry`, from 0, before the next call; they double each time."""
    return min(FIRST_PAUSE * 2.0**retry, LONGEST_PAUSE)


def judge_at_once(
    reward_functions: RewardFunctions,
    part: Part,
    texts: Sequence[str],
    examples: Sequence[Example],
    truncated: Sequence[bool],
) -> list[Outcome]:
    """Calls a part that is asynchronous or takes all completions; returns an Outcome for each text.

    examples, truncated: one for each text.
    """
    if not part.batched:
        rows = zip(texts, examples, truncated, strict=True)
        step = reward_functions.step
        futures = [_submit(reward_functions, part, *row, **part.tell(cut, step)) for *row, cut in rows]
        return [future.result() for future in futures]
    whole, known = (list(texts), list(examples)), part.tell(list(truncated), reward_functions.step)
    if part.asynchronous:
        outcome = _submit(reward_functions, part, *whole, **known).result()
    else:
        outcome = call_part(reward_functions, part, *whole, **known)
    values = outcome.value if isinstance(outcome.value, Sequence) else [outcome.value] * len(texts)
    return [outcome._replace(value=value) for value in values]


def _is_correct(reward_functions, value):
    """Whether the verifier's value means correct (bool); None where the verifier cannot tell."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return None
    return not isinstance(value, Exception) and value >= reward_functions.options.correct_at


def _add_up(reward_functions, examples, columns, started):
    """Waits for all parts and returns the Rewards of B rows.

    examples: the example of each row; columns: (texts, truncated, lengths); started: _begin_parts of each row.
    """
    texts, truncated, lengths = columns
    truncated = np.asarray(truncated, bool)
    options, parts, correct = reward_functions.options, {}, np.full(len(texts), np.nan)
    total = options.truncated_reward * truncated
    failures = {name: np.zeros(len(texts), bool) for name in FAILURES.values()}
    if not any(part.remote for part in reward_functions.every_part.values()):
        del failures['refused']
    retried, errors = np.zeros(len(texts), bool), np.full(len(texts), '', object)
    functions = [reward_functions.of(example) for example in examples]
    for name, part in reward_functions.every_part.items():
        parts[name] = np.full(len(texts), np.nan)
        unknown = 0.0 if options.missing == 'zero' and part.weight else np.nan
        rows = [row for row, row_functions in enumerate(functions) if name in row_functions.parts]
        if part.batched and rows:  # a process may have no row of a step
            columns = ([column[row] for row in rows] for column in (texts, examples, truncated.tolist()))
            outcomes = judge_at_once(reward_functions, part, *columns)
        else:
            outcomes = [started[row][name] for row in rows]
            outcomes = [future.result() for future in outcomes] if part.asynchronous else outcomes
        for row, (value, again, error) in zip(rows, outcomes, strict=True):
            retried[row] |= again
            if error is not None:
                errors[row] = f'{name}: {_describe(error)}'
            failed = isinstance(value, Exception)
            if failed:
                counted_as = next(counted for failure, counted in FAILURES.items() if isinstance(value, failure))
                failures[counted_as][row] = True
            if name == functions[row].verifier:
                verdict = _is_correct(functions[row], value)
                correct[row] = np.nan if verdict is None else verdict
            parts[name][row] = options.failed if failed else unknown if value is None or np.isnan(value) else value
        if part.weight:  # a part of weight 0 only measures: what it cannot tell leaves the completion its reward
            total[rows] += part.weight * parts[name][rows]
    failures['missing'] = errors != ''
    return Rewards(
        np.array(texts, object), truncated, np.asarray(lengths), total, correct, parts, failures, retried, errors
    )


def _describe(error):
    """An exception in one line of at most LONGEST characters: type and text, or a RewardError's remedy alone."""
    text = str(error.args[2]) if isinstance(error, RewardError) else f'{type(error).__name__}: {error}'
    return escape(' '.join(text.split())[:LONGEST])


def lacks_too_much(reward_functions: RewardFunctions, rewarded: Rewards) -> bool:
    """Whether the share of completions that lack a part for its exceptions is above reward.most_missing."""
    return bool(rewarded.failures['missing'].mean() > reward_functions.options.most_missing)


def check_missing(reward_functions: RewardFunctions, step: int, rewarded: Rewards):
    """Warns of completions of a step that lack a part whose calls all raised exceptions.

    Raises RewardsMissing when their share is above reward.most_missing. Else the step learns without these parts, and
    the requests that services did not answer are recorded, so that a resumed run leaves out the same parts.
    """
    missing, most = rewarded.failures['missing'], reward_functions.options.most_missing
    if missing.any():
        text = (
            f'step {step}: {missing.sum()} of {len(missing)} completions lack a part of their reward, which raised an '
            f'exception in each of its calls; the first is {next(filter(None, rewarded.errors))}'
        )
        if lacks_too_much(reward_functions, rewarded):
            raise RewardsMissing(
                'reward.most_missing',
                most,
                f'{text}; then the same command goes on, with --amend if you have changed a file of the reward',
            )
        logger.warning('%s', text)
    for client in reward_functions.resources.services.values():
        client.settle(step)


def service_counts(reward_functions: RewardFunctions) -> dict[str, float]:
    """{part/name: number} with each service's calls, stored, retries and cost since the last call; {} without any."""
    counts = {}
    for name, part in reward_functions.every_part.items():
        if part.remote:
            client = reward_functions.resources.services.get(name)
            counts |= {f'{name}/{key}': n for key, n in (client.take_counts() if client else {}).items()}
    return counts


def shape_rewards(reward_functions: RewardFunctions, rewarded: Rewards, grouping: Grouping) -> Float[np.ndarray, 'P G']:
    """The rewards plus the weighted shaping by length, if the config has one; NaN in cells without a completion."""
    shaped = rewarded.rewards.copy()
    if reward_functions.shaping:
        weight = reward_functions.options.length_shaping_weight
        for rows in grouping.rows_by_size():
            shaped[rows] += weight * reward_functions.shaping(rewarded.lengths[rows], rewarded.correct[rows] == 1)
    return grouping.spread(shaped, np.nan)


def list_terms(
    reward_functions: RewardFunctions, example: Example, rewarded: Rewards, row: int
) -> dict[str, tuple[float, float]]:
    """{name: (value, weight)} of the terms whose weighted sum is the reward of a row's completion of an example.

    Terms are the parts of the example's source, truncated_reward where the budget ended the completion, and the shaping
    by length. The rest of the reward, if any, is the term `other`. A part of weight 0 is listed and adds nothing.
    """
    options, parts = reward_functions.options, reward_functions.of(example).parts
    terms = {name: (float(rewarded.parts[name][row]), float(part.weight)) for name, part in parts.items()}
    if options.truncated_reward and rewarded.truncated[row]:
        terms['truncated_reward'] = 1.0, options.truncated_reward
    reward = (rewarded.learned if len(rewarded.learned) else rewarded.rewards)[row]
    rest = reward - sum(value * weight for value, weight in terms.values() if weight)
    if options.length_shaping and options.length_shaping_weight and len(rewarded.learned):
        terms[options.length_shaping] = rest / options.length_shaping_weight, options.length_shaping_weight
    elif abs(rest) > 1e-9:
        terms['other'] = float(rest), 1.0
    return terms


def advantage_inputs(
    reward_functions: RewardFunctions,
    examples: Sequence[Example],
    rewarded: Rewards,
    shaped: Float[np.ndarray, 'P G'],
    fetch_tokens: Callable[[], tuple],
    tokenizer: Any,
    grouping: Grouping,
) -> dict[str, Any]:
    """{name: array, or function () -> array where that takes time} that an advantage may read beside total rewards.

    examples: one for each equal block of rows; rewarded: the Rewards of the rows; shaped: total rewards with shaping;
    fetch_tokens() -> (rollout.tokens, rollout.completion_mask) on the host. Arrays are f64, and NaN in cells without a
    completion: correct [P, G], part_weights [parts], parts [parts, P, G], step_rewards [P, G, C].
    """
    parts = reward_functions.every_part.values()
    reward_steps: Any = reward_functions.steps

    def stack_parts():
        return np.stack([grouping.spread(part, np.nan) for part in rewarded.parts.values()])

    @functools.cache  # the advantage reads them, and then the dump of rollouts
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
    """Places each step's reward at the step's last token; NaN elsewhere. Rewards at one token are added.

    steps: for each row, pairs of (end in characters, reward). outcomes: the rewards of whole completions, each placed
    at the completion's last token; None: only steps are paid. tokens and mask are those of the rollout.
    """
    tokens, placed = tokens[:, -mask.shape[1] :], np.full(mask.shape, np.nan)
    for row, row_steps in enumerate(steps):
        length = int(mask[row].sum())
        # characters that the first n + 1 tokens write, rising in n
        written = [len(completion_text(tokenizer, tokens[row, : n + 1])) for n in range(length)]
        token_rewards = [(int(np.searchsorted(written, end)), value) for end, value in row_steps]
        if outcomes is not None:
            token_rewards.append((length - 1, outcomes[row]))
        for token, value in token_rewards:
            if 0 <= token < length:
                placed[row, token] = value + np.nan_to_num(placed[row, token])
    return placed
