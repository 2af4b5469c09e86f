"""Gathers and scatters arrays along a mesh axis: one side of a TPU slice's torus after another."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Shaped
import numpy as np

from grpo_jax.types import Array

Groups = list[list[int]]


class Axis(NamedTuple):
    """A mesh axis, for functions that run on each device in shard_map; made by `make_axis`."""

    name: str
    stages: list[Groups]  # groups of devices, by their places on the axis, for one side of the torus after another
    platform: str  # of the devices: tpu, gpu, cpu

    def gather(self, x: Shaped[Array, '...'], dimension: int) -> Shaped[Array, '...']:
        """The values of x on all devices of the axis, side by side along a dimension."""
        for groups in self.stages if len(self.stages) > 2 else [None]:  # XLA for TPUs gathers over two sides at once
            x = jax.lax.all_gather(x, self.name, axis=dimension, axis_index_groups=groups, tiled=True)
        return x

    def scatter(self, x: Shaped[Array, '...'], dimension: int) -> Shaped[Array, '...']:
        """Sums x over the axis, and returns this device's part along a dimension."""
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
        """Sums x over this device's group, and returns this device's part; partial sums travel around the group.

        XLA for TPUs turns many a psum_scatter into a sum over whole arrays, which sends twice as many bytes.
        """
        size = len(groups[0])
        place = jnp.argsort(jnp.array(groups).ravel())[jax.lax.axis_index(self.name)] % size
        neighbours = [(group[i], group[(i + 1) % size]) for group in groups for i in range(size)]
        width = x.shape[dimension] // size

        def part_at(step):
            return jax.lax.dynamic_slice_in_dim(x, (place - 1 - step) % size * width, width, dimension)

        total = part_at(0)
        for step in range(1, size):
            total = jax.lax.ppermute(total, self.name, neighbours) + part_at(step)
        return total


def make_axis(mesh: jax.sharding.Mesh, name: str) -> Axis:
    """The Axis for a mesh axis by name, with a stage for each side of the torus that it spans.

    A gather goes within the groups of the first stage, then of the next; a scatter goes in the reverse order. Devices
    without coordinates form one group.
    """
    axis_last = np.moveaxis(mesh.devices, mesh.axis_names.index(name), -1)
    devices = axis_last.reshape(-1, axis_last.shape[-1])[0]
    coordinates = [(*getattr(device, 'coords', ()), getattr(device, 'core_on_chip', 0)) for device in devices]
    return Axis(name, make_stages(coordinates), devices[0].platform)


def make_stages(coordinates: Sequence[tuple[int, ...]]) -> list[Groups]:
    """The stages in which chips at these torus coordinates gather, as Axis.stages: one for each side of their grid.

    A stage has a group for each line of chips along that side, with their places on the axis. Chips that do not form a
    grid of lines along the torus make one stage with one group; a single chip makes none.
    """
    count = len(coordinates)
    # the largest blocks of successive chips that are lines along one side, the same for all blocks
    for size in (n for n in range(count, 1, -1) if count % n == 0):
        blocks = [coordinates[i : i + size] for i in range(0, count, size)]
        varied = {i for block in blocks for i, values in enumerate(zip(*block, strict=True)) if len(set(values)) > 1}
        if len(varied) == 1:
            break
    else:
        return [[list(range(count))]] * (count > 1)
    side = varied.pop()
    # for each block: coordinate on that side -> place on the axis
    place_at = [{chip[side]: b * size + i for i, chip in enumerate(block)} for b, block in enumerate(blocks)]
    if any(set(block) != set(place_at[0]) or len(block) < size for block in place_at):
        return [[list(range(count))]]
    # the other sides: stages over the blocks, which hold for the blocks' places at each coordinate
    across = make_stages([block[0][:side] + block[0][side + 1 :] for block in blocks])
    outer = [[[place_at[b][x] for b in group] for group in groups for x in sorted(place_at[0])] for groups in across]
    return [[list(range(i, i + size)) for i in range(0, count, size)], *outer]
