"""TPUs that are not here, to compile for: a topology is a name such as 'v5e:2x2', 'v5p:2x2x1' or 'v6e:2x2'.

Needs libtpu, and in the environment before jax is imported:

    TPU_SKIP_MDS_QUERY=1            libtpu does not look for the metadata server of a TPU machine
    ALLOW_MULTIPLE_LIBTPU_LOAD=1    another process's lock on libtpu, or one left behind, does not abort this one

and on a machine without accelerators JAX_PLATFORMS=cpu. What is compiled for such devices cannot be run;
its memory_analysis() and as_text() are those of the real device.
"""
import math

import jax
from jax.experimental import topologies
from jax.sharding import AxisType

from grpo_jax.distributed.mesh import AXES
from grpo_jax.errors import BadInput


def devices(name):
    """The devices of a topology, in its order. Count them: some kinds have two a chip."""
    return topologies.get_topology_desc(platform='tpu', topology_name=name).devices


def mesh(name, section):
    """jax Mesh over all devices of a topology; section has the sizes of the axes.

    BadInput when these do not multiply to the number of devices.
    """
    found, shape = devices(name), tuple(section.get(axis, 1) for axis in AXES)
    if math.prod(shape) != len(found):
        raise BadInput('mesh', dict(section), f'has {math.prod(shape)} devices and {name} has {len(found)}; '
                       'choose sizes whose product is that')
    # Auto as in mesh.make
    return jax.make_mesh(shape, AXES, devices=found, axis_types=(AxisType.Auto,) * len(AXES))
