"""Writes prompts for the model: the text around a prompt, and the tokenizer's chat template."""

from collections.abc import Callable, Iterable, Sequence
import json
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.data.records import shorten
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.workers import Died, Expired

# normalizers of `tokenizers` that make an ASCII text no longer, but for a blank before it
LENGTH_KEEPING = {'Sequence', 'NFC', 'NFD', 'NFKC', 'NFKD', 'Lowercase', 'Strip', 'StripAccents', 'Prepend'}
SWITCHES = 'enable_thinking', 'thinking'  # variables of published chat templates that switch thinking on or off


class PromptFormat(NamedTuple):
    """How a prompt is written for the model."""

    chat: bool = False  # apply the tokenizer's chat template
    system: str = ''  # system message of chats that have none of their own
    template: str = '{prompt}'  # text around the prompt, in a chat around the last message of the user
    # on or off: a chat template's switch of thinking; auto: as it is by itself
    thinking: Annotated[str, ranges.OneOf(('auto', 'on', 'off'))] = 'auto'

    def check(self) -> None:
        """Raises BadInput for a template without {prompt}, and for a thinking switch without chat template."""
        if '{prompt}' not in self.template:
            raise BadInput('data.template', self.template, 'must hold {prompt}; write it where the prompt is to stand')
        if self.thinking != 'auto' and not self.chat:
            raise BadInput('data.thinking', self.thinking, 'is a switch of chat templates; set data.chat=True')

    def variables(self) -> dict[str, bool]:
        """The variables, by name, that the chat template gets besides the messages; none where thinking is 'auto'."""
        return {} if self.thinking == 'auto' else dict.fromkeys(SWITCHES, self.thinking == 'on')


def check_chats(tokenizer: Any, prompt_format: PromptFormat, examples: Iterable[Example]) -> None:
    """Raises BadInput where the examples' prompts cannot be written for the model.

    Without data.chat: for an example that is a chat. With data.chat: for a tokenizer without chat template; for a
    template that fails on a plain chat, of the user's words behind data.system; for one that leaves out a message of
    such a chat, or of a chat with the roles of some example; and for one that ignores data.thinking or fails with it.
    Where a template fails on an example's own chat, encode_prompt refuses that example alone.
    """
    if not prompt_format.chat:
        for example in examples:
            if example.messages:
                _refuse_messages(f'the prompt of example {example.id}', example.messages)
        return
    if not tokenizer.chat_template:
        raise BadInput(
            'data.chat',
            True,
            f'the tokenizer in {tokenizer.name_or_path} has no chat template; '
            'set data.chat=False or add chat_template to its tokenizer_config.json',
        )
    plain_roles = tuple(message['role'] for message in write_messages('x', prompt_format))
    chats = (write_messages(e.prompt, prompt_format, e.messages) for e in examples if e.messages)
    roles_of_chats = (tuple(message['role'] for message in chat) for chat in chats)
    for roles in dict.fromkeys([plain_roles, *roles_of_chats]):
        _check_roles(tokenizer, prompt_format, roles, must_render=roles == plain_roles)
    if prompt_format.thinking != 'auto':
        _check_switch(tokenizer, prompt_format)


def _check_switch(tokenizer, prompt_format):
    """Raises BadInput where the chat template ignores the thinking switch, or fails with it."""
    messages = write_messages('x', prompt_format)
    switched = (prompt_format._replace(thinking=thinking) for thinking in ('on', 'off'))
    try:
        on, off = (_render_one(tokenizer, variant, messages) for variant in switched)
    except TemplateFailure as failure:
        raise BadInput(
            'data.thinking',
            prompt_format.thinking,
            f'the chat template of {tokenizer.name_or_path} fails with it: {failure}; set it to auto',
        ) from None
    if on == off:
        raise BadInput(
            'data.thinking',
            prompt_format.thinking,
            f'the chat template of {tokenizer.name_or_path} reads none of {", ".join(SWITCHES)}; set it to auto',
        )


def _check_roles(tokenizer, prompt_format, roles, must_render):
    """Raises BadInput where some message of a chat with these roles does not appear in the rendered text.

    roles: the role of each message; must_render: whether to raise BadInput, too, when the template fails.
    """
    messages = [{'role': role, 'content': f'number {i}'} for i, role in enumerate(roles)]
    try:
        rendered = _render_one(tokenizer, prompt_format, messages)
        for i, role in enumerate(roles):
            changed = [*messages[:i], {'role': role, 'content': 'another'}, *messages[i + 1 :]]
            if _render_one(tokenizer, prompt_format, changed) == rendered:
                raise BadInput(
                    'data.chat',
                    True,
                    f'the chat template of {tokenizer.name_or_path} does not write what message {i + 1} of '
                    f'{", ".join(roles)} says; mend it, or leave such messages out',
                )
    except TemplateFailure as failure:  # for another chat than the plain one, its row is malformed
        if must_render:
            raise BadInput(
                'data.chat',
                True,
                f'the chat template of {tokenizer.name_or_path} fails: {failure}; mend it, or set data.chat=False'
                + ' or leave data.system empty' * ('system' in roles),
            ) from None


class TemplateFailure(ValueError):
    """A chat template failed to render a chat."""


def encode_prompt(
    tokenizer: Any,
    text: str,
    prompt_format: PromptFormat,
    messages: Sequence[dict[str, Any]] = (),
    where: str = 'prompt',
    rendered: str | TemplateFailure | None = None,
) -> list[int]:
    """Token ids of an Example's prompt, or of its whole chat.

    text, messages: Example.prompt and Example.messages; where: what BadInput names; rendered: the item of
    render_prompts, if it was computed. Special tokens come from the chat template, or without one from the tokenizer,
    never from both. prompt_format.template goes around the user's last message. The chat ends where the assistant's
    answer begins; if the last message is the assistant's, the answer continues it. Raises BadInput for a prompt that
    the chat template cannot write, and for one without tokens.
    """
    if prompt_format.chat:
        if rendered is None:
            (rendered,) = _render(tokenizer, prompt_format, [write_messages(text, prompt_format, messages)])
        if isinstance(rendered, TemplateFailure):
            raise BadInput(where, shorten(text), f'the chat template cannot write it: {rendered}; remove the row')
        ids = tokenizer.encode(rendered, add_special_tokens=False)
    else:
        if messages:
            _refuse_messages(where, messages)
        ids = tokenizer.encode(prompt_format.template.replace('{prompt}', text))
        # some tokenizers close every text; a prompt must stay open
        ids = ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    if not ids:
        raise BadInput(where, shorten(text), 'has no tokens; mend or remove the row, or choose another tokenizer')
    return ids


def make_bound(tokenizer: Any, prompt_format: PromptFormat, longest: int) -> Callable[[str], bool]:
    """fits(prompt): whether a prompt without chat surely has between 1 and `longest` tokens, though none is encoded.

    Each token but the special ones stands for a character of a plain ASCII text, unless the tokenizer writes more
    characters than it reads. False where nothing is sure.
    """
    added = len(prompt_format.template) - len('{prompt}') + tokenizer.num_special_tokens_to_add() + 1  # a blank before
    most = longest - added
    if prompt_format.chat or not tokenizer.is_fast or not _keeps_length(tokenizer.backend_tokenizer.normalizer):
        return lambda prompt: False
    template = prompt_format.template
    sure = template.isascii() and template.count('{prompt}') == 1
    return lambda prompt: sure and len(prompt) <= most and prompt.isascii() and not prompt.isspace()


def _keeps_length(normalizer):
    """Whether a normalizer of `tokenizers` writes at most one character for each of an ASCII text, and one before."""
    if normalizer is None:
        return True
    parts = [json.loads(normalizer.__getstate__())]
    while parts:
        part = parts.pop()
        parts += part.get('normalizers', ())
        shrinks = len(part.get('content', '')) <= len((part.get('pattern') or {}).get('String', ''))
        if part['type'] not in LENGTH_KEEPING and not (part['type'] == 'Replace' and shrinks):
            return False
    return True


def _refuse_messages(where, messages):
    """Raises BadInput for a prompt that is a chat, which needs data.chat; where: names the prompt."""
    raise BadInput(
        'data.chat', False, f'{where} is a chat of {len(messages)} messages; set data.chat=True, for the chat template'
    )


def write_messages(
    text: str, prompt_format: PromptFormat, messages: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Copies of a chat's messages, or without any a chat of the prompt alone, as the chat template is to see them.

    The user's last message becomes prompt_format.template around `text`. prompt_format.system comes first where the
    chat has no message of the system or developer.
    """
    written = [dict(message) for message in messages] or [{'role': 'user', 'content': text}]
    last = max(i for i, message in enumerate(written) if message['role'] == 'user')
    written[last]['content'] = prompt_format.template.replace('{prompt}', text)
    if prompt_format.system and not any(message['role'] in ('system', 'developer') for message in written):
        written.insert(0, {'role': 'system', 'content': prompt_format.system})
    return written


def render_prompts(
    tokenizer: Any, prompt_format: PromptFormat, examples: Sequence[Example]
) -> Sequence[str | TemplateFailure]:
    """For each example, the text that the chat template writes for its chat, or a TemplateFailure."""
    return _render(tokenizer, prompt_format, [write_messages(e.prompt, prompt_format, e.messages) for e in examples])


def _render(tokenizer, prompt_format, chats):
    """For each chat its text, up to where the assistant's answer begins, or a TemplateFailure.

    Raises BadInput when the template's process had to be killed.
    """
    from grpo_jax.data import chat_templates  # it imports transformers

    try:
        template = tokenizer.get_chat_template()
        rendered = chat_templates.render(
            template, chats, dict(tokenizer.special_tokens_map) | prompt_format.variables()
        )
    except (Expired, Died) as failure:
        raise BadInput(
            'data.chat',
            True,
            f'the chat template of {tokenizer.name_or_path} had to be ended: {failure}; mend it, or set '
            'data.chat=False',
        ) from None
    except Exception as error:  # the tokenizer's template, or the messages, are malformed
        return [TemplateFailure(f'{type(error).__name__}, {shorten(error)}')] * len(chats)
    return [
        TemplateFailure(shorten(failure))
        if text is None
        else text
        if text.strip()
        else TemplateFailure('it writes nothing')
        for text, failure in rendered
    ]


def _render_one(tokenizer, prompt_format, messages):
    """The text of one chat; raises TemplateFailure where the template fails."""
    (text,) = _render(tokenizer, prompt_format, [messages])
    if isinstance(text, TemplateFailure):
        raise text
    return text
