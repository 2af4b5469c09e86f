"""Preference pairs: a prompt with a chosen and a rejected completion, for DPO and for pairwise reward models."""

import functools
import itertools

from grpo_jax.data import files
from grpo_jax.data.records import chat_prompt, convert_rows, get_field, read_completion, read_prompt, shorten
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
    """Reads a split of preference pairs (see files.rows), or the split <split>_prefs if the folder has it.

    meta['demonstration'] is the chosen completion, meta['rejected'] the rejected one, unless they are equal; there is
    no answer. Prompt and completions are texts or chats. A completion that is a chat ends with the assistant's message
    and may begin with the prompt. Without a field for the prompt, the prompt is the beginning that both completions
    share. On the hub: HuggingFaceH4/ultrafeedback_binarized (which has the _prefs splits),
    trl-lib/ultrafeedback_binarized.
    """
    folder = files.open_subset(folder, subset)
    name = f'{split}_prefs' if files.has_split(folder, f'{split}_prefs') else split
    example = functools.partial(_example, prompt_field, (chosen_field, rejected_field))
    return convert_rows(example, files.rows(folder, name))


def _example(prompt_field, fields, row, index, where):
    """The Example of a row; fields: names of the fields with the chosen and the rejected completion, in this order."""
    prompt_of_field = None if get_field(row, prompt_field) is None else read_prompt(row, prompt_field, where)
    contexts, (chosen, rejected) = zip(*(read_completion(row, field, where) for field in fields), strict=True)
    if prompt_of_field or any(contexts):
        prompt, messages = chat_prompt(_prompt_messages(prompt_of_field, contexts, where), prompt_field, where)
    else:
        prompt, chosen, rejected = _split_texts(chosen, rejected, where)
        messages = ()
    meta = {'demonstration': chosen} | ({'rejected': rejected} if rejected != chosen else {})
    return Example(prompt, '', index, meta, messages)


def _prompt_messages(prompt_of_field, contexts, where):
    """The prompt's messages, from the prompt field or before the completions; raises BadInput unless all agree.

    prompt_of_field: (text, messages) or None; contexts: the messages before each completion. A prompt that is a text
    agrees with a context if it is the user's first or last message there.
    """
    field_messages = prompt_of_field and (prompt_of_field[1] or ({'role': 'user', 'content': prompt_of_field[0]},))
    prompts = [messages or field_messages or () for messages in contexts]
    first, second = map(_roles_and_texts, prompts)
    agrees = not field_messages or first == _roles_and_texts(field_messages)
    if prompt_of_field and not prompt_of_field[1] and all(contexts):
        user_texts = [text for role, text in first if role == 'user']
        agrees = prompt_of_field[0].strip() in user_texts[:1] + user_texts[-1:]
    if not first or first != second or not agrees:
        raise BadInput(where, shorten(prompts), 'must be one prompt for both completions; mend or remove the row')
    return prompts[0]


def _roles_and_texts(messages):
    """[(role, text without spaces around it), ...] of messages, by which they are compared."""
    return [(message['role'], message['content'].strip()) for message in messages]


def _split_texts(chosen, rejected, where):
    """(prompt, chosen, rejected) from two texts that begin with one prompt; raises BadInput where they do not.

    The prompt is the beginning that both share, up to a space or a line's end.
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    common = ''.join(mark for mark, _ in same)
    if chosen != rejected:  # not within a word
        common = common[: max(common.rfind(' '), common.rfind('\n')) + 1]
    prompt = common.rstrip()
    completions = [text[len(prompt) :] for text in (chosen, rejected)]
    if not prompt or not all(text.strip() for text in completions):
        raise BadInput(
            where,
            shorten((chosen, rejected)),
            'must be one prompt, with which both texts begin, or the prompt must have a field; mend or remove the row',
        )
    return prompt, *completions
