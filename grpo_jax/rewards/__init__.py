"""Rewards that verify: score = weighted sum of parts, plus a term for truncated completions.

A reward is a module of this package with `reward(completion, example) -> float | None` (None:
unscorable); one that can serve as the verifier also has `extract(completion) -> str | None`, and one that
rewards steps `steps(completion, example) -> list of (end in characters, float)`.
"""
from collections.abc import Callable
import concurrent.futures
import functools
import importlib
from typing import NamedTuple

import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.rewards import length


class Scorer(NamedTuple):
    """The rewards of a run."""

    parts: dict[str, tuple[Callable, float]]   # name -> (reward, weight)
    truncated: float                           # added to a completion that ran out of budget
    verifier: str                              # the part that decides correct (reward >= 1), or ''
    extract: Callable | None                   # the verifier's answer extraction
    steps: Callable | None = None              # rewards of a completion's steps
    length: Callable | None = None             # (lengths, correct) -> shaping, of rewards.length
    length_weight: float = 1.0


def make(section, max_tokens):
    """Scorer of a config section, for completions of up to max_tokens; BadInput for an unknown reward."""
    modules = {name: _module(name) for name, _ in section['parts']}
    verifier = section['verifier']
    if verifier and verifier not in modules:
        raise BadInput('reward.verifier', verifier, f'must be one of reward.parts: {sorted(modules)}')
    if not modules:
        raise BadInput('reward.parts', section['parts'], 'name at least one reward')
    if verifier and not hasattr(modules[verifier], 'extract'):
        raise BadInput('reward.verifier', verifier, 'has no extract(completion); name another part, or \'\' for none')
    steps = section['steps'] and _module(section['steps'])
    if steps and not hasattr(steps, 'steps'):
        raise BadInput('reward.steps', section['steps'], 'has no steps(completion, example); use calculator, or \'\'')
    shapes = {'overlong': length.overlong, 'kimi': length.kimi}
    if section['length'] and section['length'] not in shapes:
        raise BadInput('reward.length', section['length'], 'choose overlong, kimi, or \'\'')
    if section['length'] == 'overlong' and not 0 < section['length_margin'] < max_tokens:
        raise BadInput('reward.length_margin', section['length_margin'], 'must lie between 0 and rollout.max_tokens = '
                       f'{max_tokens}')
    shaping = section['length'] and functools.partial(shapes[section['length']], limit=max_tokens,
                                                      margin=section['length_margin'])
    parts = {name: (modules[name].reward, weight) for name, weight in section['parts']}
    return Scorer(parts, section['truncated'], verifier, modules[verifier].extract if verifier else None,
                  steps.steps if steps else None, shaping or None, section['length_weight'])


def _module(name):
    try:
        return importlib.import_module(f'grpo_jax.rewards.{name}')
    except ModuleNotFoundError as error:
        if error.name != f'grpo_jax.rewards.{name}':
            raise
        raise BadInput('reward.parts', name, 'no such file in grpo_jax/rewards; add one with '
                       'reward(completion, example)') from None


class Scoring:
    """Scores a step's completions on a thread of its own, as they are handed over while others still decode."""

    def __init__(self, scorer, examples, group_size, tokenizer):
        self._scorer, self._examples, self._group_size, self._tokenizer = scorer, examples, group_size, tokenizer
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._scored = {}

    def add(self, row, tokens, truncated):
        """Takes the completion of a row: its token ids, and whether its budget ended before a stop came."""
        self._scored[row] = self._thread.submit(self._score, self._examples[row // self._group_size], tokens, truncated)

    def results(self):
        """(texts, truncated bool[B], lengths i64[B], rewards f64[B], parts dict of f64[B]) in the order of rows."""
        scored = [self._scored[row].result() for row in sorted(self._scored)]
        self._thread.shutdown()
        texts, truncated, lengths, rewards, parts = zip(*scored, strict=True)
        by_name = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return list(texts), np.array(truncated), np.array(lengths), np.concatenate(rewards), by_name

    def _score(self, example, tokens, truncated):
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text, truncated, len(tokens), *score(self._scorer, [example], [text], [truncated])


def score(scorer, examples, completions, truncated):
    """(rewards f64[B], parts dict of f64[B]) of B completions; examples has P entries, B / P rows each.

    NaN marks a completion that no part could score. truncated is bool[B].
    """
    group = len(completions) // len(examples)
    parts = {}
    for name, (reward, _) in scorer.parts.items():
        values = [reward(text, examples[row // group]) for row, text in enumerate(completions)]
        parts[name] = np.array([np.nan if v is None else v for v in values], np.float64)
    weights = np.array([weight for _, weight in scorer.parts.values()])
    stacked = np.stack(list(parts.values()))
    total = np.nansum(weights[:, None] * stacked, 0) + scorer.truncated * np.asarray(truncated)
    return np.where(np.isfinite(stacked).any(0), total, np.nan), parts


def shaped(scorer, rewards, lengths, parts):
    """rewards f64[P, G] with the shaping by length, where there is one; lengths i64[B], parts dict of f64[B]."""
    if not scorer.length:
        return rewards
    judged = parts[scorer.verifier].reshape(rewards.shape) >= 1 if scorer.verifier else rewards > 0
    return rewards + scorer.length_weight * scorer.length(lengths.reshape(rewards.shape), judged)


def known(scorer, examples, texts, rollout, rewards, parts, tokenizer):
    """What an advantage may read beside total rewards, by name; functions, so that only what is read is worked out."""
    found = {'part_weights': np.array([weight for _, weight in scorer.parts.values()]),
             'parts': lambda: np.stack([parts[name] for name in scorer.parts]).reshape(-1, len(examples),
                                                                                     len(texts) // len(examples))}
    if scorer.steps:
        found['step_rewards'] = lambda: step_rewards(scorer, examples, texts, rollout, rewards, tokenizer)
    return found


def step_rewards(scorer, examples, texts, rollout, rewards, tokenizer):
    """f64[P, G, C]: the reward of each step at its last token, the completion's own at its end, NaN elsewhere."""
    tokens, mask = (np.asarray(x) for x in (rollout.tokens, rollout.completion_mask))
    tokens, group = tokens[:, -mask.shape[1]:], len(texts) // len(examples)
    found = np.full(mask.shape, np.nan)
    for row, text in enumerate(texts):
        length = int(mask[row].sum())
        written = [len(tokenizer.decode(tokens[row, :n + 1], skip_special_tokens=True)) for n in range(length)]
        steps = [(int(np.searchsorted(written, end)), value)
                 for end, value in scorer.steps(text, examples[row // group])]
        for token, value in [*steps, (length - 1, rewards.reshape(-1)[row])]:
            if 0 <= token < length:
                found[row, token] = value + np.nan_to_num(found[row, token])
    return found.reshape(len(examples), group, -1)
