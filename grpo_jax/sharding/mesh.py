"""The device mesh: axes data, fsdp, context, tensor."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
import numpy as np

from grpo_jax import ranges
from grpo_jax.errors import BadInput
from grpo_jax.ranges import Count, Natural


class Axes(NamedTuple):
    """config.mesh: how many devices lie along each axis, and how many the sampler has beside them."""

    # devices that share the rows, each with all weights; 0: all devices that the other axes leave, and where these are
    # 1, data, fsdp and tensor are chosen for the model and the batch
    data: Natural = 0
    fsdp: Count = 1  # devices that share the rows, each with a part of the weights; 1: not cut
    context: Count = 1  # devices that share the columns of a row; 1: not cut
    tensor: Count = 1  # devices that share the heads and the width of the mlp; 1: not cut
    # devices beside these on which the sampler has a mesh of its own; 0: it takes turns with the learner on one mesh
    sampler: Natural = 0
    # how weights reach a sampler whose devices belong to other processes: files, in the workdir, for any sizes;
    # devices, from device to device, for equal halves
    transport: Literal['files', 'devices'] = 'files'


AXES = ('data', 'fsdp', 'context', 'tensor')
ROW_AXES = ('data', 'fsdp', 'context')  # split the rows of arrays and of the sampler
BATCH_AXES = ('data', 'fsdp')  # split the learner's rows, whose columns context splits


def check(section: Any) -> None:
    """Raises BadInput when config.mesh has a key that Axes lacks, or a value out of its field's range."""
    ranges.check_value('mesh', section, Mapping)
    ranges.checked(Axes, Axes()._asdict() | dict(section.items()), 'mesh')


def devices_here() -> Sequence[Any]:
    """The devices of all processes of the job, over which a mesh is chosen."""
    return jax.devices()


def is_here(mesh: jax.sharding.Mesh) -> bool:
    """Whether some of a mesh's devices belong to this process."""
    return jax.process_index() in {device.process_index for device in mesh.devices.flat}


def sizes_of(section: Any) -> dict[str, int]:
    """{axis: size} of config.mesh (`section`); an axis that is missing has size 1, and so has data if it is 0."""
    return {axis: section.get(axis, 1) or 1 for axis in AXES}


def count_slices(devices: Sequence[Any]) -> int:
    """How many TPU slices the devices lie on; 1 for other devices."""
    return len({device.slice_index for device in devices}) if devices[0].platform == 'tpu' else 1


def list_meshes(section: Any, model_config: Any, count: int, slices: int = 1) -> list[dict[str, int]]:
    """The meshes over `count` devices that config.mesh allows while its data is 0, as {axis: size}.

    Where another axis is above 1, data is what the axes leave, if they divide the count. Else the meshes come in order
    of their tensor size, which divides the key and value heads; fsdp is as large as the model's width allows within a
    slice, and data is the rest.
    """
    given = sizes_of(section) | {'data': 1}
    taken, within = math.prod(given.values()), count // slices
    if taken > 1:
        return [given | {'data': count // taken}] * (count % taken == 0)
    candidates = []
    for tensor in (n for n in range(1, within + 1) if within % n == 0 and model_config.kv_heads % n == 0):
        cut = within // tensor
        fsdp = max(n for n in range(1, cut + 1) if cut % n == 0 and model_config.width % n == 0)
        candidates.append(given | {'data': count // tensor // fsdp, 'fsdp': fsdp, 'tensor': tensor})
    return candidates


def choose(
    section: Any, model_config: Any, counts: Sequence[int], slices: int, fits: Callable[[Mapping[str, int]], bool]
) -> dict[str, int]:
    """The mesh for a config.mesh whose data is 0, as {axis: size}: the first of list_meshes that fits.

    counts: numbers of devices, the best first. fits({axis: size}): whether a mesh divides model and batch. Where no
    mesh fits, the first of all is returned, and later checks refuse it with a remedy.
    """
    candidates = [sizes for count in counts for sizes in list_meshes(section, model_config, count, slices)]
    return next(filter(fits, candidates), candidates[0] if candidates else sizes_of(section))


def make(section: Any) -> jax.sharding.Mesh:
    """The Mesh of config.mesh (`section`) over the first devices; for its sizes see `sizes_of`.

    Raises BadInput when devices are too few, or when several processes would not use all of theirs.
    """
    check(section)
    shape = tuple(sizes_of(section).values())
    size, devices = math.prod(shape), jax.devices()
    if jax.process_count() > 1 and (used := size + section.get('sampler', 0)) < len(devices):
        raise BadInput(
            'mesh',
            dict(section),
            f'has {used} devices, and {jax.process_count()} processes must use all {len(devices)} of theirs; raise '
            f'data or another axis, until the product with mesh.sampler added is {len(devices)}',
        )
    if size > len(devices):
        remedy = f'needs {size} devices and {len(devices)} are here; lower an axis so that the product fits'
        raise BadInput('mesh', dict(section), remedy)
    return arrange(devices[:size], shape, count_slices(devices[:size]))


def arrange(devices: Sequence[Any], shape: tuple[int, ...], slices: int = 1) -> jax.sharding.Mesh:
    """The Mesh with these sizes of AXES, placed so that neighbours on an axis are neighbours in a TPU slice's torus.

    shape: a size for each of AXES. slices: number of TPU slices, over which axis data goes. Raises BadInput where they
    do not divide data's size.
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
