"""The rows of a run's files: of steps (metrics.jsonl), of events, and of completions (rollouts/<step>.jsonl)."""

from collections.abc import Iterable, Mapping, Sequence
import json
import os
from typing import Any

import numpy as np

from grpo_jax.hosts import processes
from grpo_jax.hosts.files import Lines, atomic_write
from grpo_jax.rewards import Rewards
from grpo_jax.types import Example, Experience, Rollout

EVENTS = 'events.jsonl'
# from outside of the run: they stay when their step is taken again. All others happen again with their step
LASTING = ('amended', 'branched', 'damaged')
DIGITS = 4  # behind the point, of a token's numbers
DETAILED = 2**18  # tokens of a dump that stand one by one; the completions behind them have their text alone
LONGEST_CHARACTER = 8  # tokens
CUT = '\ufffd'  # what a decoder gives for a part of a character


def append_event(workdir: str | os.PathLike, step: int, event: str, **fields: Any) -> None:
    """Adds a row; the first process writes, the others do nothing.

    step: the one before which it happened, or in it.

    CannotWrite when the disk refuses it.
    """
    if processes.is_first():
        with Lines(os.path.join(workdir, EVENTS)) as file:
            file.append(json.dumps({'step': step, 'event': event, **fields}))


def recorded_events(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows in the order in which they were written, without half a row at the end; [] for a run without."""
    return [json.loads(line) for line in _event_lines(workdir)]


def drop_events(workdir: str | os.PathLike, first_step: int) -> None:
    """Drops what steps from first_step on have left, which will be taken again; LASTING events stay."""
    path = os.path.join(workdir, EVENTS)
    if os.path.exists(path) and processes.is_first():
        rows = [(line, json.loads(line)) for line in _event_lines(workdir)]
        lasting = [line for line, row in rows if row['step'] < first_step or row['event'] in LASTING]
        if sum(map(len, lasting)) < os.path.getsize(path):
            with atomic_write(path) as file:
                file.writelines(lasting)


def rewrite_events(workdir: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Puts rows in the place of those that are there; the first process writes, the others do nothing."""
    if processes.is_first():
        with atomic_write(os.path.join(workdir, EVENTS)) as file:
            file.writelines(json.dumps(row) + '\n' for row in rows)


def _event_lines(workdir):
    path = os.path.join(workdir, EVENTS)
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf8') as lines:
        return [line for line in lines if line.endswith('\n')]


def plain_row(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """A step's row as metrics.jsonl has it."""
    return {'step': step} | {name: json_float(value) for name, value in sorted(row.items())}


def json_float(value: Any) -> float | None:
    """A number as a float that JSON can hold; None for NaN and infinities."""
    value = float(value)
    return value if np.isfinite(value) else None


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file as dicts."""
    with open(path, encoding='utf8') as lines:
        return [json.loads(line) for line in lines]


def rollout_rows(
    examples: Sequence[Example], rollout: Rollout, rewarded: Rewards, experience: Experience | None, tokenizer: Any
) -> list[dict[str, Any]]:
    """One dict a completion: its prompt, gold answer, rewards by part, advantage, and its tokens one by one.

    The advantage is one number where it is that of the whole completion, and a list with one for each of its tokens
    where it is by token. tokens are texts, the stop token's too; logprobs are the sampler's, and entropy, old_logprobs
    and ref_logprobs stand where the learner computed them before its update. Without experience, for completions that
    nobody learns from, the advantage is None. Rows of the rollout behind those of the examples are left out. All
    processes must call it.
    """
    group = len(rewarded.texts) // len(examples)
    numbers, advantages = {'logprobs': rollout.logprobs}, None
    if experience:
        advantages = experience.advantages
        numbers |= {
            'entropy': experience.old_entropy,
            'old_logprobs': experience.old_logprobs,
            'ref_logprobs': experience.ref_logprobs,
        }
    advantages, tokens, mask, numbers = processes.fetch((advantages, rollout.tokens, rollout.completion_mask, numbers))
    mask = mask[: len(rewarded.texts)]
    if not np.any(numbers['logprobs']):
        del numbers['logprobs']  # read from the data: nothing was sampled
    tokens = tokens[:, -mask.shape[1] :]
    detailed = int(np.searchsorted(np.cumsum(mask.sum(1)), DETAILED, side='right'))
    texts = token_texts(tokenizer, [tokens[i][mask[i]] for i in range(detailed)])
    rows = []
    for i, completion in enumerate(rewarded.texts):
        example, length, advantage = examples[i // group], int(rewarded.lengths[i]), None
        if advantages is not None:  # a number of the completion, or one of each of its tokens
            one = advantages.shape[1] == 1
            advantage = json_float(advantages[i, 0]) if one else _rounded(advantages[i, :length])
        row = {
            'id': example.id,
            'prompt': example.prompt,
            **({'messages': example.messages} if example.messages else {}),
            'answer': example.answer,
            'completion': completion,
            'reward': json_float(rewarded.rewards[i]),
            'correct': None if np.isnan(rewarded.correct[i]) else bool(rewarded.correct[i]),
            'parts': {name: json_float(values[i]) for name, values in rewarded.parts.items()},
            'advantage': advantage,
            'length': length,
            'truncated': bool(rewarded.truncated[i]),
        }
        if i < detailed:
            row['tokens'] = texts[i]
            row |= {name: _rounded(x[i][mask[i]]) for name, x in numbers.items() if x is not None}
        rows.append(row)
    return rows


def token_texts(tokenizer: Any, completions: Sequence[np.ndarray]) -> list[list[str]]:
    """The text of each token of each completion, which joined are the completion with its special tokens.

    A character of several tokens stands at the first of them, and the others are empty.
    """
    before = tokenizer.encode('a', add_special_tokens=False)  # SentencePiece drops the blank of a first word

    def decode(runs):
        options = {'skip_special_tokens': False, 'clean_up_tokenization_spaces': False}
        start, *texts = tokenizer.batch_decode([before, *([*before, *run] for run in runs)], **options)
        alone = [text if text.startswith(start) else None for text in texts]
        return [
            tokenizer.decode(run, **options) if text is None else text[len(start) :]
            for run, text in zip(runs, alone, strict=True)
        ]

    ids = sorted({int(token) for completion in completions for token in completion})
    text_of = dict(zip(ids, decode([[token] for token in ids]), strict=True))
    return [_join_characters([int(token) for token in completion], text_of, decode) for completion in completions]


def _join_characters(completion, text_of, decode):
    """The texts of a completion's tokens, with the characters that are cut in them put together again."""
    texts = [text_of[token] for token in completion]
    place = 0
    while place < len(texts):
        end = place + 1
        while CUT in texts[place] and end < len(texts) and end - place < LONGEST_CHARACTER and CUT in texts[end]:
            end += 1
            (whole,) = decode([completion[place:end]])
            if CUT not in whole:
                texts[place:end] = [whole, *[''] * (end - place - 1)]
                break
        else:
            end = place + 1
        place = end
    return texts


def _rounded(values):
    """The numbers as JSON takes them, None for one that is not finite."""
    return [None if number is None else round(number, DIGITS) for number in map(json_float, values)]
