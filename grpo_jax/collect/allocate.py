"""How a step's completions are spread over its prompts, a unit of some at a time: groups of unequal sizes.

Pure functions, so that a resumed run spreads them the same. By pass rate: of what earlier steps have counted, before
the first completion. By uncertainty: in rounds, of the rewards that the step has so far, as XRPO (arXiv 2510.06672).
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
import numpy as np

from grpo_jax.algorithms import Grouping
from grpo_jax.algorithms.group_math import group_std

CONFIDENCE = 0.95  # of the interval of a prompt's mean reward


def grow(
    sizes: Int[np.ndarray, ' P'], units: int, unit: int, gain: Callable[[np.ndarray], np.ndarray]
) -> Int[np.ndarray, ' P']:
    """The sizes with `units` times `unit` more, each to the prompt of the largest gain(sizes), the first of equals."""
    sizes = sizes.copy()
    for _ in range(units):
        sizes[np.argmax(gain(sizes))] += unit
    return sizes


def spread_by_pass_rate(
    hits: Int[np.ndarray, ' P'], tries: Int[np.ndarray, ' P'], budget: int, unit: int
) -> Int[np.ndarray, ' P']:
    """The sizes of groups, `budget` in all, for which most groups are expected to have right and wrong completions.

    No other sizes have more, since what a further unit adds falls with the size. hits of tries completions were right.
    Knapsack RL (arXiv 2509.25849) maximizes such a chance at a known pass rate, times what a prompt can yet teach.
    """

    def gain(sizes):
        return contrast_chance(hits, tries, sizes + unit) - contrast_chance(hits, tries, sizes)

    return grow(np.full(len(hits), unit), budget // unit - len(hits), unit, gain)


def contrast_chance(
    hits: Int[np.ndarray, ' P'], tries: Int[np.ndarray, ' P'], sizes: Int[np.ndarray, ' P']
) -> Float[np.ndarray, ' P']:
    """The chances that groups of these sizes are neither all right nor all wrong.

    A pass rate is believed to be Beta(1 + hits, 1 + misses): of a new prompt, all are as likely.
    """
    from scipy.special import betaln  # a third of a second

    right, wrong = 1.0 + hits, 1.0 + tries - hits
    all_right, all_wrong = (np.exp(betaln(a + sizes, b) - betaln(a, b)) for a, b in ((right, wrong), (wrong, right)))
    return 1 - all_right - all_wrong


def grow_by_uncertainty(
    stds: Float[np.ndarray, ' P'], sizes: Int[np.ndarray, ' P'], units: int, unit: int, exploration: float
) -> Int[np.ndarray, ' P']:
    """The sizes of groups with `units` more units, each to the prompt of the highest priority.

    stds are those of the rewards so far, of n - 1, and stay while sizes grow.
    """
    return grow(sizes, units, unit, lambda grown: priorities(stds, grown, unit, exploration))


def priorities(
    stds: Float[np.ndarray, ' P'], sizes: Int[np.ndarray, ' P'], unit: int, exploration: float
) -> Float[np.ndarray, ' P']:
    """What a unit takes off the half width of a mean reward, plus exploration sqrt(log(1 + T) / n): XRPO's priority.

    T are the completions of all prompts so far, n those of one. The paper adds one completion at a time: unit 1.
    """
    reduction = half_widths(stds, sizes) - half_widths(stds, sizes + unit)
    return reduction + exploration * np.sqrt(np.log1p(sizes.sum()) / sizes)


def half_widths(stds: Float[np.ndarray, ' P'], sizes: Int[np.ndarray, ' P']) -> Float[np.ndarray, ' P']:
    """t s / sqrt(n), half of Student's interval of CONFIDENCE for the mean of n rewards of this std."""
    from scipy.special import stdtrit

    return stdtrit(sizes - 1, (1 + CONFIDENCE) / 2) * stds / np.sqrt(sizes)


def explore(
    draw: Callable, carry: Any, prompts: int, rounds: int, unit: int, exploration: float
) -> tuple[list[list], Any]:
    """(blocks of each prompt's group, carry): units of completions, one each at first, then `prompts` a round.

    draw(carry, owners, first, blocks so far) gives (a select.Group of a unit for each owner, carry); an owner is a
    prompt's number, and first i[S] the completions that it has by then.
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
        rewards = np.concatenate([block.rewarded.rewards for own in blocks for block in own])
        stds = group_std(Grouping.by_sizes(sizes).spread(rewards, np.nan), 1)[:, 0]
        grown = grow_by_uncertainty(stds, sizes, prompts, unit, exploration)
