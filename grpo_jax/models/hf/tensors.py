"""The safetensors files of a folder: what their headers say, and their numbers, straight onto the mesh.

Numbers are read where they lie: a process reads of each tensor what its own devices hold, and holds that once. Of
quantized weights those in fp8 are read, with their scales; every other quantization is refused.
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

from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, processes
from grpo_jax.models.hf import folder as folders

# numbers that are weights as they are stored, as safetensors spells their dtypes
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
LEAST_READ = 512  # bytes of a row; for fewer, the row is read whole: a disk has no smaller sectors
SCALES = ('_scale_inv', '_scale')  # ends of the names of what an fp8 weight is multiplied with
UNREAD = ('.input_scale', '.input_scale_ub', '.activation_scale')  # for products in fp8, which are not made here
# quant_method of config.json whose fp8 weights are read -> the format that it must have, where it has several
METHODS = {'fp8': None, 'fbgemm_fp8': None, 'compressed-tensors': 'float-quantized'}
KEYS = ('quantization_config', 'compression_config')  # of config.json
ALIGNED = 64  # bytes; from such an address on, jax on CPUs takes an array of numpy as it is, without a copy


class StoredTensor(NamedTuple):
    """What a header says of a tensor."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    begin: int = 0  # of its bytes in the file
    scale: 'StoredTensor | None' = None  # what its numbers are multiplied with
    block: tuple[int, int] = (0, 0)  # rows and columns that have one number of the scale


class Part(NamedTuple):
    """A rectangle of a tensor of two axes, and where its numbers go."""

    rows: slice
    columns: slice
    out: np.ndarray  # float32, of any strides


def list_tensors(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors, or of the files that its index names.

    BadInput when a file is absent or damaged, or lacks a tensor that the index puts there.
    """
    folders.check(folder)
    placed, stored = _read_index(folder), {}
    for path in sorted(set(placed.values())) or [os.path.join(folder, 'model.safetensors')]:
        stored |= {tensor.name: tensor for tensor in read_header(path) if placed.get(tensor.name, path) == path}
    for name, path in placed.items():
        if name not in stored:
            raise BadInput('model.path', path, f'lacks {name}, which the index puts there; fetch the folder again')
    return stored


def _read_index(folder):
    """Tensor name -> path, as the index says; {} where one file holds all."""
    path = os.path.join(folder, folders.INDEX)
    if not os.path.isfile(path):
        if not os.path.isfile(os.path.join(folder, 'model.safetensors')):
            hint = ''  # of what is there in their place
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
        raise BadInput('model.path', path, 'is no index of weights, without weight_map of files; fetch it again')
    paths = {shard: files.inside(folder, shard) for shard in set(shards.values())}
    absent = sorted(path for path in paths.values() if not os.path.isfile(path))
    if absent:
        count = f'{len(absent)} of the {len(paths)} safetensors files that the index names are absent'
        raise BadInput('model.path', absent[0], f'is not there: {count}; fetch the folder again')
    return {name: paths[shard] for name, shard in shards.items()}


def read_header(path: str) -> list[StoredTensor]:
    """The tensors of a file as its header describes them; BadInput for a file that is absent, cut short or no such."""
    try:
        with safe_open(path, 'np'):  # which checks that the header is sound, and the file as long as it says
            pass
        with open(path, 'rb') as file:
            length = int.from_bytes(file.read(8), 'little')
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput('model.path', path, f'not a safetensors file ({error}); fetch it again') from None
    return [
        StoredTensor(path, name, tuple(entry['shape']), entry['dtype'], 8 + length + entry['data_offsets'][0])
        for name, entry in header.items()
        if name != '__metadata__'
    ]


def check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """BadInput when a tensor has another shape, or its numbers are no weights, as integers."""
    if tensor.shape != shape:
        raise BadInput(tensor.name, tensor.shape, f'does not fit the shape {shape} that config.json gives')
    if tensor.dtype not in DTYPES:
        raise BadInput(
            tensor.name, tensor.dtype, f'is none of {", ".join(DTYPES)}; take the weights that were not quantized'
        )


def two_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor of that shape; one of less than two axes is a row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def read_tensor(tensor: StoredTensor) -> Float[np.ndarray, '...']:
    """All of a tensor's numbers as float32; BadInput as read_parts."""
    rows, columns = two_axes(tensor.shape)
    numbers = np.empty((rows, columns), np.float32)
    read_parts(tensor, [Part(slice(0, rows), slice(0, columns), numbers)])
    return numbers.reshape(tensor.shape)


def read_parts(tensor: StoredTensor, parts: Sequence[Part]) -> None:
    """Writes rectangles of a tensor, of which less than two axes are a row, into their arrays, as float32 and scaled.

    Only the bytes of the rectangles are read, BLOCK at a time, and where rectangles touch, once; rows of rectangles
    narrower than LEAST_READ bytes are read whole. BadInput where a number is not finite or too large for float32, and
    for a file that ends too early or cannot be read.
    """
    scale, wrong = None, 0
    if tensor.scale is not None:
        sizes = zip(two_axes(tensor.shape), tensor.block, strict=True)
        scale = read_tensor(tensor.scale).reshape([-(-size // block) for size, block in sizes])
    try:
        # not a mapping of the file, whose pages would count as this process's memory
        with open(tensor.file, 'rb', buffering=0) as file:
            for rows, columns in _rectangles(tensor, parts):
                numbers = _read_numbers(file, tensor, rows, columns)
                with np.errstate(over='ignore', invalid='ignore'):
                    if scale is not None:
                        numbers *= scale[np.arange(*rows) // tensor.block[0]][:, np.arange(*columns) // tensor.block[1]]
                    # the sum of squares is not finite where a number is not; it takes half the time of np.isfinite
                    if not np.isfinite(np.vdot(numbers, numbers)):
                        wrong += np.count_nonzero(~np.isfinite(numbers))
                for part in parts:
                    _copy_common(numbers, rows, columns, part)
    except OSError as error:
        reason = f'{error.strerror or error} where {tensor.name} should be'
        raise BadInput('model.path', tensor.file, f'{reason}; fetch it again') from None
    if wrong:
        raise BadInput(
            tensor.name,
            f'{wrong} of {math.prod(tensor.shape)} numbers in {tensor.file}',
            'are NaN or infinite as float32; take the weights again from where they were published',
        )


def _rectangles(tensor, parts):
    """(first row, end), (first column, end) of what is read at once, which together cover the parts."""
    width, size = two_axes(tensor.shape)[1], DTYPES[tensor.dtype].itemsize
    spans = _merge((part.columns.start, part.columns.stop) for part in parts)
    if min(end - first for first, end in spans) * size < LEAST_READ:
        spans = [(0, width)]
    for columns in spans:
        within = [part for part in parts if columns[0] <= part.columns.start < columns[1]]
        step = max(BLOCK // ((columns[1] - columns[0]) * size), 1)
        for first, end in _merge((part.rows.start, part.rows.stop) for part in within):
            for row in range(first, end, step):
                yield (row, min(row + step, end)), columns


def _merge(intervals):
    """The intervals (first, end) that these cover together, in order."""
    merged = []
    for first, end in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged


def _read_numbers(file, tensor, rows, columns) -> Float[np.ndarray, 'rows columns']:
    """A rectangle of a tensor as float32, as it is stored."""
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
    """Fills a buffer of bytes from a place in an unbuffered file."""
    file.seek(place)
    rest = memoryview(buffer)
    while rest:
        count = file.readinto(rest)
        if not count:
            raise OSError('ends too early')
        rest = rest[count:]


def _copy_common(numbers, rows, columns, part):
    """Copies what a rectangle and a part have in common into the part's array."""
    first, end = max(rows[0], part.rows.start), min(rows[1], part.rows.stop)
    left, right = max(columns[0], part.columns.start), min(columns[1], part.columns.stop)
    if first < end and left < right:
        target = part.out[
            first - part.rows.start : end - part.rows.start, left - part.columns.start : right - part.columns.start
        ]
        target[...] = numbers[first - rows[0] : end - rows[0], left - columns[0] : right - columns[0]]


def attach_scales(folder: str | os.PathLike[str], stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The folder's tensors; fp8 weights have their scales in them, which are then no tensors of their own.

    BadInput for another quantization in config.json than fp8, and where a scale is absent or does not fit.
    """
    path, settings = os.path.join(folder, 'config.json'), folders.read_settings(folder, 'config.json')
    key = next((key for key in KEYS if settings.get(key) is not None), KEYS[0])
    described = settings.get(key)
    described = described if isinstance(described, dict) else {}  # of anything else nothing depends
    method, form = described.get('quant_method'), described.get('format')
    known = isinstance(method, str) and method in METHODS and METHODS[method] in (None, form)
    if described and not known:
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
    used = {name.removesuffix('.weight') + end for name in weights for end in UNREAD}
    for name, tensor in weights.items():
        scale = next((name + end for end in SCALES if name + end in stored), None)
        if scale is not None:
            weights[name] = tensor._replace(scale=stored[scale], block=_scaled_block(tensor, stored[scale], block))
            used.add(scale)
        elif described:
            raise BadInput(name, tensor.dtype, f'lacks {name}{SCALES[0]}, its scale, in {folder}; {folders.REMEDY}')
    return {name: weights.get(name, tensor) for name, tensor in stored.items() if name not in used}


def _scaled_block(tensor, scale, block):
    """Rows and columns of a tensor that share a number of its scale; BadInput for a scale that does not fit."""
    rows, columns = two_axes(tensor.shape)
    if scale.dtype in DTYPES and scale.dtype not in FP8:
        if math.prod(scale.shape) == 1:
            return rows, columns
        if scale.shape in ((rows,), (rows, 1)):
            return 1, columns
        if block and scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
            return block
    raise BadInput(
        scale.name,
        (scale.dtype, *scale.shape),
        f'is no scale of {tensor.shape} in blocks of weight_block_size {block}; {folders.REMEDY}',
    )


def load_parameter(
    tensors: Sequence[StoredTensor], axes: str, shape: tuple[int, ...], sharding: Any, first: int = 0
) -> jax.Array:
    """The float32 parameter of that shape on its devices (sharding may be a device), from the tensors it is stored as.

    axes 'dnh->nh,d': [D, N, H] is stored as [N * H, D]. A shape of one axis more has the tensors as its layers. first:
    the row of a tensor at which the parameter begins, where others share the tensor.
    BadInput as read_parts.
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
            read_parts(tensor, parts)
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
