"""The device mesh: axes data, fsdp, context, tensor."""

from typing import NamedTuple

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
import numpy as np

from grpo_jax.errors import BadInput

AXES = ('data', 'fsdp', 'context', 'tensor')
ROW_AXES = ('data', 'fsdp', 'context')  # the axes that arrays of rows are split over, and the sampler's rows
BATCH_AXES = ('data', 'fsdp')  # those that the learner's rows are split over, whose columns context splits


class Devices(NamedTuple):
    """The devices of a run, and whether its programs are compiled when they are made.

    compile_now=False leaves that to the first call, or to preflight, whose devices are not here.
    """

    mesh: jax.sharding.Mesh
    compile_now: bool = True


def make(section):
    """jax Mesh over the first devices; an axis that section does not name has 1. BadInput when there are too few."""
    shape = tuple(section.get(axis, 1) for axis in AXES)
    if min(shape) < 1:
        raise BadInput('mesh', dict(section), 'every axis must be at least 1')
    wanted, devices = int(np.prod(shape)), jax.devices()
    if jax.process_count() > 1 and wanted < len(devices):
        raise BadInput(
            'mesh',
            dict(section),
            f'has {wanted} devices; {jax.process_count()} processes must use all {len(devices)} of theirs',
        )
    if wanted > len(devices):
        raise BadInput(
            'mesh',
            dict(section),
            f'needs {wanted} devices and {len(devices)} are here; lower an axis so that the product fits',
        )
    return over(devices[:wanted], shape)


def over(devices, shape):
    """jax Mesh of that shape over devices, which lie in it as they lie in the torus of a TPU slice."""
    # Auto: make_mesh's newer default, Explicit, refuses embedding look-ups with sharded tokens
    auto = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, devices=devices, axis_types=auto)
    except NotImplementedError:  # an axis is not the product of sides of the torus, like 2 in 4x4x4
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(placed, AXES, axis_types=auto)
