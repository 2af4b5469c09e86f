"""Allocation of a step's completions to its prompts, in units of several completions: groups of unequal sizes.

Allocation by pass rate is decided before the step samples, from the passes that earlier steps have counted. Allocation
by uncertainty goes in rounds, and looks at the step's own rewards so far, as in XRPO (arXiv 2510.06672). All functions
are pure, so a resumed run allocates in the same way.
"""

from collections.abc import Callable
import functools
from typing import Any

from jaxtyping import Float, Int
import numpy as np

from grpo_jax.algorithms import Grouping
from grpo_jax.algorithms.group_math import group_std

CONFIDENCE = 0.95  # of the interval of a prompt's mean reward


def grow(
    sizes: Int[np.ndarray, ' P'], units: int, unit: int, gain: Callable[[np.ndarray], np.ndarray]
) -> Int[np.ndarray, ' P']:
    """The sizes of groups after `units` more units, each of `unit` completions, were handed out one by one.

    Each unit goes to the prompt whose gain(sizes) f64[P] is the largest at that moment, the first of equals.
    """
    sizes = sizes.copy()
    for _ in range(units):
        sizes[np.argmax(gain(sizes))] += unit
    return sizes


def spread_by_pass_rate(
    hits: Int[np.ndarray, ' P'], tries: Int[np.ndarray, ' P'], budget: int, unit: int
) -> Int[np.ndarray, ' P']:
    """The sizes of groups, `budget` completions in all, that maximize the expected number of mixed groups.

    A mixed group has right and wrong completions. hits, tries: on earlier visits `hits` of a prompt's `tries`
    completions were right; unit: the sizes are multiples of it. Handing units out one by one is optimal, since the gain
    of a further unit falls with the size. Knapsack RL (arXiv 2509.25849) maximizes such a chance for a known pass rate,
    weighted by what a prompt can still teach.
    """

    def gain(sizes):
        return contrast_chance(hits, tries, sizes + unit) - contrast_chance(hits, tries, sizes)

    return grow(np.full(len(hits), unit), budget // unit - len(hits), unit, gain)


def contrast_chance(
    hits: Int[np.ndarray, ' P'], tries: Int[np.ndarray, ' P'], sizes: Int[np.ndarray, ' P']
) -> Float[np.ndarray, ' P']:
    """f64[P]: the chances that groups of these sizes are neither all right nor all wrong.

    The pass rate of a prompt is distributed as Beta(1 + hits, 1 + misses), which is uniform for a new prompt.
    """
    from scipy.special import betaln  # a third of a second

    right, wrong = 1.0 + hits, 1.0 + tries - hits
    all_right, all_wrong = (np.exp(betaln(a + sizes, b) - betaln(a, b)) for a, b in ((right, wrong), (wrong, right)))
    return 1 - all_right - all_wrong


def priorities(
    stds: Float[np.ndarray, ' P'], sizes: Int[np.ndarray, ' P'], unit: int, exploration: float
) -> Float[np.ndarray, ' P']:
    """XRPO's priority of each prompt: how much a further unit narrows its half width, plus a bonus for few completions.

    The half widths are those of `half_widths`. The bonus is exploration * sqrt(log(1 + T) / n), with T completions of
    all prompts so far and n of this one. stds: of a prompt's rewards; unit: 1 in the paper.
    """
    reduction = half_widths(stds, sizes) - half_widths(stds, sizes + unit)
    return reduction + exploration * np.sqrt(np.log1p(sizes.sum()) / sizes)


def half_widths(stds: Float[np.ndarray, ' P'], sizes: Int[np.ndarray, ' P']) -> Float[np.ndarray, ' P']:
    """t std / sqrt(n): half the width of Student's confidence interval (level CONFIDENCE) for a mean of n rewards."""
    from scipy.special import stdtrit

    return stdtrit(sizes - 1, (1 + CONFIDENCE) / 2) * stds / np.sqrt(sizes)


def explore(
    draw: Callable, carry: Any, prompts: int, rounds: int, unit: int, exploration: float
) -> tuple[list[list], Any]:
    """Draws completions in `rounds`: first a unit for each prompt, then in each round `prompts` units by `priorities`.

    draw(carry, owners, first, blocks) samples one unit for each of `owners`, i[S] numbers of prompts, and returns
    ([a select.Group for each], carry). first i[S]: how many completions the owner has before; blocks: each prompt's
    Groups so far. exploration: see priorities. Returns (each prompt's list of Groups, the last carry).
    """
    blocks: list[list] = [[] for _ in range(prompts)]
    sizes, grown = np.zeros(prompts, int), np.full(prompts, unit)
    while True:
        new = Grouping.by_sizes((grown - sizes) // unit)
        owners = np.flatnonzero(grown > sizes)[new.owner]
        groups, carry = draw(carry, owners, sizes[owners] + unit * new.place, blocks)
        for owner, block in zip(owners, groups, strict=True):
            blocks[owner].append(block)
        sizes, rounds = grown, rounds - 1
        if not rounds:
            return blocks, carry
        rewards = np.concatenate([block.rewarded.rewards for group in blocks for block in group])
        stds = group_std(Grouping.by_sizes(sizes).spread(rewards, np.nan), 1)[:, 0]  # the same while sizes grow
        grown = grow(sizes, prompts, unit, functools.partial(priorities, stds, unit=unit, exploration=exploration))
