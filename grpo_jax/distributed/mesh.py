"""The device mesh: axes data, fsdp, tensor."""
import jax
from jax.sharding import AxisType
import numpy as np

from grpo_jax.errors import BadInput

AXES = ('data', 'fsdp', 'tensor')
ROW_AXES = ('data', 'fsdp')  # the axes that a batch's rows are split over


def make(section):
    """jax Mesh over the first data * fsdp * tensor devices; BadInput when there are fewer."""
    shape = tuple(section[axis] for axis in AXES)
    if min(shape) < 1:
        raise BadInput('mesh', dict(section), 'every axis must be at least 1')
    wanted, devices = int(np.prod(shape)), jax.devices()
    if jax.process_count() > 1 and wanted < len(devices):
        raise BadInput('mesh', dict(section), f'has {wanted} devices; {jax.process_count()} processes must use all '
                       f'{len(devices)} of theirs')
    if wanted > len(devices):
        raise BadInput('mesh', dict(section), f'needs {wanted} devices and {len(devices)} are here; '
                       'lower an axis so that the product fits')
    # Auto: make_mesh's newer default, Explicit, refuses embedding look-ups with sharded tokens
    return jax.make_mesh(shape, AXES, devices=devices[:wanted], axis_types=(AxisType.Auto,) * len(AXES))
