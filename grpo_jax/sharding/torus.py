"""Arrays that are gathered and scattered along an axis of the mesh, side by side of the torus of a TPU slice."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Shaped
import numpy as np

from grpo_jax.types import Array

Groups = list[list[int]]


class Axis(NamedTuple):
    """An axis of the mesh, for functions that run on each device; see along."""

    name: str
    stages: list[Groups]
    platform: str  # of the devices: tpu, gpu, cpu

    def gather(self, x: Shaped[Array, '...'], dimension: int) -> Shaped[Array, '...']:
        """All devices' parts, side by side along a dimension."""
        for groups in self.stages if len(self.stages) > 2 else [None]:  # XLA for TPUs gathers over two sides at once
            x = jax.lax.all_gather(x, self.name, axis=dimension, axis_index_groups=groups, tiled=True)
        return x

    def scatter(self, x: Shaped[Array, '...'], dimension: int) -> Shaped[Array, '...']:
        """A device's part of the sum of x over all devices."""
        if self.platform == 'cpu':  # between processes, psum_scatter gets a few numbers at the end of a part wrong
            width = x.shape[dimension] // jax.lax.axis_size(self.name)
            start = jax.lax.axis_index(self.name) * width
            return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, self.name), start, width, dimension)
        if self.platform != 'tpu':
            return jax.lax.psum_scatter(x, self.name, scatter_dimension=dimension, tiled=True)
        for groups in reversed(self.stages):
            x = self._scatter_around(x, groups, dimension)
        return x

    def _scatter_around(self, x, groups, dimension):
        """A device's part of the sum over its group, each sum travelling around the group.

        XLA for TPUs makes many a psum_scatter a sum of the whole, which sends twice as much and is cut afterwards.
        """
        size = len(groups[0])
        place = jnp.argsort(jnp.array(groups).ravel())[jax.lax.axis_index(self.name)] % size
        neighbours = [(group[i], group[(i + 1) % size]) for group in groups for i in range(size)]
        width = x.shape[dimension] // size

        def own(step):
            return jax.lax.dynamic_slice_in_dim(x, (place - 1 - step) % size * width, width, dimension)

        total = own(0)
        for step in range(1, size):
            total = jax.lax.ppermute(total, self.name, neighbours) + own(step)
        return total


def along(mesh: jax.sharding.Mesh, name: str) -> Axis:
    """The Axis of a mesh, whose stages have one list of groups for each side of the torus that the axis spans.

    An array of which each place has a part is gathered within each group of the first list, then of the next. In the
    reverse order it is scattered. Devices that do not say where they lie are one group.
    """
    lined = np.moveaxis(mesh.devices, mesh.axis_names.index(name), -1)
    devices = lined.reshape(-1, lined.shape[-1])[0]
    places = [(*getattr(device, 'coords', ()), getattr(device, 'core_on_chip', 0)) for device in devices]
    return Axis(name, lines(places), devices[0].platform)


def lines(places: Sequence[tuple[int, ...]]) -> list[Groups]:
    """The stages of an axis whose chips lie at these coordinates; one of all chips where they are no grid of lines."""
    count = len(places)
    # the largest blocks of places, one behind the other, that are lines along the same side
    for size in (n for n in range(count, 1, -1) if count % n == 0):
        blocks = [places[i : i + size] for i in range(0, count, size)]
        varied = {i for block in blocks for i, values in enumerate(zip(*block, strict=True)) if len(set(values)) > 1}
        if len(varied) == 1:
            break
    else:
        return [[list(range(count))]] * (count > 1)
    side = varied.pop()
    # of each block, which place has which coordinate there
    at = [{place[side]: b * size + i for i, place in enumerate(block)} for b, block in enumerate(blocks)]
    if any(set(block) != set(at[0]) or len(block) < size for block in at):
        return [[list(range(count))]]
    # blocks are lines themselves along the other sides, and so are their places of one coordinate
    across = lines([block[0][:side] + block[0][side + 1 :] for block in blocks])
    outer = [[[at[b][place] for b in group] for group in groups for place in sorted(at[0])] for groups in across]
    return [[list(range(i, i + size)) for i in range(0, count, size)], *outer]
