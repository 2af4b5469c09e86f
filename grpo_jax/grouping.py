"""Which completions of a batch belong together: groups of one size or of several, as rows and as [P, G]."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Int, Shaped
import numpy as np


class Grouping(NamedTuple):
    """The groups of B completions, and each one's place in its group."""

    owner: Int[np.ndarray, ' B']  # number of its group, 0 .. P - 1
    place: Int[np.ndarray, ' B']

    @classmethod
    def by_ids(cls, ids: Shaped[np.ndarray, ' B']) -> 'Grouping':
        """The groups of equal ids, by rising ids, whatever the order of the rows."""
        _, owner = np.unique(ids, return_inverse=True)
        order = np.argsort(owner, kind='stable')
        sizes = np.bincount(owner)
        place = np.empty(len(owner), int)
        place[order] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return cls(owner, place)

    @classmethod
    def by_sizes(cls, sizes: Int[np.ndarray, ' P']) -> 'Grouping':
        """The groups of adjacent rows, of these sizes."""
        return cls.by_ids(np.repeat(np.arange(len(sizes)), sizes))

    @property
    def sizes(self) -> Int[np.ndarray, ' P']:
        """Completions of each group."""
        return np.bincount(self.owner)

    def spread(self, x: Shaped[np.ndarray, 'B ...'], fill: float = 0) -> Shaped[np.ndarray, 'P G ...']:
        """x by group and place; `fill` where a group has fewer completions than G, those of the largest."""
        sizes = self.sizes
        full = np.full((len(sizes), sizes.max(), *x.shape[1:]), fill, x.dtype)
        full[self.owner, self.place] = x
        return full

    def gather(self, x: Shaped[np.ndarray, 'P G ...']) -> Shaped[np.ndarray, 'B ...']:
        """x by row again."""
        return x[self.owner, self.place]

    def rows_by_size(self) -> Iterator[Int[np.ndarray, 'n size']]:
        """The rows of the groups of one size, for each size."""
        rows, sizes = self.spread(np.arange(len(self.owner))), self.sizes
        for size in np.unique(sizes):
            yield rows[sizes == size, :size]
