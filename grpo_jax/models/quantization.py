"""Published fp8 weights: which scales belong to which weights; every other quantization is refused."""

from collections.abc import Mapping
import math
import os

from grpo_jax.errors import BadInput
from grpo_jax.models import folders
from grpo_jax.models.tensor_files import DTYPES, FP8, StoredTensor, two_axes

SCALES = ('_scale_inv', '_scale')  # ends of the names of what an fp8 weight is multiplied with
UNREAD = ('.input_scale', '.input_scale_ub', '.activation_scale')  # for products in fp8, which are not made here
# quant_method of config.json whose fp8 weights are read -> the format that it must have, where it has several
METHODS = {'fp8': None, 'fbgemm_fp8': None, 'compressed-tensors': 'float-quantized'}
KEYS = ('quantization_config', 'compression_config')  # of config.json


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
