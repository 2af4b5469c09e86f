"""Describes absent devices to compile for, named by a topology: 'v5e:2x4', a cloud's 'v5litepod-8', 'gpu:a100-40'.

Absent TPUs need libtpu, and these environment variables before jax is imported:

    TPU_SKIP_MDS_QUERY=1            libtpu does not look for the metadata server of a TPU machine
    ALLOW_MULTIPLE_LIBTPU_LOAD=1    another process's lock on libtpu does not abort this process
    TPU_WORKER_HOSTNAMES=localhost  libtpu does not warn of the machine; with any accelerator type, the programs for all
    TPU_ACCELERATOR_TYPE=v5litepod-4    topologies are the same

and on a machine without accelerators JAX_PLATFORMS=cpu. Programs for such devices cannot run; their memory_analysis()
and as_text() are those of the real device. For absent GPUs the CPU's devices stand in, as `stand_in` says.
"""

from collections.abc import Sequence
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from grpo_jax.errors import BadInput
from grpo_jax.learner import packing
from grpo_jax.sampler import programs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.chips import GIB, KINDS, Chip
from grpo_jax.sharding.mesh import AXES

# a v4 chip has two cores; a megacore makes them one device, as meshes need
OPTIONS = {'v4': {'chip_config_name': 'megacore'}}
ONE_CHIP = {'chips_per_host_bounds': (1, 1, 1)}  # libtpu assumes hosts of 2 x 2 chips; Colab's have one
SQUARES = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}
CUBES = {4: '2x2x1', 8: '2x2x2', 16: '2x2x4', 32: '2x4x4', 64: '4x4x4', 128: '4x4x8', 256: '4x8x8', 512: '8x8x8'}
CUBES |= {1024: '8x8x16'}
SIDES = {'v5e': SQUARES, 'v6e': SQUARES, 'v4': CUBES, 'v5p': CUBES}  # generation -> {chips: sides of a slice}
CORES = {'v4': 2, 'v5p': 2}  # cores of a chip, which a cloud counts in names like v5p-8
# memory: the part of the card's that CUDA can use; a T4's flops are of float16, since it multiplies no bfloat16
GPUS = {
    't4': Chip(flops=65e12, bandwidth=320e9, memory=14.6 * GIB),
    'l4': Chip(flops=121e12, bandwidth=300e9, memory=22.0 * GIB),
    'a100-40': KINDS['A100']._replace(bandwidth=1555e9, memory=39.4 * GIB),
    'a100-80': KINDS['A100']._replace(memory=79.1 * GIB),
    'h100': KINDS['H100']._replace(memory=79.1 * GIB),
    'h200': KINDS['H200']._replace(memory=139.7 * GIB),
}
GPU = re.compile(r'gpu:(?P<kind>[a-z]+\d+(?:-\d+)?|[\d.]+)(?:x(?P<count>\d+))?')
# for a CPU that stands in for a GPU: else it makes float32 copies of 16-bit weights before a loop, which no GPU needs
AS_ON_GPUS = '--xla_disable_hlo_passes=while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion'
FRACTION = 'XLA_PYTHON_CLIENT_MEM_FRACTION'  # environment variable: the share of a GPU's memory that jax takes
MARGIN = 0.02  # added to the temporaries that the CPU counts; docs/results.md compares a CPU's and a GPU's temporaries


def full_name(name: str) -> str:
    """Returns a topology's name like v5e:2x4 for a cloud's name like v5litepod-8; any other name unchanged.

    N in v5litepod-N, v5e-N and v6e-N counts chips, in v4-N and v5p-N TensorCores, two a chip. Raises BadInput for an N
    that no slice has.
    """
    kind, _, number = name.lower().partition('-')
    generation = kind.replace('v5litepod', 'v5e')
    if generation not in SIDES or not number.isdigit():
        return name
    cores = CORES.get(generation, 1)
    counts = [chips * cores for chips in SIDES[generation]]
    if int(number) not in counts:
        near = sorted(sorted(counts, key=lambda count: abs(count - int(number)))[:2])
        raise BadInput('--topology', name, f'is no slice; the nearest are {kind}-{near[0]} and {kind}-{near[1]}')
    return f'{generation}:{SIDES[generation][int(number) // cores]}'


def find_gpu(name: str) -> Chip | None:
    """Returns the Chip of a topology like gpu:a100-40 or gpu:24; `memory` is the part that jax takes. None for TPUs.

    Raises BadInput for an unknown GPU.
    """
    if not name.startswith('gpu:'):
        return None
    match = GPU.fullmatch(name)
    kind = match['kind'] if match else ''
    known = GPUS.get(kind) or (Chip(memory=float(kind) * GIB) if re.fullmatch(r'\d+(\.\d+)?', kind) else None)
    if known is None:
        choices = ', '.join(f'gpu:{kind}' for kind in GPUS)
        remedy = f'is no GPU; choose {choices}, or the GiB of one like gpu:24, for several like gpu:h100x8'
        raise BadInput('--topology', name, remedy)
    return known._replace(memory=known.memory * taken())


def margin() -> float:
    """Returns the share added to a GPU program's temporaries when a CPU's compiler counts them; else 0."""
    return MARGIN if jax.default_backend() == 'cpu' else 0.0


def taken() -> float:
    """Returns the share of a GPU's memory that jax takes for programs: FRACTION's value, or 0.75."""
    return float(os.environ.get(FRACTION) or 0.75)


def count_gpus(name: str) -> int:
    """Returns how many GPUs a topology like gpu:h100x8 has; 0 for TPUs."""
    match = GPU.fullmatch(name)
    return int(match['count'] or 1) if match else 0


def name_gpus(kind: str, count: int, memory: float) -> str:
    """Returns the topology of `count` GPUs of a device kind; memory: bytes of one, to name a kind that GPUS lacks."""
    names = [name for name in GPUS if re.search(rf'\b{name.partition("-")[0]}\b', kind.lower())]
    sizes = [name for name in names if name.partition('-')[2] in kind] or names
    gib = f'{memory / GIB:.1f}'
    return f'gpu:{sizes[0] if sizes else gib}' + (f'x{count}' if count > 1 else '')


def stand_in() -> None:
    """Makes this process choose for its CPU the sizes of packed rows, caches and segments that a GPU has.

    From then on jax compiles without optimizing machine code, which changes no array's size.
    """
    jax.config.update('jax_disable_most_optimizations', True)
    tables: Any = packing.BLOCK, packing.ENOUGH, programs.BLOCK, programs.SEGMENT, programs.HALVINGS, programs.BY_LAYER
    for table in tables:
        table['cpu'] = table['gpu']


def devices(name: str, slices: int = 1) -> Sequence[Any]:
    """Returns the devices of `slices` slices of the topology `name`; raises BadInput for one that does not exist."""
    if find_gpu(name):
        count, here = count_gpus(name), jax.devices()
        if count > len(here):
            raise BadInput('--topology', name, f'has {count} GPUs, and {len(here)} are here; name one of so many')
        return here[:count]
    if importlib.util.find_spec('libtpu') is None:
        remedy = 'needs the TPU compiler, libtpu; install the extra [tpu]. A GPU is named like gpu:a100-40'
        raise BadInput('--topology', name, remedy)
    generation, _, sides = name.partition(':')
    options = OPTIONS.get(generation, {}) | ({'num_slices': slices} if slices > 1 else {})
    options |= ONE_CHIP if set(sides.split('x')) == {'1'} else {}
    try:
        return topologies.get_topology_desc(platform='tpu', topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        if 'lockfile' in str(error):
            remedy = 'waits for libtpu, which another process of this machine uses; try again when it has ended'
            raise BadInput('--topology', name, remedy) from None
        raise BadInput(
            '--topology',
            name,
            f'is no slice that libtpu knows ({str(error).splitlines()[0]}); name one, like v5e:4x4 or v5p-8',
        ) from None


def mesh(name: str, section: Any, slices: int = 1) -> jax.sharding.Mesh:
    """Returns the jax Mesh over all devices of a topology but the last mesh.sampler ones; section: config.mesh.

    The axis data spans the slices. Raises BadInput when the product of the sizes is not the number of devices, or
    when the slices do not divide data.
    """
    all_devices, beside = devices(name, slices), section.get('sampler', 0)
    all_devices = all_devices[: len(all_devices) - beside]
    shape = tuple(section.get(axis, 1) for axis in AXES)
    if math.prod(shape) != len(all_devices):
        raise BadInput(
            'mesh',
            dict(section),
            f'has {math.prod(shape)} devices and {name} has {len(all_devices)}{" beside mesh.sampler" * bool(beside)}; '
            f'choose sizes of {", ".join(AXES)} whose product is that',
        )
    return meshes.arrange(all_devices, shape, slices)
