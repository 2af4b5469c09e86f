"""The device mesh: axes data, fsdp, context, tensor."""
import jax
from jax.sharding import AxisType
import numpy as np

from grpo_jax.errors import BadInput

AXES = ('data', 'fsdp', 'context', 'tensor')
ROW_AXES = ('data', 'fsdp', 'context')  # the axes that arrays of rows are split over, and the sampler's rows
BATCH_AXES = ('data', 'fsdp')  # those that the learner's rows are split over, whose columns context splits


def make(section):
    """jax Mesh over the first devices; an axis that section does not name has 1. BadInput when there are too few."""
    shape = tuple(section.get(axis, 1) for axis in AXES)
    if min(shape) < 1:
        raise BadInput('mesh', dict(section), 'every axis must be at least 1')
    wanted, devices = int(np.prod(shape)), jax.devices()
    if wanted > len(devices):
        raise BadInput('mesh', dict(section), f'needs {wanted} devices and {len(devices)} are here; '
                       'lower an axis so that the product fits')
    # Auto: make_mesh's newer default, Explicit, refuses embedding look-ups with sharded tokens
    return jax.make_mesh(shape, AXES, devices=devices[:wanted], axis_types=(AxisType.Auto,) * len(AXES))
