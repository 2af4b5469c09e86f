"""Preference pairs: a prompt with a chosen and a rejected completion, for DPO and for pairwise reward models."""

import functools
import itertools

from grpo_jax.data import files
from grpo_jax.data.records import convert_rows, end_of_chat, get_field, read_messages, read_prompt, shorten, text_field
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
    is no answer. Prompt and completions are texts or chats. A completion that is a chat ends with the assistant's
    message and may begin with the prompt; without a field for the prompt, it is what both completions begin with.
    HuggingFaceH4/ultrafeedback_binarized and trl-lib/ultrafeedback_binarized on the hub.
    """
    folder = files.open_subset(folder, subset)
    name = f'{split}_prefs' if files.has_split(folder, f'{split}_prefs') else split
    example = functools.partial(_example, prompt_field, (chosen_field, rejected_field))
    return convert_rows(example, files.rows(folder, name))


def _example(prompt_field, fields, row, index, where):
    given = None if get_field(row, prompt_field) is None else read_prompt(row, prompt_field, where)
    asked, (chosen, rejected) = zip(*(_read_completion(row, field, where) for field in fields), strict=True)
    if given or any(asked):
        prompt, messages = end_of_chat(_join(given, asked, where), prompt_field, where)
    else:
        prompt, chosen, rejected = _split_texts(chosen, rejected, where)
        messages = ()
    meta = {'demonstration': chosen} | ({'rejected': rejected} if rejected != chosen else {})
    return Example(prompt, '', index, meta, messages)


def _read_completion(row, field, where):
    """(the messages before a completion, its text); () where it does not say what is before it."""
    if not isinstance(get_field(row, field), list):
        return (), text_field(row, field, where)
    messages = read_messages(row, field, where)
    if not messages or messages[-1]['role'] != 'assistant':
        raise BadInput(where, shorten(messages), f'field {field!r} must end with an assistant; mend or remove the row')
    return messages[:-1], text_field(messages[-1], 'content', where)


def _join(given, asked, where):
    """The messages of the prompt that is given, or stands before the completions; BadInput unless they are the same.

    A prompt that is given as text may be the first or the last of the user in what stands before both completions.
    """
    own = given and (given[1] or ({'role': 'user', 'content': given[0]},))
    before = [messages or own or () for messages in asked]
    first, second = map(_words, before)
    fits = not own or first == _words(own)
    if given and not given[1] and all(asked):
        asks = [words for role, words in first if role == 'user']
        fits = given[0].strip() in asks[:1] + asks[-1:]
    if not first or first != second or not fits:
        raise BadInput(where, shorten(before), 'must be one prompt, that of both completions; mend or remove the row')
    return before[0]


def _words(messages):
    return [(message['role'], message['content'].strip()) for message in messages]


def _split_texts(chosen, rejected, where):
    """(prompt, chosen, rejected) of two texts that begin with their prompt, up to a space or the end of a line."""
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
            'must be one prompt, with which both completions begin, or a field of its own; mend or remove the row',
        )
    return prompt, *completions
