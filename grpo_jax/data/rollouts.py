"""A run's dumped completions as demonstrations and preference pairs for another policy, for distillation."""

import functools
import glob
import json
import os

from grpo_jax.data import jsonl
from grpo_jax.data.records import convert_rows, read_messages, shorten, split_malformed, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example


def examples(split: str, *, folder: str, least: float | None = None, by: str = '') -> list[Example | BadInput]:
    """One Example for each distinct right completion in folder/*.jsonl (a run's rollouts/).

    A completion is right if the run's verifier said so; with `least`, if its reward is at least that. by: the part
    whose reward counts, '' for the total. meta['demonstration'] is the completion; meta['rejected'] is the same
    prompt's completion with the smallest reward, if that is smaller. The test split is a tenth of the prompts. Raises
    BadInput when there is no file or no right completion.
    """
    paths = sorted(glob.glob(os.path.join(folder, '*.jsonl')))
    if not paths:
        remedy = "holds no *.jsonl; name a run's rollouts folder, and let the run write every step (log.rollouts=1)"
        raise BadInput('data.options.folder', folder, remedy)
    convert = _by_verdict if least is None else functools.partial(_by_reward, by=by)
    rows, malformed = split_malformed([row for path in paths for row in convert_rows(convert, jsonl.read(path))])
    by_prompt = {}
    chats = {}
    for prompt, messages, answer, completion, reward in rows:
        if reward is not None:
            task = prompt, answer, json.dumps(messages)
            chats[task] = messages
            by_prompt.setdefault(task, {}).setdefault(completion, reward)
    examples = []
    for i, (task, rewards) in enumerate(sorted(by_prompt.items())):
        prompt, answer, _ = task
        if (i % 10 == 0) != (split == 'test'):
            continue
        worst = min(rewards, key=rewards.get)
        for completion, reward in sorted(rewards.items()):
            if reward >= (1.0 if least is None else least):
                meta = {'demonstration': completion} | ({'rejected': worst} if rewards[worst] < reward else {})
                examples.append(Example(prompt, answer, len(examples), meta, chats[task]))
    if not examples:
        change = 'set it to the least reward of a right one' if least is None else 'lower it'
        remedy = f'no completion of the {split} split in {folder} is right; {change}, or bring more'
        raise malformed[0] if malformed else BadInput('data.options.least', least, remedy)
    return examples + malformed


def _by_reward(row, _, where, by):
    """What _read_row returns, with the total reward, or the part named `by`, as reward; None where the row has null."""
    parts = row['parts'] if isinstance(row.get('parts'), dict) else {}
    if by and by not in parts:
        raise BadInput(where, by, f'is none of its parts {sorted(parts)}; choose one in data.options.by')
    return _read_row(row, where, parts[by] if by else row.get('reward', ''))


def _by_verdict(row, _, where):
    """What _read_row returns, with the verifier's verdict as reward: 1.0, 0.0, or None where it could not tell."""
    if row.get('correct', '') not in (True, False, None):
        raise BadInput(where, sorted(row), 'has no verdict of a verifier; set data.options.least to a reward')
    return _read_row(row, where, None if row['correct'] is None else float(row['correct']))


def _read_row(row, where, reward):
    """(prompt, messages, answer, completion, reward) of a dumped row; raises BadInput for a malformed one."""
    completion = row.get('completion')
    if not isinstance(completion, str) or not (reward is None or isinstance(reward, (int, float))):
        raise BadInput(where, shorten((completion, reward)), 'must be a completion and its reward; remove the row')
    answer = text_field(row, 'answer', where) if row.get('answer') else ''  # a reward may need none
    messages = read_messages(row, 'messages', where) if 'messages' in row else ()
    return text_field(row, 'prompt', where), messages, answer, completion, reward
