"""Reads a run's completions for the report: groups of a step, with tokens and the tokens' numbers."""

from collections.abc import Iterator
import glob
import os
import re
from typing import Any

from grpo_jax.tools.report.read import Run, as_number, read_lines

# key of a token's numbers in a dump -> key in the page
NUMBERS = {'logprobs': 'l', 'entropy': 'e', 'old_logprobs': 'o', 'ref_logprobs': 'f', 'step_rewards': 's'}
DIGITS = 4  # of a dump's numbers


def read_steps(run: Run, notes: list[str]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields (step, groups as of make_groups) for each dump of a run, the oldest first; notes damaged lines."""
    for path in sorted(glob.glob(os.path.join(glob.escape(run.folder), 'rollouts', '*.jsonl'))):
        name = re.fullmatch(r'(\d{1,15})\.jsonl', os.path.basename(path))
        if name:
            rows = [row for row in read_lines(path, notes) if isinstance(row.get('completion'), str)]
            if rows:
                yield int(name[1]), make_groups(rows)


def make_groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a dict for each group of a dump: id, prompt, answer, rows of make_row and, for messages, chat.

    A group is neighbouring rows with equal id, prompt, answer and messages.
    """
    groups: list[dict[str, Any]] = []
    for row in rows:
        head: dict[str, Any] = {
            'id': _as_text(row.get('id')),
            'prompt': _as_text(row.get('prompt')),
            'answer': _as_text(row.get('answer')),
        }
        if row.get('messages'):
            messages = row['messages'] if isinstance(row['messages'], list) else []
            head['chat'] = [
                [_as_text(m.get('role')), _as_text(m.get('content'))] for m in messages if isinstance(m, dict)
            ]
        if not groups or any(groups[-1].get(key) != value for key, value in head.items()):
            groups.append(head | {'rows': []})
        groups[-1]['rows'].append(make_row(row))
    return groups


def make_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a dump's row as a dict with short keys, for JSON.

    The keys: c text, r reward, v verdict, w terms of the reward as [value, weight], p parts (in a dump without terms),
    u what was learned from where that is not the reward, a advantage, n length, t truncated, k tokens, and the values
    of NUMBERS for numbers by token. The text is left out where the tokens begin with it. A list without one entry for
    each token is left out too.
    """
    short: dict[str, Any] = {'r': _round_number(row.get('reward'))}
    if isinstance(row.get('correct'), bool):
        short['v'] = row['correct']
    terms = row.get('terms')
    if isinstance(terms, dict) and all(isinstance(term, list) and len(term) == 2 for term in terms.values()):
        short['w'] = {str(name): [_round_number(value) for value in term] for name, term in terms.items()}
    elif isinstance(row.get('parts'), dict):  # an older dump has no weights
        short['p'] = {str(name): _round_number(value) for name, value in row['parts'].items()}
    if isinstance(row.get('learned_from'), list) and row['learned_from'] != ['reward']:
        short['u'] = [str(name).replace('_', ' ') for name in row['learned_from']]
    tokens = row.get('tokens')
    if isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens):
        short['k'] = tokens
        columns = {key: row.get(name) for name, key in NUMBERS.items()} | {'a': row.get('advantage')}
        short |= {
            key: [_round_number(value) for value in values]
            for key, values in columns.items()
            if isinstance(values, list) and len(values) == len(tokens)
        }
    if 'k' not in short or not ''.join(short['k']).startswith(row['completion']):
        short['c'] = row['completion']
    if not isinstance(row.get('advantage'), list):
        short['a'] = _round_number(row.get('advantage'))
    if isinstance(row.get('length'), int):
        short['n'] = row['length']
    if row.get('truncated') is True:
        short['t'] = True
    return short


def _round_number(value):
    """A value rounded to DIGITS, as an int when it is whole; None when it is no number."""
    value = as_number(value)
    if value != value:
        return None
    value = round(value, DIGITS)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _as_text(value):
    """A value as text; '' for None."""
    return value if isinstance(value, str) else '' if value is None else str(value)
