"""Chat templates, rendered where they can be ended: a tokenizer's template is a program of whoever made the model.

jinja's sandbox, through transformers, keeps it from Python; a worker process, from looping for ever and from eating
the memory.
"""

from collections.abc import Mapping, Sequence
import contextlib
import datetime
import functools
from typing import Any

from transformers.utils import chat_template_utils

from grpo_jax.workers import Pool

AT_ONCE = 64  # chats in a call of the worker
SECONDS = 20.0  # for these, each of which takes less than a thousandth of a second
GIB = 4.0
MOST = 1_000_000  # characters


def render(
    template: Any, chats: Sequence[list[dict[str, Any]]], variables: Mapping[str, Any]
) -> list[tuple[str | None, str]]:
    """(text, '') of each chat, open for the assistant's answer, or (None, what the template raised); in a worker.

    variables are what the template sees besides the messages: special tokens by name, and its switches.
    A chat that ends with the assistant's words is left open behind them. workers.Expired or workers.Died where the
    worker had to be ended.
    """
    rendered = []
    for start in range(0, len(chats), AT_ONCE):
        block = list(chats[start : start + AT_ONCE])
        rendered += _workers().call(render_here, template, block, dict(variables))
    return rendered


@functools.cache
def _workers():
    """A process, which starts with the first chat and ends with this one."""
    return Pool(1, deadline=SECONDS, memory_gib=GIB)


def render_here(
    template: Any, chats: Sequence[list[dict[str, Any]]], variables: Mapping[str, Any]
) -> list[tuple[str | None, str]]:
    """The same in this process."""
    rendered = []
    for messages in chats:
        begun = messages[-1]['role'] == 'assistant'
        try:
            with _on_one_day():
                (text,), _ = chat_template_utils.render_jinja_template(
                    [messages],
                    chat_template=template,
                    continue_final_message=begun,
                    add_generation_prompt=not begun,
                    **variables,
                )
            if len(text) > MOST:
                raise ValueError(f'{len(text)} characters are written')
            rendered.append((text, ''))
        except MemoryError:
            raise
        except Exception as error:  # templates are programs
            rendered.append((None, f'{type(error).__name__}, {error}'))
    return rendered


class _Day(datetime.datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz=None):
        """The day that Llama 3.2's template writes where it is told none."""
        return cls(2024, 7, 26, tzinfo=tz)


@contextlib.contextmanager
def _on_one_day():
    """Templates that write the day write one and the same: a run that goes on tomorrow has the prompts of today.

    transformers takes no clock for them.
    """
    module: Any = chat_template_utils
    clock, module.datetime = module.datetime, _Day
    try:
        yield
    finally:
        module.datetime = clock
