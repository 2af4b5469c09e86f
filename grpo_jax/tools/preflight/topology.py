"""TPUs that are not here, to compile for: a topology is a name such as 'v5e:1x1', 'v5p:2x2x1' or 'v6e:2x2'.

Needs libtpu, and in the environment before jax is imported:

    TPU_SKIP_MDS_QUERY=1            libtpu does not look for the metadata server of a TPU machine
    ALLOW_MULTIPLE_LIBTPU_LOAD=1    another process's lock on libtpu, or one left behind, does not abort this one

and on a machine without accelerators JAX_PLATFORMS=cpu. What is compiled for such devices cannot be run;
its memory_analysis() and as_text() are those of the real device.
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

# a chip of v4 has two cores; as one device, which is what meshes take, they are a megacore
OPTIONS = {'v4': {'chip_config_name': 'megacore'}}
ONE_CHIP = {'chips_per_host_bounds': (1, 1, 1)}  # libtpu takes a host for one of 2 x 2 chips, which Colab's are not


def devices(name: str, slices: int = 1) -> Sequence[Any]:
    """The devices of `slices` slices of a topology, in its order. Count them: some kinds have two a chip."""
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
            f'is no slice that libtpu knows ({str(error).splitlines()[0]}); for example v5e:4x4, v5p:4x4x4, v6e:8x8',
        ) from None


def mesh(name: str, section: Any, slices: int = 1) -> jax.sharding.Mesh:
    """jax Mesh over all devices of a topology; section has the sizes of the axes.

    Axis data goes over the slices first. BadInput when the sizes do not multiply to the number of devices, or the
    slices do not divide data.
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
    return meshes.over(all_devices, shape, slices)
