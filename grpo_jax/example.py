"""Example, in a module of its own, so that worker processes read it without importing jax."""

from typing import Any, NamedTuple


class Example(NamedTuple):
    """One task item, on the host."""

    prompt: str
    answer: str
    id: int  # unique in its data set and stable: sampling noise and data order are functions of it
    meta: dict[str, Any]
    # the whole chat of which the prompt is the user's last message, dicts of role and content; () where that is all
    messages: tuple[dict[str, Any], ...] = ()
