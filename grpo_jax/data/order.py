"""The order in which examples are served: a pure function of seed and position, so that resuming needs no iterator."""

from collections.abc import Sequence
import functools
import math
import sys

from jaxtyping import Bool, Int
import numpy as np

from grpo_jax.errors import BadInput


def walk(
    seed: int, position: int, count: int, retired: Bool[np.ndarray, ' N'], sources: Sequence[tuple] = ()
) -> tuple[Int[np.ndarray, ' n'], int]:
    """(the next `count` example indices, the position after them) of an endless run of permutations.

    One permutation an epoch; or, of a Dataset with sources, one of each source by turns, in proportion to the weights
    to within a hundredth. Retired examples are passed over. A pure function of its arguments. BadInput when all are
    retired.
    """
    if retired.all():
        raise BadInput(
            'collection.retire_above', len(retired), 'prompts, and all are retired: nothing is left to learn'
        )
    index_at = _mix(seed, sources) if sources else _shuffle((seed,), np.arange(len(retired)))
    chosen = []
    while len(chosen) < count:
        index = index_at(position)
        position += 1
        if not retired[index]:
            chosen.append(index)
    return np.array(chosen, int), position


def revisit(seed: int, step: int, count: int, retired: Bool[np.ndarray, ' N'], share: float) -> Int[np.ndarray, ' n']:
    """The retired example indices, none of them twice, that get some of the `count` places of a step.

    They have `share` of the places of all steps to within one place, or fewer where fewer are retired. Each retired
    example is as likely as any other. A pure function of its arguments.
    """
    places = math.floor((step + 1) * count * share) - math.floor(step * count * share)
    return np.random.default_rng((seed, step, 1)).permutation(np.flatnonzero(retired))[:places]


def indices(seed: int, step: int, count: int, size: int, sources: Sequence[tuple] = ()) -> Int[np.ndarray, ' n']:
    """The `count` example indices of a step when no example of `size` is ever retired."""
    return walk(seed, step * count, count, np.zeros(size, bool), sources)[0]


def _mix(seed, sources):
    """Function of the position in a mixture: the index there."""
    import grain  # seconds to import, needed for mixtures alone

    endless = [
        grain.MapDataset.range(sys.maxsize).map(_shuffle((seed, source), members))
        for source, (_, members) in enumerate(sources)
    ]
    return grain.MapDataset.mix(endless, [weight for weight, _ in sources]).__getitem__


def _shuffle(seed, members):
    """Function of the position in an endless run of permutations of `members`: the index there."""

    @functools.cache
    def permutation(epoch):
        return np.random.default_rng((*seed, epoch)).permutation(members)

    return lambda position: permutation(position // len(members))[position % len(members)]
