"""Renders chat templates in a worker process, since a template is a program that the model's author wrote.

jinja's sandbox, through transformers, keeps the template away from Python. The worker is killed when the template loops
forever or takes too much memory.
"""

from collections.abc import Mapping, Sequence
import contextlib
import datetime
import functools
from typing import Any

from transformers.utils import chat_template_utils

from grpo_jax.workers import Pool

AT_ONCE = 64  # chats that a call to the worker renders
SECONDS = 20.0  # for one call; a sound template takes less than a millisecond for a chat
GIB = 4.0  # memory of the worker
MOST = 1_000_000  # characters of a rendered chat


def render(
    template: Any, chats: Sequence[list[dict[str, Any]]], variables: Mapping[str, Any], whole: bool = False
) -> list[tuple[str | None, str]]:
    """Renders each chat in a worker, and returns for each (text, ''), or (None, the template's error).

    chats: lists of messages; variables: what the template sees besides messages, that is special tokens by name and its
    switches. The text ends where the assistant's answer begins, or after the assistant's words if the chat ends with
    them; whole: it ends as the template ends the last message. Raises workers.Expired or workers.Died when the worker
    was killed.
    """
    rendered = []
    for start in range(0, len(chats), AT_ONCE):
        block = list(chats[start : start + AT_ONCE])
        rendered += _workers().call(render_here, template, block, dict(variables), whole)
    return rendered


@functools.cache
def _workers():
    """The Pool of one worker process, which starts with the first chat and ends with this process."""
    return Pool(1, deadline=SECONDS, memory_gib=GIB)


def render_here(
    template: Any, chats: Sequence[list[dict[str, Any]]], variables: Mapping[str, Any], whole: bool = False
) -> list[tuple[str | None, str]]:
    """Returns what render does, from this process, without a deadline; raises MemoryError when memory runs out."""
    rendered = []
    for messages in chats:
        begun = messages[-1]['role'] == 'assistant'
        try:
            with _on_one_day():
                (text,), _ = chat_template_utils.render_jinja_template(
                    [messages],
                    chat_template=template,
                    continue_final_message=begun and not whole,
                    add_generation_prompt=not (begun or whole),
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
    """A clock that always shows the same day."""

    @classmethod
    def now(cls, tz=None):
        """26 July 2024, the day that Llama 3.2's template writes by default."""
        return cls(2024, 7, 26, tzinfo=tz)


@contextlib.contextmanager
def _on_one_day():
    """Inside this context, templates that write today's date write a fixed one, so a resumed run has equal prompts.

    transformers has no argument for the clock, so its module's `datetime` is replaced meanwhile.
    """
    module: Any = chat_template_utils
    clock, module.datetime = module.datetime, _Day
    try:
        yield
    finally:
        module.datetime = clock
