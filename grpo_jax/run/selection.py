"""Which groups a step learns from: loops around a draw, as pure functions of what it gives."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from grpo_jax.example import Example
from grpo_jax.rewards import Rewards
from grpo_jax.types import Rollout


class Group(NamedTuple):
    """Completions of one prompt, on the host."""

    example: Example
    rollout: Rollout  # of G rows
    since: int  # step that sampled them
    rewarded: Rewards
    dead: bool

    @property
    def tokens(self) -> int:
        """Tokens of its completions."""
        return int(self.rewarded.lengths.sum())

    @property
    def priority(self) -> float:
        """How much replay wants it: sum |A| std(r) of centred advantages; 0 when it is dead."""
        values = self.rewarded.rewards
        if self.dead:
            return 0.0
        return float(np.nansum(np.abs(values - np.nanmean(values))) * np.nanstd(values))


class Selection(NamedTuple):
    """The groups that a step may learn from."""

    alive: list[Group]
    dead: list[Group]
    left: list[Group]  # for later steps
    draws: int


def resample(draw: Callable[[int], list[Group]], kept: list[Group], prompts: int, max_draws: int) -> Selection:
    """Draws until `prompts` groups are alive, or max_draws times (DAPO, arXiv 2503.14476, eq. 11)."""
    alive, dead, draws = list(kept), [], 0
    while True:
        for group in draw(draws):
            (dead if group.dead else alive).append(group)
        draws += 1
        if len(alive) >= prompts or draws == max_draws:
            return Selection(alive, dead, alive[prompts : 2 * prompts], draws)


def replay(
    draw: Callable[[int], list[Group]], kept: list[Group], prompts: int, noise: np.random.Generator
) -> Selection:
    """Draws once, and puts kept groups in the places of dead ones, drawn in proportion to their priorities."""
    alive, dead = [], []
    for group in draw(0):
        (dead if group.dead else alive).append(group)
    left = sorted(alive + kept, key=lambda group: -group.priority)[:prompts]
    count = min(prompts - len(alive), len(kept))
    if count > 0:
        priorities = np.array([group.priority for group in kept])
        chosen = noise.choice(len(kept), count, replace=False, p=priorities / priorities.sum())
        alive = alive + [kept[i] for i in chosen]
    return Selection(alive, dead, left, 1)
