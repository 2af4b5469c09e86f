"""The device mesh: axes data, fsdp, context, tensor."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
import numpy as np

from grpo_jax import ranges
from grpo_jax.errors import BadInput
from grpo_jax.ranges import Count


class Axes(NamedTuple):
    """config.mesh: how many devices lie along each axis."""

    data: Count = 1  # devices that rows are dealt to, each with all weights; 1: not cut
    fsdp: Count = 1  # devices that rows are dealt to, each with a share of the weights; 1: not cut
    context: Count = 1  # devices that the columns of a row are dealt to; 1: not cut
    tensor: Count = 1  # devices that heads and the width of the mlp are dealt to; 1: not cut


AXES = Axes._fields
ROW_AXES = ('data', 'fsdp', 'context')  # split the rows of arrays and of the sampler
BATCH_AXES = ('data', 'fsdp')  # split the learner's rows, whose columns context splits


def check(section: Any) -> None:
    """Raises BadInput when config.mesh has an axis that is none of AXES, or a size that is no whole number above 0."""
    ranges.check_value('mesh', section, Mapping)
    ranges.checked(Axes, Axes()._asdict() | dict(section.items()), 'mesh')


def make(section: Any) -> jax.sharding.Mesh:
    """Mesh over the first devices, as config.mesh says; axes without a size have size 1.

    Raises BadInput when devices are too few, or when several processes would not use all of theirs.
    """
    check(section)
    shape = tuple(section.get(axis, 1) for axis in AXES)
    size, devices = math.prod(shape), jax.devices()
    if jax.process_count() > 1 and size < len(devices):
        raise BadInput(
            'mesh',
            dict(section),
            f'has {size} devices; {jax.process_count()} processes must use all {len(devices)} of theirs; raise an axis',
        )
    if size > len(devices):
        raise BadInput(
            'mesh',
            dict(section),
            f'needs {size} devices and {len(devices)} are here; lower an axis so that the product fits',
        )
    on_tpu = devices[0].platform == 'tpu'
    return arrange(devices[:size], shape, len({device.slice_index for device in devices[:size]}) if on_tpu else 1)


def arrange(devices: Sequence[Any], shape: tuple[int, ...], slices: int = 1) -> jax.sharding.Mesh:
    """Mesh of `shape`, a size for each of AXES, where neighbours are neighbours in the torus of a TPU slice.

    slices: number of TPU slices, over which axis data goes. Raises BadInput where they do not divide it.
    """
    # Auto: make_mesh's newer default, Explicit, refuses embedding look-ups with sharded tokens
    auto = (AxisType.Auto,) * len(AXES)
    if slices > 1:
        if shape[0] % slices:
            raise BadInput(
                'mesh.data',
                shape[0],
                f'must be a multiple of the {slices} slices, so that only data crosses '
                f'the network between them; choose {max(round(shape[0] / slices), 1) * slices}',
            )
        between = (slices,) + (1,) * (len(AXES) - 1)
        grid = mesh_utils.create_hybrid_device_mesh((shape[0] // slices, *shape[1:]), between, devices=devices)
    elif max(shape) == len(devices) == 16 and devices[0].platform == 'tpu':
        # make_mesh winds a ring through 4x4; as a grid of lines, a scatter takes 3 + 3 hops and not 15
        grid = np.array(sorted(devices, key=lambda device: device.coords)).reshape(shape)
    else:
        try:
            return jax.make_mesh(shape, AXES, devices=devices, axis_types=auto)
        except NotImplementedError:  # an axis is not the product of sides of the torus, like 2 in 4x4x4
            grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return jax.sharding.Mesh(grid, AXES, axis_types=auto)
