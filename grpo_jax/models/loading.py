"""Weights straight onto the mesh: a process reads of each tensor what its own devices hold, and holds that once."""

from collections.abc import Sequence
import math
from typing import Any

import jax
import numpy as np

from grpo_jax.hosts import processes
from grpo_jax.models import tensor_files
from grpo_jax.models.tensor_files import Part, StoredTensor

ALIGNED = 64  # bytes; from such an address on, jax on CPUs takes an array of numpy as it is, without a copy


def load_parameter(
    tensors: Sequence[StoredTensor], axes: str, shape: tuple[int, ...], sharding: Any, first: int = 0
) -> jax.Array:
    """The float32 parameter of that shape on its devices (sharding may be a device), from the tensors it is stored as.

    axes 'dnh->nh,d': [D, N, H] is stored as [N * H, D]. A shape of one axis more has the tensors as its layers. first:
    the row of a tensor at which the parameter begins, where others share the tensor.
    BadInput as tensor_files.read_parts.
    """
    stacked = len(shape) > len(axes.split('->')[0])
    places = processes.local_parts(sharding, shape)
    arrays = {place: _aligned(tuple(end - start for start, end in place)) for place in places}
    for layer, tensor in enumerate(tensors):
        parts = []
        for place, array in arrays.items():
            if not stacked:
                parts.append(_part(axes, shape, place, array))
            elif place[0][0] <= layer < place[0][1]:
                parts.append(_part(axes, shape[1:], place[1:], array[layer - place[0][0]]))
        parts = [part._replace(rows=slice(part.rows.start + first, part.rows.stop + first)) for part in parts]
        if parts:
            tensor_files.read_parts(tensor, parts)
    # a device that copies does so before the next parameter is read
    return jax.block_until_ready(processes.put_parts(arrays, sharding, shape))


def _aligned(shape):
    """An array of numpy for float32 numbers to come."""
    size = math.prod(shape) * 4
    raw = np.empty(size + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    return raw[start : start + size].view(np.float32).reshape(shape)


def _part(axes, shape, place, array):
    """The Part of the stored tensor that is at this place, (start, end) an axis, of a parameter of that shape."""
    ours, theirs = axes.split('->')
    sizes, places = dict(zip(ours, shape, strict=True)), dict(zip(ours, place, strict=True))
    groups = theirs.split(',') if ',' in theirs else ['', theirs]
    stored = array.transpose([ours.index(axis) for axis in ''.join(groups)])
    out = stored.reshape([math.prod(places[axis][1] - places[axis][0] for axis in group) for group in groups])
    if not np.may_share_memory(out, array):
        raise ValueError(f'{axes}: axes that are stored as one must be neighbours')
    spans = []
    for group in groups:
        if any(places[axis] != (0, sizes[axis]) for axis in group[1:]):
            raise ValueError(f'{group}: of axes that are stored as one, the first alone may be split')
        inner = math.prod(sizes[axis] for axis in group[1:])
        start, end = places[group[0]] if group else (0, 1)
        spans.append(slice(start * inner, end * inner))
    rows, columns = spans
    return Part(rows, columns, out)
