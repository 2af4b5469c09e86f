"""Writes prompts for the model: the text around a prompt, and the tokenizer's chat template."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import json
import logging
import re
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.data.records import get_field, number_text, shorten
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.workers import Died, Expired

logger = logging.getLogger('grpo_jax')
# normalizers of `tokenizers` that add at most a blank before an ASCII text
LENGTH_KEEPING = {'Sequence', 'NFC', 'NFD', 'NFKC', 'NFKD', 'Lowercase', 'Strip', 'StripAccents', 'Prepend'}
SWITCHES = 'enable_thinking', 'thinking'  # variables of published chat templates that switch thinking on or off
SUPPLIED = 'messages', 'add_generation_prompt'  # variables that every chat template gets
# a backslash and an n, which a shell hands on for a newline; not where a command of LaTeX begins, like \nabla
NEWLINE = re.compile(r'\\n(?!(?:abla|eg|eq|ewline|earrow|e|i|ot|otin|u)(?![A-Za-z]))')
# in a template: a command of LaTeX, or a column's path
COLUMN = re.compile(r'(\\[A-Za-z]+\{[^{}]*\})|\{([A-Za-z_][\w.-]*)\}')


class PromptFormat(NamedTuple):
    """How a prompt is written for the model."""

    chat: bool = False  # apply the tokenizer's chat template
    # system message of chats that have none of their own; {column} in it is that column's text
    system: str = ''
    # text around the prompt, in a chat around the last message of the user; {column} in it is that column's text
    template: str = '{prompt}'
    # on or off: sets a chat template's switch of thinking; auto: leaves the template's default
    thinking: Annotated[str, ranges.OneOf(('auto', 'on', 'off'))] = 'auto'
    # further variables of the chat template, by name
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({})

    def check(self) -> None:
        """Raises BadInput for a template without prompt or column, and for a thinking switch without chat template."""
        if not ('{prompt}' in self.template or columns_in(self.template)):
            remedy = 'must hold {prompt}, or columns; write them where they are to stand'
            raise BadInput('data.template', self.template, remedy)
        if self.thinking != 'auto' and not self.chat:
            raise BadInput('data.thinking', self.thinking, 'is a switch of chat templates; set data.chat=True')
        if self.chat_template_kwargs and not self.chat:
            remedy = 'are variables of chat templates; set data.chat=True'
            raise BadInput('data.chat_template_kwargs', dict(self.chat_template_kwargs), remedy)

    def variables(self) -> dict[str, Any]:
        """The variables, by name, that the chat template gets besides the messages."""
        switches = {} if self.thinking == 'auto' else dict.fromkeys(SWITCHES, self.thinking == 'on')
        return switches | dict(self.chat_template_kwargs)

    def with_newlines(self) -> 'PromptFormat':
        """The format with a newline for each `\\n` of its texts, which a shell hands on as two characters."""
        template, system = (NEWLINE.sub('\n', text) for text in (self.template, self.system))
        return self._replace(template=template, system=system)

    def without_columns(self) -> 'PromptFormat':
        """The format for Examples after fill_columns: without the template or system message that was filled there."""
        plain = self._replace(template='{prompt}') if columns_in(self.template) else self
        return plain._replace(system='') if columns_in(self.system) else plain


def columns_in(template: str) -> list[str]:
    """The paths of the columns that a template names, {prompt} left out."""
    return [name for _, name in COLUMN.findall(template.replace('{prompt}', '')) if name]


def fill_columns(prompt_format: PromptFormat, rows: Sequence[Example | BadInput]) -> list[Example | BadInput]:
    """The Examples, with prompts and system messages in which the columns of data.template and data.system are filled.

    A column without a value is an empty text; a list or struct is written as JSON. A prompt that stays empty becomes a
    BadInput. Raises BadInput for a column that no Example has.
    """
    named = {'template': columns_in(prompt_format.template), 'system': columns_in(prompt_format.system)}
    sound = [row for row in rows if isinstance(row, Example)]
    for key, name in ((key, name) for key, names in named.items() for name in names):
        if sound and all(get_field(row.meta, name) is None for row in sound):
            remedy = f'names {name!r}, which is no column; name one of {", ".join(map(str, sound[0].meta))}'
            raise BadInput(f'data.{key}', getattr(prompt_format, key), remedy)
    if not any(named.values()):
        return list(rows)
    return [_fill_row(prompt_format, row, named) if isinstance(row, Example) else row for row in rows]


def _fill_row(prompt_format, example, named):
    """The Example with filled columns, or a BadInput if they hold nothing; named: {template or system: its columns}."""

    def column(match):
        return match[1] or _column_text(example.meta, match[2])

    def fill(template):
        return example.prompt.join(COLUMN.sub(column, part) for part in template.split('{prompt}'))

    prompt, messages = example.prompt, example.messages
    if named['template']:
        if not (prompt.strip() or any(_column_text(example.meta, name).strip() for name in named['template'])):
            where = f'example {example.id}'
            return BadInput(where, shorten(example.meta), 'has nothing in the columns of data.template; mend the row')
        prompt = fill(prompt_format.template)
    system = fill(prompt_format.system).strip() if named['system'] else ''
    if system and not any(message['role'] in ('system', 'developer') for message in messages):
        messages = ({'role': 'system', 'content': system}, *(messages or ({'role': 'user', 'content': prompt},)))
    return example._replace(prompt=prompt, messages=messages)


def _column_text(row, name):
    """The text that a column's value has in a template: JSON for a list or dict, '' for None."""
    value = get_field(row, name)
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return '' if value is None else str(value) if isinstance(value, (str, bool)) else number_text(value)


def check_chats(tokenizer: Any, prompt_format: PromptFormat, examples: Iterable[Example]) -> None:
    """Raises BadInput where the examples' prompts cannot be written for the model.

    Without data.chat: for an example that is a chat. With data.chat: for a tokenizer without chat template; for a
    template that fails on a plain chat, of the user's words after data.system; for one that leaves out a message of
    such a chat, or of a chat with the roles of some example; and for one that ignores data.thinking or fails with it.
    Where a template fails on an example's own chat, encode_prompt refuses that example alone. Warns of a template that
    ignores add_generation_prompt.
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
    for name, value in prompt_format.chat_template_kwargs.items():
        if name in SUPPLIED or not re.search(rf'\b{re.escape(name)}\b', tokenizer.get_chat_template()):
            remedy = f'is no variable that the chat template of {tokenizer.name_or_path} leaves open; leave it out'
            raise BadInput(f'data.chat_template_kwargs.{name}', value, remedy)
    plain_roles = tuple(message['role'] for message in write_messages('x', prompt_format))
    chats = (write_messages(e.prompt, prompt_format, e.messages) for e in examples if e.messages)
    roles_of_chats = (tuple(message['role'] for message in chat) for chat in chats)
    for roles in dict.fromkeys([plain_roles, *roles_of_chats]):
        _check_roles(tokenizer, prompt_format, roles, must_render=roles == plain_roles)
    if prompt_format.thinking != 'auto':
        _check_switch(tokenizer, prompt_format)
    messages = write_messages('x', prompt_format)
    asked, answered = _render(tokenizer, prompt_format, [messages, [*messages, {'role': 'assistant', 'content': 'x'}]])
    if isinstance(asked, str) and isinstance(answered, str) and answered.startswith(asked):
        if opening := answered[len(asked) : -1].strip():
            logger.warning(
                'the chat template of %s does not open the answer, with %r: it ignores add_generation_prompt; mend it',
                tokenizer.name_or_path,
                opening,
            )


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
        remedy = f'the chat template of {tokenizer.name_or_path} reads none of {", ".join(SWITCHES)}; set it to auto'
        raise BadInput('data.thinking', prompt_format.thinking, remedy)


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
    """A function that tells, without encoding, whether a prompt without chat surely has 1 to `longest` tokens.

    Each token but the special ones stands for a character of a plain ASCII text, unless the tokenizer writes more
    characters than it reads. The function returns False where this is not sure.
    """
    added = len(prompt_format.template) - len('{prompt}') + tokenizer.num_special_tokens_to_add() + 1  # a blank before
    most = longest - added
    if prompt_format.chat or not tokenizer.is_fast or not _keeps_length(tokenizer.backend_tokenizer.normalizer):
        return lambda prompt: False
    template = prompt_format.template
    if not template.isascii() or template.count('{prompt}') != 1:
        return lambda prompt: False

    def fits(prompt):
        if len(prompt) > most or not prompt.isascii() or prompt.isspace():
            return False
        # a prompt that ends with a tag may have begun the completion, for which find_begun needs its tokens
        return not template.replace('{prompt}', prompt).rstrip().endswith(('>', ']'))

    return fits


def _keeps_length(normalizer):
    """Whether a normalizer of `tokenizers` lengthens an ASCII text by at most one character, in front."""
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
    what = f'{where} is a chat of {len(messages)} messages, with the system message where data.system names columns'
    raise BadInput('data.chat', False, f'{what}; set data.chat=True, for the chat template')


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


def render_turn(tokenizer: Any, prompt_format: PromptFormat, answer: str) -> str | TemplateFailure:
    """The whole text that the chat template writes for a question and the assistant's answer, or a TemplateFailure."""
    chat = [*write_messages('x', prompt_format), {'role': 'assistant', 'content': answer}]
    (rendered,) = _render(tokenizer, prompt_format, [chat], whole=True)
    return rendered


def _render(tokenizer, prompt_format, chats, whole=False):
    """For each chat the text that the chat template writes, or a TemplateFailure.

    The text ends where the assistant's answer begins; whole: it ends as the template ends the last message. Where the
    template refuses a system message, that message is put before the user's first words. Raises BadInput when the
    template's process had to be killed.
    """
    from grpo_jax.data import chat_templates  # it imports transformers

    try:
        template = tokenizer.get_chat_template()
        variables = dict(tokenizer.special_tokens_map) | prompt_format.variables()
        rendered = chat_templates.render(template, chats, variables, whole)
        refused = {i: _fold_system(chats[i]) for i, (text, _) in enumerate(rendered) if text is None}
        refused = {i: folded for i, folded in refused.items() if folded}
        again = chat_templates.render(template, list(refused.values()), variables, whole)
        for i, (text, failure) in zip(refused, again, strict=True):
            rendered[i] = rendered[i] if text is None else (text, failure)
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


def _fold_system(messages):
    """The chat with its first message, the system's, put before the user's words in the second; [] for another chat."""
    if [message['role'] for message in messages[:2]] not in (['system', 'user'], ['developer', 'user']):
        return []
    system, user, *others = messages
    return [user | {'content': f'{system["content"]}\n\n{user["content"]}'}, *others]


def _render_one(tokenizer, prompt_format, messages):
    """The text of one chat; raises TemplateFailure where the template fails."""
    (text,) = _render(tokenizer, prompt_format, [messages])
    if isinstance(text, TemplateFailure):
        raise text
    return text
