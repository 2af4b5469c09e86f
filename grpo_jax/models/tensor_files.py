"""The safetensors files of a folder: what their headers say of each tensor, and its numbers."""

import os
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np
from safetensors import SafetensorError, safe_open

from grpo_jax.errors import BadInput
from grpo_jax.hosts import files
from grpo_jax.models import folders

DTYPES = ('F64', 'F32', 'F16', 'BF16')  # numbers that are weights as they are stored


class StoredTensor(NamedTuple):
    """What a header says of a tensor."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it


def list_tensors(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors, or of the files that its index names.

    BadInput when a file is absent or damaged, or lacks a tensor that the index puts there.
    """
    folders.check(folder)
    placed, stored = _read_index(folder), {}
    for path in sorted(set(placed.values())) or [os.path.join(folder, 'model.safetensors')]:
        with _open(path) as tensors:
            for name in tensors.keys():
                tensor = tensors.get_slice(name)
                stored[name] = StoredTensor(path, name, tuple(tensor.get_shape()), tensor.get_dtype())
    for name, path in placed.items():
        if name not in stored or stored[name].file != path:
            raise BadInput('model.path', path, f'lacks {name}, which the index puts there; fetch the folder again')
    return stored


def _read_index(folder):
    """Tensor name -> path, as the index says; {} where one file holds all."""
    path = os.path.join(folder, folders.INDEX)
    if not os.path.isfile(path):
        if not os.path.isfile(os.path.join(folder, 'model.safetensors')):
            hint = ''.join(
                f'{name} is pickled, a program as much as weights, and is not read: convert it, or '
                for name in folders.pickled_weights(folder)[:1]
            )
            raise BadInput(
                'model.path', folder, f'has no model.safetensors; {hint}add the weights or set model.random_init=True'
            )
        return {}
    index = folders.read_settings(folder, folders.INDEX, 'it is no index of weights; fetch it again')
    shards = index.get('weight_map')
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise BadInput('model.path', path, 'is no index of weights, without weight_map of files; fetch it again')
    paths = {shard: files.inside(folder, shard) for shard in set(shards.values())}
    return {name: paths[shard] for name, shard in shards.items()}


def check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """BadInput when a tensor has another shape, or its numbers mean nothing without others, as quantized ones."""
    if tensor.shape != shape:
        raise BadInput(tensor.name, tensor.shape, f'does not fit the shape {shape} that config.json gives')
    if tensor.dtype not in DTYPES:
        raise BadInput(
            tensor.name, tensor.dtype, f'is none of {", ".join(DTYPES)}; take the weights that were not quantized'
        )


def read_tensor(tensor: StoredTensor) -> Float[np.ndarray, '...']:
    """The tensor's numbers as float32, through ml_dtypes, since numpy alone has no bfloat16.

    BadInput where a number is not finite, or too large for float32.
    """
    with _open(tensor.file) as tensors, np.errstate(over='ignore', invalid='ignore'):
        numbers = np.asarray(tensors.get_tensor(tensor.name)).astype(np.float32)
        # the sum of squares is not finite where a number is not; it takes half the time of np.isfinite, and no memory
        if not np.isfinite(np.vdot(numbers, numbers)) and (wrong := np.count_nonzero(~np.isfinite(numbers))):
            raise BadInput(
                tensor.name,
                f'{wrong} of {numbers.size} numbers in {tensor.file}',
                'are NaN or infinite as float32; take the weights again from where they were published',
            )
    return numbers


def _open(path) -> Any:
    """A safetensors file; BadInput when it is absent, cut short or something else."""
    try:
        return safe_open(path, 'np')
    except (SafetensorError, OSError) as error:
        raise BadInput('model.path', path, f'not a safetensors file ({error}); fetch it again') from None
