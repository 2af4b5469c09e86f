"""Rewards from a service of the user's, which gets completions with their examples' columns and returns rewards."""

import functools
from typing import Any

from grpo_jax.example import Example
from grpo_jax.ranges import Count, NotNegative
from grpo_jax.rewards import remote
from grpo_jax.rewards.scoring import Refused


def check(*, service: remote.Service):
    """Raises BadInput for options with which the service cannot be asked."""
    remote.check('http', service)


async def reward(
    completion: str,
    example: Example,
    *,
    service: remote.Service,
    services: remote.Services,
    workdir: str,
    step: int | None,
    batch: Count = 16,
    price: NotNegative = 0.0,
) -> float | None:
    """The service's reward for the completion; None where it answers null.

    A request is {"prompts": [...], "completions": [...], "answers": [...], "ids": [...]} with a list for each column of
    the data, of up to `batch` completions; its answer is {"rewards": [...]}. price: the cost of a verdict; services,
    workdir, step: as for remote.client and Client.ask. Raises Refused for another answer.
    """
    unpack = functools.partial(_unpack, price=price)
    client = remote.client(services, workdir, 'http', service, _pack, unpack, batch)
    row = {'prompts': example.prompt, 'completions': completion, 'answers': example.answer, 'ids': example.id}
    return await client.ask(example.meta | row, {'id': example.id}, step)


def _pack(rows):
    """The body of a request: {name: list of the rows' values}, with None where a row lacks the name."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _unpack(content: Any, count: int, price: float):
    """[(reward, or Refused for no number within 1e6; price), ...] of an answer; see remote.Unpack."""
    rewards = content.get('rewards') if isinstance(content, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        raise Refused(f'the answer has no list of {count} rewards')
    wrong = Refused('the reward is no number within 1e6')
    sound = [value is None or (isinstance(value, (int, float)) and -1e6 <= value <= 1e6) for value in rewards]
    return [(value if is_sound else wrong, price) for value, is_sound in zip(rewards, sound, strict=True)]
