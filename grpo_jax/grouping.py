"""Groups of completions, of equal or unequal sizes, and arrays between the shapes [B] by row and [P, G] by group."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Int, Shaped
import numpy as np


class Grouping(NamedTuple):
    """Which group each of B completions belongs to, and its place in the group."""

    owner: Int[np.ndarray, ' B']  # number of the completion's group, 0 .. P - 1
    place: Int[np.ndarray, ' B']  # 0 for the first completion of a group, in the order of the rows

    @classmethod
    def by_ids(cls, ids: Shaped[np.ndarray, ' B']) -> 'Grouping':
        """The Grouping in which rows with equal ids form a group; groups are numbered by rising id."""
        _, owner = np.unique(ids, return_inverse=True)
        order = np.argsort(owner, kind='stable')
        sizes = np.bincount(owner)
        place = np.empty(len(owner), int)
        place[order] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return cls(owner, place)

    @classmethod
    def by_sizes(cls, sizes: Int[np.ndarray, ' P']) -> 'Grouping':
        """The Grouping in which groups are adjacent rows: the first sizes[0], then the next sizes[1], and so on."""
        return cls.by_ids(np.repeat(np.arange(len(sizes)), sizes))

    @property
    def sizes(self) -> Int[np.ndarray, ' P']:
        """The number of completions in each group."""
        return np.bincount(self.owner)

    def spread(self, x: Shaped[np.ndarray, 'B ...'], fill: float = 0) -> Shaped[np.ndarray, 'P G ...']:
        """x by group and place: x[b] at [owner[b], place[b]]. G is the largest size; `fill` pads smaller groups."""
        sizes = self.sizes
        x_PG = np.full((len(sizes), sizes.max(), *x.shape[1:]), fill, x.dtype)
        x_PG[self.owner, self.place] = x
        return x_PG

    def gather(self, x: Shaped[np.ndarray, 'P G ...']) -> Shaped[np.ndarray, 'B ...']:
        """The elements of x by row: the inverse of spread."""
        return x[self.owner, self.place]

    def rows_by_size(self) -> Iterator[Int[np.ndarray, 'n size']]:
        """Yields, for each size that occurs, the row numbers of all groups with that size."""
        rows, sizes = self.spread(np.arange(len(self.owner))), self.sizes
        for size in np.unique(sizes):
            yield rows[sizes == size, :size]
