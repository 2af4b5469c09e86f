"""Rows of a run's files: metrics of a step (metrics.jsonl), events, and completions (rollouts/<step>.jsonl)."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import json
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.hosts.files import Lines, atomic_write
from grpo_jax.rewards import RewardFunctions, Rewards, list_terms
from grpo_jax.text import exact_text
from grpo_jax.types import Example, Experience, Rollout

EVENTS = 'events.jsonl'
# events that a repeated step does not cause again, so that they stay when steps are repeated after a resume
LASTING = ('amended', 'branched', 'damaged')
DIGITS = 4  # decimals of a token's numbers
DETAILED = 2**18  # tokens of a dump that are written one by one; further completions have only their text
LONGEST_CHARACTER = 8  # most tokens of one character
CUT = '\ufffd'  # a decoder's text of an incomplete character


def append_event(workdir: str | os.PathLike, step: int, event: str, **fields: Any) -> None:
    """Appends an event to events.jsonl in the first process; does nothing in the others.

    step: in or before which the event happened; event: its kind; fields: its further columns. Raises CannotWrite when
    the disk refuses it.
    """
    if processes.is_first():
        with Lines(os.path.join(workdir, EVENTS)) as file:
            file.append(json.dumps({'step': step, 'event': event, **fields}))


def recorded_events(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of events.jsonl in the order of writing, without an incomplete last row; [] without the file."""
    return [json.loads(line) for line in _read_event_lines(workdir)]


def drop_events(workdir: str | os.PathLike, first_step: int) -> None:
    """Removes from events.jsonl the events of first_step and later steps, which will be repeated, but LASTING ones."""
    path = os.path.join(workdir, EVENTS)
    if os.path.exists(path) and processes.is_first():
        rows = [(line, json.loads(line)) for line in _read_event_lines(workdir)]
        lasting = [line for line, row in rows if row['step'] < first_step or row['event'] in LASTING]
        if sum(map(len, lasting)) < os.path.getsize(path):
            with atomic_write(path) as file:
                file.writelines(lasting)


def rewrite_events(workdir: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the rows of events.jsonl in the first process; does nothing in the others."""
    if processes.is_first():
        with atomic_write(os.path.join(workdir, EVENTS)) as file:
            file.writelines(json.dumps(row) + '\n' for row in rows)


def _read_event_lines(workdir):
    """The complete lines of events.jsonl, with their line ends; [] without the file."""
    path = os.path.join(workdir, EVENTS)
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf8') as lines:
        return [line for line in lines if line.endswith('\n')]


def plain_row(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl: {'step': step}, then {metric: float, or None if not finite} sorted by name."""
    return {'step': step} | {name: json_float(value) for name, value in sorted(row.items())}


def json_float(value: Any) -> float | None:
    """A number as a float; None for NaN and infinities, which JSON lacks."""
    value = float(value)
    return value if np.isfinite(value) else None


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, as dicts."""
    with open(path, encoding='utf8') as lines:
        return [json.loads(line) for line in lines]


def evaluated_prompts(workdir: str | os.PathLike) -> str:
    """'training' where a run's files say that it evaluates prompts of its train split, else 'held-out'."""
    with contextlib.suppress(BadInput, LookupError, TypeError):  # of files that are not there, or damaged
        config, contents = (json_file.read(os.path.join(workdir, f'{name}.json')) for name in ('config', 'contents'))
        if contents['splits']['train'] == contents['splits']['test'] and not config['data']['held_out']:
            return 'training'
    return 'held-out'


def rollout_rows(
    examples: Sequence[Example],
    rollout: Rollout,
    rewarded: Rewards,
    experience: Experience | None,
    tokenizer: Any,
    reward_functions: RewardFunctions,
) -> list[dict[str, Any]]:
    """One dict for each completion: prompt, gold answer, completion, reward, advantage, and its tokens one by one.

    examples: one for each equal block of the rollout's first rows; further rows are left out; rewarded: the rewards of
    these rows; experience: None for completions that nobody learns from, whose advantage is then None.

    reward is what the step learned from, with shaping by length, and terms {name: [value, weight]} add up to it; parts
    are all values, also those of other sources; step_rewards exist where they were learned from. The advantage is a
    number, or a list with one number for each token. tokens are texts, the stop token included; logprobs are the
    sampler's; entropy, old_logprobs and ref_logprobs exist where the learner computed them before its update. All
    processes must call it.
    """
    group = len(rewarded.texts) // len(examples)
    learned = rewarded.learned if len(rewarded.learned) else rewarded.rewards
    numbers, advantages = {'logprobs': rollout.logprobs}, None
    if experience:
        # the update does not see tokens that were dropped, whatever their advantage
        advantages = jnp.where(experience.rollout.completion_mask.any(1)[:, None], experience.advantages, 0.0)
        numbers |= {
            'entropy': experience.old_entropy,
            'old_logprobs': experience.old_logprobs,
            'ref_logprobs': experience.ref_logprobs,
        }
    advantages, tokens, mask, numbers = processes.fetch((advantages, rollout.tokens, rollout.completion_mask, numbers))
    mask = mask[: len(rewarded.texts)]
    if not np.any(numbers['logprobs']):
        del numbers['logprobs']  # all 0: completions were read from the data, not sampled
    tokens = tokens[:, -mask.shape[1] :]
    detailed = int(np.searchsorted(np.cumsum(mask.sum(1)), DETAILED, side='right'))
    texts = token_texts(tokenizer, [tokens[i][mask[i]] for i in range(detailed)])
    rows = []
    for i, completion in enumerate(rewarded.texts):
        example, length, advantage = examples[i // group], int(rewarded.lengths[i]), None
        if advantages is not None:
            by_completion = advantages.shape[1] == 1
            advantage = json_float(advantages[i, 0]) if by_completion else _round_numbers(advantages[i, :length])
        row = {
            'id': example.id,
            'prompt': example.prompt,
            **({'messages': example.messages} if example.messages else {}),
            'answer': example.answer,
            'completion': completion,
            'reward': json_float(learned[i]),
            'terms': {
                name: [None if value is None else round(value, 9), weight]
                for name, (number, weight) in list_terms(reward_functions, example, rewarded, i).items()
                for value in [json_float(number)]
            },
            'correct': None if np.isnan(rewarded.correct[i]) else bool(rewarded.correct[i]),
            'parts': {name: json_float(values[i]) for name, values in rewarded.parts.items()},
            'advantage': advantage,
            'length': length,
            'truncated': bool(rewarded.truncated[i]),
        }
        if len(rewarded.step_rewards):
            row['step_rewards'] = _round_numbers(rewarded.step_rewards[i, :length])
        if i < detailed:
            row['tokens'] = texts[i]
            row |= {name: _round_numbers(x[i][mask[i]]) for name, x in numbers.items() if x is not None}
        rows.append(row)
    return rows


def describe_reward(row: Mapping[str, Any]) -> str:
    """The reward of a dumped completion in words, like '0.4 = numeric 1 + 0.5 x overlong -1.2, right'.

    row: a row of rollout_rows. A single term of weight 1 is left out, and so is a verdict that equals the reward. Where
    the algorithm learned from other values than the reward, these are named.
    """
    reward = row.get('reward')
    text = 'no reward' if reward is None else f'{reward:.3g}'
    terms = {name: term for name, term in (row.get('terms') or {}).items() if term[1]}
    if [weight for _, weight in terms.values()] not in ([], [1.0]):
        sums = [
            f'{"" if weight == 1 else f"{weight:g} x "}{name} {"unknown" if value is None else f"{value:.3g}"}'
            for name, (value, weight) in terms.items()
        ]
        text += f' = {" + ".join(sums)}'
    if row.get('correct') is not None and reward != row['correct']:
        text += ', right' if row['correct'] else ', wrong'
    sources = row.get('learned_from')
    if sources is not None and sources != ['reward']:
        text += f', learned from {" and ".join(sources) or "no reward"}'.replace('_', ' ')
    return text


def token_texts(tokenizer: Any, completions: Sequence[np.ndarray]) -> list[list[str]]:
    """The texts of each completion's tokens, special tokens included; joined, they are the completion.

    completions: token ids of each. When several tokens make one character, the first has the character as its text, and
    the others are empty.
    """
    # decoded before each token, since SentencePiece drops the blank at the start of a text
    before = tokenizer.encode('a', add_special_tokens=False)

    def decode(runs):
        """The text of each run of tokens as it stands inside a completion, with its blank at the start."""
        start, *texts = (exact_text(tokenizer, run) for run in [before, *([*before, *run] for run in runs)])
        alone = [text if text.startswith(start) else None for text in texts]
        return [
            exact_text(tokenizer, run) if text is None else text[len(start) :]
            for run, text in zip(runs, alone, strict=True)
        ]

    ids = sorted({int(token) for completion in completions for token in completion})
    text_of = dict(zip(ids, decode([[token] for token in ids]), strict=True))
    return [_join_characters([int(token) for token in completion], text_of, decode) for completion in completions]


def _join_characters(completion, text_of, decode):
    """The texts of a completion's tokens, where tokens that are parts of one character are decoded together."""
    texts = [text_of[token] for token in completion]
    place = 0
    while place < len(texts):
        end = place + 1
        while CUT in texts[place] and end < len(texts) and end - place < LONGEST_CHARACTER and CUT in texts[end]:
            end += 1
            (character,) = decode([completion[place:end]])
            if CUT not in character:
                texts[place:end] = [character, *[''] * (end - place - 1)]
                break
        else:
            end = place + 1
        place = end
    return texts


def _round_numbers(values):
    """The numbers as a list, rounded to DIGITS decimals; None for one that is not finite."""
    return [None if number is None else round(number, DIGITS) for number in map(json_float, values)]
