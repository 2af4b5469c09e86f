"""Example, in a module of its own, so that worker processes need not import jax for it."""

from typing import Any, NamedTuple


class Example(NamedTuple):
    """One item of a data set, on the host."""

    prompt: str
    answer: str
    id: int  # unique in its data set, and never changed: sampling noise and data order depend on it
    meta: dict[str, Any]  # what else the data set has, for rewards and demonstrations
    # the whole chat, dicts of role and content, in which the prompt is the user's last message; (): no more than that
    messages: tuple[dict[str, Any], ...] = ()
    # the end of the prompt that belongs to the completion, like '<think>\n' of a chat template that opens thinking
    begun: str = ''
