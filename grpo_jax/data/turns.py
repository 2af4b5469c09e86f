"""Finds what begins and ends the assistant's turn, and encodes a turn.

Chat templates differ in where a turn begins (some open <think> themselves) and in which token ends it.
"""

from collections.abc import Sequence
import functools
import re
from typing import Any, NamedTuple

from grpo_jax.data.prompt_format import PromptFormat, TemplateFailure, render_turn
from grpo_jax.text import exact_text

ANSWER = 'This is an answer.'  # stands for the assistant's words where a template shows how it ends a turn
OPENING = re.compile(r'<(\w+)>|\[(\w+)\]')  # a tag that opens thinking, or the answer
LONGEST = 24  # tokens that a tag and the blanks behind it may take


class TurnEnd(NamedTuple):
    """How the assistant's turn ends after its words."""

    before: str  # text between the words and the token
    token: int


def find_template_end(tokenizer: Any, prompt_format: PromptFormat) -> TurnEnd | None:
    """The TurnEnd of the chat template: the first added token that it writes after the assistant's words.

    None without a chat or a template, and for a template that writes no such token or fails.
    """
    if not (prompt_format.chat and tokenizer.chat_template):
        return None
    rendered = render_turn(tokenizer, prompt_format, ANSWER)
    if isinstance(rendered, TemplateFailure):
        return None
    _, written, behind = rendered.rpartition(ANSWER)
    if not written:
        return None
    # some tokenizers have blanks among their added tokens
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    for i in tokenizer.encode(behind, add_special_tokens=False):
        if i in added:
            return TurnEnd(behind.partition(added[i])[0], i)
    return None


def find_end(tokenizer: Any, prompt_format: PromptFormat, stop_tokens: Sequence[int]) -> TurnEnd:
    """The TurnEnd of a demonstration: in a chat the template's, else the tokenizer's eos token.

    Where there is neither, it is the first of the run's stop_tokens.
    """
    eos = tokenizer.eos_token_id
    return find_template_end(tokenizer, prompt_format) or TurnEnd('', stop_tokens[0] if eos is None else eos)


def encode_turn(tokenizer: Any, words: str, end: TurnEnd) -> list[int]:
    """The token ids of the assistant's words and of the turn's end."""
    return [*tokenizer.encode(words + end.before, add_special_tokens=False), end.token]


def find_begun(tokenizer: Any, ids: Sequence[int], words: str = '') -> str:
    """The last text of a prompt that already belongs to the completion: an opening tag and blanks; '' without a tag.

    Chat templates of DeepSeek-R1 and Qwen3-Thinking end a prompt with '<think>\\n'. ids: of the prompt. words: the
    assistant's words at the end of the prompt, which the completion continues. If they leave a tag open, the text from
    this tag to the end of the words is returned.
    """
    for tag in reversed([*OPENING.finditer(words)]):
        closing = f'</{tag[1]}>' if tag[1] else f'[/{tag[2]}]'
        if closing not in words[tag.end() :]:
            return words[tag.start() :]
    # the texts of single tokens are remembered: to decode every prompt would take seconds for a large data set
    text_of = _token_texts(tokenizer)
    tail = ''.join(text_of(i) for i in ids[-LONGEST:])
    tags = [tag for tag in OPENING.finditer(tail) if not tail[tag.end() :].strip()]
    return tail[tags[-1].start() :] if tags else ''


@functools.lru_cache(maxsize=8)
def _token_texts(tokenizer):
    """A function from a token's id to its text, which remembers the texts."""
    return functools.cache(lambda i: exact_text(tokenizer, [i]))
