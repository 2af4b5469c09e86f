"""Preference pairs: a prompt with a chosen and a rejected completion, for DPO and for pairwise reward models."""

import functools

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, get_field, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.types import Example

FILES = ''


def examples(
    split: str,
    *,
    folder: str,
    subset: str = '',
    prompt_field: str = 'prompt',
    chosen_field: str = 'chosen',
    rejected_field: str = 'rejected',
) -> list[Example | BadInput]:
    """Examples of a split's rows, as files.rows reads them; of <split>_prefs, where there is one, as in UltraFeedback.

    meta['demonstration'] is the chosen completion and meta['rejected'] the rejected one, unless they are equal; there
    is no answer. A completion is a text, or a chat of one message of the user and its answer, which then also gives the
    prompt where the row has no field for it. HuggingFaceH4/ultrafeedback_binarized and trl-lib/ultrafeedback_binarized
    on the hub.
    """
    folder = files.open_subset(folder, subset)
    name = f'{split}_prefs' if files.has_split(folder, f'{split}_prefs') else split
    example = functools.partial(_example, (prompt_field, chosen_field, rejected_field))
    return convert_rows(example, files.rows(folder, name))


def _example(fields, row, index, where):
    prompt_field, *completion_fields = fields
    asked, completions = [], []
    if get_field(row, prompt_field) is not None:
        asked += _contents(row, prompt_field, where, [['user']])
    for field in completion_fields:
        *prompt, completion = _contents(row, field, where, [['assistant'], ['user', 'assistant']])
        asked += prompt
        completions.append(completion)
    if len({prompt.strip() for prompt in asked}) != 1:
        raise BadInput(where, shorten(asked), 'must be one prompt, that of both completions; mend or remove the row')
    chosen, rejected = completions
    meta = {'demonstration': chosen} | ({'rejected': rejected} if rejected != chosen else {})
    return Example(asked[0], '', index, meta)


def _contents(row, field, where, chats):
    """The texts of a field: one, or those of a chat whose roles are one of `chats`."""
    value = get_field(row, field)
    if not isinstance(value, list):
        return [text_field(row, field, where)]
    if not all(isinstance(message, dict) for message in value) or [m.get('role') for m in value] not in chats:
        roles = ' or '.join(', '.join(chat) for chat in chats)
        raise BadInput(where, shorten(value), f'field {field!r} must be a text or messages of {roles}; remove the row')
    return [text_field(message, 'content', where) for message in value]
