"""The order in which examples are served: a pure function of seed and position, so that resuming needs no iterator."""

from collections.abc import Sequence
import functools
import math
import sys

from jaxtyping import Bool, Int
import numpy as np

from grpo_jax.errors import NO_VALUE, BadInput


def walk(
    seed: int, position: int, count: int, retired: Bool[np.ndarray, ' N'], sources: Sequence[tuple] = ()
) -> tuple[Int[np.ndarray, ' n'], int]:
    """Returns (the next `count` example indices from `position` on, the position after them).

    Indices follow an endless sequence of permutations, one an epoch. sources: Dataset.sources; with sources, each has
    its own permutations, and they take turns in proportion to their weights, to within a hundredth. retired: bool for
    each example; retired examples are skipped. A pure function of its arguments. Raises BadInput when all are retired.
    """
    if retired.all():
        raise BadInput(
            'collection.retire_above', NO_VALUE, f'has retired all {len(retired)} prompts; set it to 0 with --amend'
        )
    index_at = _mix(seed, sources) if sources else _shuffle((seed,), np.arange(len(retired)))
    indices = []
    while len(indices) < count:
        index = index_at(position)
        position += 1
        if not retired[index]:
            indices.append(index)
    return np.array(indices, int), position


def revisit(seed: int, step: int, count: int, retired: Bool[np.ndarray, ' N'], share: float) -> Int[np.ndarray, ' n']:
    """Distinct indices of retired examples that a step asks again, in some of its `count` places.

    Over all steps the revisits get `share` of the places, to within one place, or fewer where fewer are retired. All
    retired examples are equally likely. A pure function of its arguments.
    """
    places = math.floor((step + 1) * count * share) - math.floor(step * count * share)
    return np.random.default_rng((seed, step, 1)).permutation(np.flatnonzero(retired))[:places]


def indices(seed: int, step: int, count: int, size: int, sources: Sequence[tuple] = ()) -> Int[np.ndarray, ' n']:
    """A step's `count` example indices, for a data set of `size` examples that never retires an example."""
    return walk(seed, step * count, count, np.zeros(size, bool), sources)[0]


def _mix(seed, sources):
    """A function from a place in the order to an example's index, for a mixture; sources: Dataset.sources, see walk."""
    import grain  # seconds to import, needed for mixtures alone

    endless = [
        grain.MapDataset.range(sys.maxsize).map(_shuffle((seed, source), members))
        for source, (_, members) in enumerate(sources)
    ]
    return grain.MapDataset.mix(endless, [weight for weight, _ in sources]).__getitem__


def _shuffle(seed, members):
    """A function from a place in an endless sequence of permutations of `members` to a member; seed: tuple of ints."""

    @functools.cache
    def permutation(epoch):
        return np.random.default_rng((*seed, epoch)).permutation(members)

    return lambda position: permutation(position // len(members))[position % len(members)]
