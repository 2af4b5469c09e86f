"""Reads the safetensors files of a folder: their headers, and their numbers straight onto the mesh.

From each tensor a process reads only what its own devices hold, and keeps it in memory once. Weights in fp8 are read
together with their scales; other quantizations are refused.
"""

from collections.abc import Mapping, Sequence
import json
import math
import os
from typing import Any, NamedTuple

import jax
from jaxtyping import Float
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.hosts import files, processes
from grpo_jax.models.hf import folder as folders

# dtype of weights, as safetensors spells it -> numpy's
DTYPES = {
    'F64': np.dtype('<f8'),
    'F32': np.dtype('<f4'),
    'F16': np.dtype('<f2'),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
    'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
}
FP8 = ('F8_E4M3', 'F8_E5M2')
BLOCK = 2**20  # bytes that are read at once
LEAST_READ = 512  # bytes in a row, the smallest sector of a disk; for fewer, the whole row is read
SCALES = ('_scale_inv', '_scale')  # suffixes of tensors that an fp8 weight is multiplied with
UNREAD = ('.input_scale', '.input_scale_ub', '.activation_scale')  # suffixes of tensors that only products in fp8 need
# quant_method in config.json for fp8 weights that are read -> the format that it must have, None: any
METHODS = {'fp8': None, 'fbgemm_fp8': None, 'compressed-tensors': 'float-quantized'}
KEYS = ('quantization_config', 'compression_config')  # of config.json
ALIGNED = 64  # bytes; jax on CPUs uses a numpy array at such an address without a copy


class StoredTensor(NamedTuple):
    """A tensor in a file, as the header describes it."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    begin: int = 0  # offset in the file, in bytes
    scale: 'StoredTensor | None' = None  # the tensor that its numbers are multiplied with
    block: tuple[int, int] = (0, 0)  # (rows, columns) that share a number of the scale


class Part(NamedTuple):
    """A rectangle in a tensor with two axes, and the array that its numbers are written to."""

    rows: slice
    columns: slice
    out: np.ndarray  # float32, of any strides


def list_tensors(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """{name: StoredTensor} of a folder's safetensors file or files; raises BadInput for absent or damaged files."""
    folders.check(folder)
    placed, stored = _read_index(folder), {}
    for path in sorted(set(placed.values())) or [os.path.join(folder, 'model.safetensors')]:
        stored |= {tensor.name: tensor for tensor in read_header(path) if placed.get(tensor.name, path) == path}
    for name, path in placed.items():
        if name not in stored:
            raise BadInput('model.path', path, f'lacks {name}, which the index puts there; fetch the folder again')
    return stored


def _read_index(folder):
    """{tensor name: path of its file} as the index says; {} without an index. BadInput if weights or index are bad."""
    path = os.path.join(folder, folders.INDEX)
    if not os.path.isfile(path):
        if not os.path.isfile(os.path.join(folder, 'model.safetensors')):
            hint = ''  # about weights in other files
            shards = sorted(name for name in os.listdir(folder) if name.endswith('.safetensors'))
            if shards:
                hint = f'its {shards[0]} needs {folders.INDEX}: fetch the folder again, or '
            elif pickled := folders.pickled_weights(folder):
                hint = f'{pickled[0]} is pickled, a program as much as weights, and is not read: convert it, or '
            raise BadInput(
                'model.path', folder, f'has no model.safetensors; {hint}add the weights or set model.random_init=True'
            )
        return {}
    index = folders.read_settings(folder, folders.INDEX, 'it is no index of weights; fetch it again')
    shards = index.get('weight_map')
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise BadInput('model.path', path, 'is no index of weights: it has no weight_map of files; fetch it again')
    paths = {shard: files.path_inside(folder, shard) for shard in set(shards.values())}
    absent = sorted(path for path in paths.values() if not os.path.isfile(path))
    if absent:
        count = f'{len(absent)} of the {len(paths)} safetensors files that the index names are absent'
        raise BadInput('model.path', absent[0], f'is not there: {count}; fetch the folder again')
    return {name: paths[shard] for name, shard in shards.items()}


def read_header(path: str) -> list[StoredTensor]:
    """The tensors that a file's header lists. Raises BadInput for a file that is absent, cut short or malformed."""
    try:
        with safe_open(path, 'np'):  # checks that the header is sound, and that it gives the file's length
            pass
        with open(path, 'rb') as file:
            length = int.from_bytes(file.read(8), 'little')
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput('model.path', path, f'is not a safetensors file ({error}); fetch it again') from None
    return [
        StoredTensor(path, name, tuple(entry['shape']), entry['dtype'], 8 + length + entry['data_offsets'][0])
        for name, entry in header.items()
        if name != '__metadata__'
    ]


def check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raises BadInput when a tensor does not have this shape, or its dtype is not in DTYPES, as integers are not."""
    if tensor.shape != shape:
        raise BadInput(
            tensor.name, tensor.shape, f'does not fit the shape {shape} of config.json; take both from one model'
        )
    if tensor.dtype not in DTYPES:
        raise BadInput(
            tensor.name, tensor.dtype, f'is none of {", ".join(DTYPES)}; take the weights that were not quantized'
        )


def two_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a shape, with all axes but the first flattened; fewer than two axes count as one row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def read_tensor(tensor: StoredTensor) -> Float[np.ndarray, '...']:
    """A whole tensor as float32, multiplied by its scale. Raises BadInput as read_parts does."""
    rows, columns = two_axes(tensor.shape)
    numbers = np.empty((rows, columns), np.float32)
    read_parts(tensor, [Part(slice(0, rows), slice(0, columns), numbers)])
    return numbers.reshape(tensor.shape)


def differ(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether the shapes or the numbers of two tensors differ; reads them in blocks, up to the first difference."""
    if one.shape != other.shape:
        return True
    rows, width = two_axes(one.shape)
    step = max(BLOCK // (4 * max(width, 1)), 1)
    for first in range(0, rows, step):
        end = min(first + step, rows)
        numbers = np.empty((2, end - first, width), np.float32)
        for tensor, out in zip((one, other), numbers, strict=True):
            read_parts(tensor, [Part(slice(first, end), slice(0, width), out)])
        if not np.array_equal(numbers[0], numbers[1]):
            return True
    return False


def read_parts(tensor: StoredTensor, parts: Sequence[Part]) -> None:
    """Reads rectangles of a tensor into their float32 arrays, multiplied by its scale; a vector counts as one row.

    Only the rectangles' bytes are read, BLOCK at a time; where rectangles overlap, they are read once. If a rectangle
    is narrower than LEAST_READ bytes, whole rows are read. Raises BadInput where a number is not finite or too large
    for float32, and for a file that ends too early or cannot be read.
    """
    scale, not_finite = None, 0
    if tensor.scale is not None:
        sizes = zip(two_axes(tensor.shape), tensor.block, strict=True)
        scale = read_tensor(tensor.scale).reshape([-(-size // block) for size, block in sizes])
    try:
        # read, not memory-mapped: mapped pages would count as this process's memory
        with open(tensor.file, 'rb', buffering=0) as file:
            for rows, columns in _rectangles(tensor, parts):
                numbers = _read_numbers(file, tensor, rows, columns)
                with np.errstate(over='ignore', invalid='ignore'):
                    if scale is not None:
                        numbers *= scale[np.arange(*rows) // tensor.block[0]][:, np.arange(*columns) // tensor.block[1]]
                    # the sum of squares is not finite if a number is not; it takes half the time of np.isfinite
                    if not np.isfinite(np.vdot(numbers, numbers)):
                        not_finite += np.count_nonzero(~np.isfinite(numbers))
                for part in parts:
                    _copy_common(numbers, rows, columns, part)
    except OSError as error:
        reason = f'{error.strerror or error} where {tensor.name} should be'
        raise BadInput('model.path', tensor.file, f'{reason}; fetch it again') from None
    if not_finite:
        raise BadInput(
            f'{not_finite} of {math.prod(tensor.shape)} numbers of {tensor.name} in {tensor.file}',
            NO_VALUE,
            'are NaN or infinite as float32; take the weights again from where they were published',
        )


def _rectangles(tensor, parts):
    """Yields ((first row, end), (first column, end)) of each block to read; together the blocks cover the parts."""
    width, size = two_axes(tensor.shape)[1], DTYPES[tensor.dtype].itemsize
    spans = _join_intervals((part.columns.start, part.columns.stop) for part in parts)
    if min(end - first for first, end in spans) * size < LEAST_READ:
        spans = [(0, width)]
    for columns in spans:
        within = [part for part in parts if columns[0] <= part.columns.start < columns[1]]
        step = max(BLOCK // ((columns[1] - columns[0]) * size), 1)
        for first, end in _join_intervals((part.rows.start, part.rows.stop) for part in within):
            for row in range(first, end, step):
                yield (row, min(row + step, end)), columns


def _join_intervals(intervals):
    """Returns the intervals (first, end) in rising order; intervals that overlap or touch are joined into one."""
    merged = []
    for first, end in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged


def _read_numbers(file, tensor, rows, columns) -> Float[np.ndarray, 'rows columns']:
    """A rectangle of a tensor as float32, not scaled; rows, columns: (first, end)."""
    dtype, width = DTYPES[tensor.dtype], two_axes(tensor.shape)[1]
    raw = np.empty((rows[1] - rows[0], (columns[1] - columns[0]) * dtype.itemsize), np.uint8)
    first = tensor.begin + (rows[0] * width + columns[0]) * dtype.itemsize
    if columns == (0, width):
        _read_bytes(file, raw.reshape(-1), first)
    else:
        for row, buffer in enumerate(raw):
            _read_bytes(file, buffer, first + row * width * dtype.itemsize)
    if tensor.dtype in FP8:
        return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)[raw]  # in a quarter of the time of astype
    with np.errstate(over='ignore', invalid='ignore'):
        return raw.view(dtype).astype(np.float32, copy=False)


def _read_bytes(file, buffer, place):
    """Reads an unbuffered file from byte `place` on until the buffer is full; raises OSError where the file ends."""
    file.seek(place)
    unfilled = memoryview(buffer)
    while unfilled:
        count = file.readinto(unfilled)
        if not count:
            raise OSError('ends too early')
        unfilled = unfilled[count:]


def _copy_common(numbers, rows, columns, part):
    """Copies what two rectangles of a tensor have in common, `numbers` at (rows, columns) and a Part, into the Part."""
    first, end = max(rows[0], part.rows.start), min(rows[1], part.rows.stop)
    left, right = max(columns[0], part.columns.start), min(columns[1], part.columns.stop)
    if first < end and left < right:
        target = part.out[
            first - part.rows.start : end - part.rows.start, left - part.columns.start : right - part.columns.start
        ]
        target[...] = numbers[first - rows[0] : end - rows[0], left - columns[0] : right - columns[0]]


def attach_scales(folder: str | os.PathLike[str], stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The folder's tensors by name, with the fp8 weights' scales in StoredTensor.scale and not under their own names.

    stored: list_tensors. Raises BadInput when config.json names another quantization than fp8, and where a scale is
    absent or does not fit.
    """
    path, settings = os.path.join(folder, 'config.json'), folders.read_settings(folder, 'config.json')
    key = next((key for key in KEYS if settings.get(key) is not None), KEYS[0])
    described = settings.get(key)
    described = described if isinstance(described, dict) else {}  # anything else has no effect
    method, form = described.get('quant_method'), described.get('format')
    supported = isinstance(method, str) and method in METHODS and METHODS[method] in (None, form)
    if described and not supported:
        kinds = ', '.join(f'{name} ({form})' if form else name for name, form in METHODS.items())
        value = f'{method} ({form})' if form else method
        raise BadInput(
            f'{key} in {path}', value, f'is not read, only {kinds} in fp8; take the weights that were not quantized'
        )
    block = described.get('weight_block_size')
    if block is not None:
        if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            raise BadInput(
                f'weight_block_size in {path}', block, f'must be two whole numbers above 0; {folders.REMEDY}'
            )
        block = block[0], block[1]
    weights = {name: tensor for name, tensor in stored.items() if tensor.dtype in FP8}
    attached = {name.removesuffix('.weight') + suffix for name in weights for suffix in UNREAD}
    for name, tensor in weights.items():
        scale = next((name + suffix for suffix in SCALES if name + suffix in stored), None)
        if scale is not None:
            weights[name] = tensor._replace(scale=stored[scale], block=_scaled_block(tensor, stored[scale], block))
            attached.add(scale)
        elif described:
            raise BadInput(name, tensor.dtype, f'lacks {name}{SCALES[0]}, its scale, in {folder}; {folders.REMEDY}')
    return {name: weights.get(name, tensor) for name, tensor in stored.items() if name not in attached}


def _scaled_block(tensor, scale, block):
    """(rows, columns) of a weight that share a number of its scale. Raises BadInput for a scale that fits no block.

    block: weight_block_size of config.json, or None.
    """
    rows, columns = two_axes(tensor.shape)
    floats = [dtype for dtype in DTYPES if dtype not in FP8]
    if scale.dtype not in floats:
        remedy = f'is no dtype of a scale, which has one of {", ".join(floats)}; {folders.REMEDY}'
        raise BadInput(scale.name, scale.dtype, remedy)
    blocks = {(rows,): (1, columns), (rows, 1): (1, columns)}
    if block:
        blocks.setdefault((-(-rows // block[0]), -(-columns // block[1])), block)
    if math.prod(scale.shape) == 1:
        return rows, columns
    if scale.shape not in blocks:
        shapes = ', '.join(map(str, [(1,), *blocks]))
        remedy = f'is no scale of weights of shape {tensor.shape}, which has one of {shapes}; {folders.REMEDY}'
        raise BadInput(scale.name, scale.shape, remedy)
    return blocks[scale.shape]


def load_parameter(
    tensors: Sequence[StoredTensor], axes: str, shape: tuple[int, ...], sharding: Any, first: int = 0
) -> jax.Array:
    """Reads a float32 parameter from the tensors that store it, and puts it onto its devices.

    tensors: one, or one for each layer. axes: as in names.NAMES. shape: the parameter's; with one axis more than axes
    says, its first axis is layers. sharding: may be a device. first: the row at which the parameter begins in a tensor
    that it shares with others. Raises BadInput as read_parts does.
    """
    stacked = len(shape) > len(axes.split('->')[0])
    places = processes.local_parts(sharding, shape)
    arrays = {place: _aligned_array(tuple(end - start for start, end in place)) for place in places}
    for layer, tensor in enumerate(tensors):
        parts = []
        for place, array in arrays.items():
            if not stacked:
                parts.append(_make_part(axes, shape, place, array))
            elif place[0][0] <= layer < place[0][1]:
                parts.append(_make_part(axes, shape[1:], place[1:], array[layer - place[0][0]]))
        parts = [part._replace(rows=slice(part.rows.start + first, part.rows.stop + first)) for part in parts]
        if parts:
            read_parts(tensor, parts)
    # a device that copies the arrays has done so before the next parameter is read: memory holds one parameter
    return jax.block_until_ready(processes.put_parts(arrays, sharding, shape))


def _aligned_array(shape):
    """An uninitialized float32 numpy array at an ALIGNED address."""
    size = math.prod(shape) * 4
    raw = np.empty(size + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    return raw[start : start + size].view(np.float32).reshape(shape)


def _make_part(axes, shape, place, array):
    """The Part of a stored tensor that is read into `array`, the part `place` of a parameter with `shape`.

    axes: as in names.NAMES. place: (start, end) for each axis. array has the place's shape.
    """
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
