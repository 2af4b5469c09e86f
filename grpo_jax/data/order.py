"""The order in which examples are served: a pure function of seed and position, so that resuming keeps no iterator."""

import functools
import sys

import numpy as np

from grpo_jax.errors import BadInput


def walk(seed, position, count, retired, parts=()):
    """(the next `count` example indices i64[count], the position after them) of an endless run of permutations.

    One permutation an epoch, or, of a Dataset with parts, one of each part by turns, in proportion to the weights
    to within a hundredth; examples that are retired (bool[N]) are passed over. A pure function of its arguments.
    BadInput when all are retired.
    """
    if retired.all():
        raise BadInput(
            'collection.retire_above', len(retired), 'prompts, and all are retired: nothing is left to learn'
        )
    at = _mixed(seed, parts) if parts else _shuffled((seed,), np.arange(len(retired)))
    chosen = []
    while len(chosen) < count:
        index = at(position)
        position += 1
        if not retired[index]:
            chosen.append(index)
    return np.array(chosen), position


def indices(seed, step, count, size, parts=()):
    """The `count` example indices of a step when none is ever retired, i64[count]."""
    return walk(seed, step * count, count, np.zeros(size, bool), parts)[0]


def shard(chosen, process, processes):
    """The contiguous share of a step's indices that a process loads; BadInput when they do not divide."""
    if len(chosen) % processes:
        raise BadInput('data.prompts_per_step', len(chosen), f'must be a multiple of the {processes} processes')
    size = len(chosen) // processes
    return chosen[process * size : (process + 1) * size]


def _mixed(seed, parts):
    """Function of the position in a mixture: the index there."""
    import grain  # seconds to import, needed for mixtures alone

    endless = [
        grain.MapDataset.range(sys.maxsize).map(_shuffled((seed, part), where)) for part, (_, where) in enumerate(parts)
    ]
    return grain.MapDataset.mix(endless, [weight for weight, _ in parts]).__getitem__


def _shuffled(seed, where):
    """Function of the position in an endless run of permutations of `where`: the index there."""

    @functools.cache
    def permutation(epoch):
        return np.random.default_rng((*seed, epoch)).permutation(where)

    return lambda position: permutation(position // len(where))[position % len(where)]
