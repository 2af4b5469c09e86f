"""Absent TPUs to compile for. A topology is a name such as 'v5e:1x1', 'v5p:2x2x1' or 'v6e:2x2'.

This needs libtpu, and in the environment before jax is imported:

    TPU_SKIP_MDS_QUERY=1            libtpu does not look for the metadata server of a TPU machine
    ALLOW_MULTIPLE_LIBTPU_LOAD=1    a lock on libtpu, of another process or left behind, does not abort this one

and on a machine without accelerators JAX_PLATFORMS=cpu. Programs for such devices cannot run; their memory_analysis()
and as_text() are those of the real device.
"""

from collections.abc import Sequence
import importlib.util
import math
from typing import Any

import jax
from jax.experimental import topologies

from grpo_jax.errors import BadInput
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.mesh import AXES

# a v4 chip has two cores; a megacore makes them one device, as meshes need
OPTIONS = {'v4': {'chip_config_name': 'megacore'}}
ONE_CHIP = {'chips_per_host_bounds': (1, 1, 1)}  # libtpu assumes hosts of 2 x 2 chips; Colab's have one


def devices(name: str, slices: int = 1) -> Sequence[Any]:
    """Returns the devices of `slices` slices; some kinds have two a chip. Raises BadInput when libtpu has none."""
    if importlib.util.find_spec('libtpu') is None:
        raise BadInput('--topology', name, 'needs the TPU compiler, libtpu; install the extra [tpu]')
    generation, _, sides = name.partition(':')
    options = OPTIONS.get(generation, {}) | ({'num_slices': slices} if slices > 1 else {})
    options |= ONE_CHIP if set(sides.split('x')) == {'1'} else {}
    try:
        return topologies.get_topology_desc(platform='tpu', topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise BadInput(
            '--topology',
            name,
            f'is no slice that libtpu knows ({str(error).splitlines()[0]}); name one, like v5e:4x4 or v5p:4x4x4',
        ) from None


def mesh(name: str, section: Any, slices: int = 1) -> jax.sharding.Mesh:
    """Returns the jax Mesh over all devices of a topology; section: sizes of the axes.

    The axis data spans the slices first. Raises BadInput when the product of the sizes is not the number of devices, or
    when the slices do not divide data.
    """
    all_devices = devices(name, slices)
    shape = tuple(section.get(axis, 1) for axis in AXES)
    if math.prod(shape) != len(all_devices):
        raise BadInput(
            'mesh',
            dict(section),
            f'has {math.prod(shape)} devices and {name} has {len(all_devices)}; '
            f'choose sizes of {", ".join(AXES)} whose product is that',
        )
    return meshes.arrange(all_devices, shape, slices)
