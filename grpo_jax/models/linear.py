"""Products of activations with weight matrices, and lookups in embeddings; weights need not be plain arrays.

For rollouts, matrices and embeddings may be in int8: a decode step reads half the bytes of bfloat16, and the sampler
agrees less well with the learner. For the learner, a matrix may be frozen and have an adapter (models.lora); it may
then be in int8 for sampler and learner alike.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from grpo_jax.models import gather
from grpo_jax.types import Array, Pytree, pytree

PRODUCT = 'product with weights'
# the axes that a product with the matrix sums over, along which all elements of an Int8 share a scale
SUMMED_AXES = {
    'wq': (1,),
    'wk': (1,),
    'wv': (1,),
    'wo': (1, 2),
    'w_gate': (1,),
    'w_up': (1,),
    'w_down': (1,),
    'lm_head': (0,),
    'embed': (1,),
}


class Int8(NamedTuple):
    """An array as values * scale; in a tree of shardings, each field is a sharding."""

    values: Any  # i8, of the array's shape
    scale: Any  # f32, 1 along the axes that share a scale


@pytree
class Adapted(Pytree):
    """A frozen matrix W with an adapter: W + scale A B; in trees of Params or shardings, each field is one of these."""

    base: Any  # W: an array, or an Int8
    a: Any  # A: the axes of W that a product sums over, then the rank; None in the frozen tree of lora.split
    b: Any  # B: the rank, then the other axes of W; None as a
    scale: float = struct.field(pytree_node=False)


class GatherScatter(NamedTuple):
    """How devices gather an FsdpMatrix, and reduce-scatter its gradient."""

    gather: Callable[..., Any]  # part -> the whole matrix, where it is multiplied
    weight_gradient: Callable[..., Any]  # (spec, x, dy) -> the part's gradient, summed over all tokens


@pytree
class FsdpMatrix(Pytree):
    """An FSDP-sharded matrix: each device holds a part. Its gradient is reduce-scattered; no device holds all of it.

    matmul takes it only with x [B, T, ...] and without preferred_element_type.
    """

    part: Any
    ops: GatherScatter = struct.field(pytree_node=False)


def matmul(
    spec: str,
    x: Float[Array, '...'],
    w: Float[Array, '...'] | Int8 | Adapted | FsdpMatrix,
    preferred_element_type: Any = None,
) -> Float[Array, '...']:
    """jnp.einsum(spec, x, w) for a weight matrix w, like 'btd,df->btf'; for an Adapted w, x W + scale (x A) B.

    The axes of w that spec sums over are its first or its last ones. XLA fuses the conversion of int8 into the read of
    the values. Without preferred_element_type, CPUs compute the gradient of a plain w by _cpu_weight_gradient. The
    result is named PRODUCT for policies of jax.checkpoint, which cannot see into the product with an FsdpMatrix.
    """
    if isinstance(w, Int8):
        y = jnp.einsum(spec, x, w.values.astype(x.dtype), preferred_element_type=preferred_element_type)
        y = y * _row_of_scales(spec, w).astype(y.dtype)
    elif isinstance(w, Adapted):
        y = _adapted_product(spec, x, w, preferred_element_type)
    elif isinstance(w, FsdpMatrix):
        y = _fsdp_product(spec, w.ops, x, w.part)
    elif preferred_element_type is not None:
        y = jnp.einsum(spec, x, w, preferred_element_type=preferred_element_type)
    else:
        y = _product(spec, x, w)
    return checkpoint_name(y, PRODUCT)


def lookup(table: Float[Array, 'V D'] | Int8, index: Int[Array, '*B'], dtype: Any) -> Float[Array, '*B D']:
    """Rows of an embedding table by index, in the table's dtype; in `dtype` where the table is an Int8."""
    if not isinstance(table, Int8):
        return gather.take(table, index.reshape(-1)).reshape(*index.shape, -1)
    return (table.values[index] * table.scale[index]).astype(dtype)


def to_int8(x: Float[Array, '...'], axes: Sequence[int]) -> Int8:
    """x as an Int8: its values are round(x / scale), with one float32 scale for all elements along the axes."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axes, keepdims=True) / 127
    return Int8(jnp.round(x / jnp.maximum(scale, 1e-30)).astype(jnp.int8), scale)


def to_float(w: Float[Array, '...'] | Int8) -> Float[Array, '...']:
    """A matrix as a float32 array; an Int8 becomes values * scale."""
    if isinstance(w, Int8):
        return w.values.astype(jnp.float32) * w.scale
    return jnp.asarray(w, jnp.float32)


def in_dtype(params: Any, dtype: Any) -> Any:
    """The parameters cast to a dtype of computation; Int8 matrices stay as they are."""

    def cast(w):
        return w if isinstance(w, Int8) else w.astype(dtype)

    return jax.tree.map(cast, params, is_leaf=lambda w: isinstance(w, Int8))


def matrices_to_int8(params: Any) -> Any:
    """The parameters with every matrix as an Int8; norms and biases stay."""

    def leaf(path, array):
        axes = SUMMED_AXES.get(path[-1].key)
        return array if axes is None else to_int8(array, axes)

    return jax.tree_util.tree_map_with_path(leaf, params)


def int8_shardings(shardings: Any, table: Any) -> Any:
    """The shardings of matrices_to_int8(params), given the shardings of params and the parameter table."""

    def leaf(path, sharding, param):
        axes = SUMMED_AXES.get(path[-1].key)
        return sharding if axes is None else int8_sharding(sharding, len(param.shape), axes)

    return jax.tree_util.tree_map_with_path(leaf, shardings, table)


def int8_sharding(sharding: NamedSharding, dimensions: int, axes: Sequence[int]) -> Int8:
    """The shardings of to_int8(x, axes), given x's sharding and its number of dimensions."""
    spec = tuple(sharding.spec) + (None,) * (dimensions - len(sharding.spec))
    scale_spec = PartitionSpec(*(None if i in axes else axis for i, axis in enumerate(spec)))
    return Int8(sharding, NamedSharding(sharding.mesh, scale_spec))


def _adapted_product(spec, x, w, preferred_element_type):
    """x W + scale (x A) B for an Adapted w. W goes through a plain einsum: _product would compute a gradient of W."""
    x_axes, w_axes, output = axes_of(spec)
    summed, free = (''.join(axis for axis in w_axes if (axis in output) == kept) for kept in (False, True))
    xa_axes = ''.join(axis for axis in x_axes if axis not in summed) + 'r'
    xa = matmul(f'{x_axes},{summed}r->{xa_axes}', x, w.a) * w.scale
    change = matmul(f'{xa_axes},r{free}->{output}', xa, w.b, preferred_element_type)
    if isinstance(w.base, Int8):
        return jnp.add(_frozen_product(spec, x, w.base), change).astype(change.dtype)
    return jnp.einsum(spec, x, w.base, preferred_element_type=preferred_element_type) + change


# the backward pass gets the int8 values; without this rule it would get each layer's matrix as floats
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _frozen_product(spec, x, w):
    """jnp.einsum(spec, x, w) in float32 for an Int8 w, which has no gradient."""
    return jnp.einsum(spec, x, w.values.astype(x.dtype), preferred_element_type=jnp.float32) * _row_of_scales(spec, w)


def _frozen_forward(spec, x, w):
    return _frozen_product(spec, x, w), (w, jnp.zeros((), x.dtype))


def _frozen_backward(spec, saved, dy):
    """(gradient of x, None for the frozen matrix)."""
    w, zero = saved
    dy = (dy * _row_of_scales(spec, w)).astype(zero.dtype)
    return _input_gradient(spec, w.values.astype(zero.dtype), dy), None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


def _row_of_scales(spec, w):
    """The scales of an Int8 without the axes that the product sums over, so that they multiply the product."""
    inputs, output = spec.replace('...', '').split('->')
    matrix = inputs.split(',')[1]
    return w.scale.reshape([n for n, axis in zip(w.scale.shape, matrix, strict=True) if axis in output])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec, x, w):
    """jnp.einsum(spec, x, w), whose gradient of w is `weight_gradient`."""
    return jnp.einsum(spec, x, w)


def _product_forward(spec, x, w):
    return jnp.einsum(spec, x, w), (x, w)


def _product_backward(spec, saved, dy):
    x, w = saved
    return _input_gradient(spec, w, dy), weight_gradient(spec, x, dy)


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fsdp_product(spec, ops, x, part):
    """jnp.einsum(spec, x, w) with the matrix w that devices gather from their parts."""
    return jnp.einsum(spec, x, ops.gather(part))


def _fsdp_forward(spec, ops, x, part):
    return _fsdp_product(spec, ops, x, part), (x, part)


def _fsdp_backward(spec, ops, saved, dy):
    """The gradients of x and of this device's part; the matrix is gathered again."""
    x, part = saved
    return _input_gradient(spec, ops.gather(part), dy), ops.weight_gradient(spec, x, dy)


_fsdp_product.defvjp(_fsdp_forward, _fsdp_backward)


def axes_of(spec: str) -> tuple[str, str, str]:
    """The axis letters of x, w and y in an einsum spec like 'btd,df->btf'."""
    inputs, y_axes = spec.split('->')
    x_axes, w_axes = inputs.split(',')
    return x_axes, w_axes, y_axes


def _input_gradient(spec, w, dy):
    """The gradient of x in jnp.einsum(spec, x, w)."""
    x_axes, w_axes, y_axes = axes_of(spec)
    return jnp.einsum(f'{y_axes},{w_axes}->{x_axes}', dy, w)


def weight_gradient(spec: str, x: Float[Array, '...'], dy: Float[Array, '...']) -> Float[Array, '...']:
    """The gradient of w in jnp.einsum(spec, x, w), in the dtype of x and dy."""
    x_axes, w_axes, y_axes = axes_of(spec)
    return jax.lax.platform_dependent(
        x,
        dy,
        cpu=functools.partial(_cpu_weight_gradient, x_axes, w_axes, y_axes),
        default=functools.partial(jnp.einsum, f'{x_axes},{y_axes}->{w_axes}'),
    )


# An example: the gradient of 'btnh,nhd->btd' is the einsum 'btnh,btd->nhd' of x and dy, which sums over the tokens bt.
# The axes of w are nh, which the forward product sums, and d, which is free. oneDNN copies the second factor of a
# product into blocks, and XLA transposes the first one so that its summed axes come last; by itself XLA transposes
# both. If dy is the narrower one, which has fewer numbers than x, the three steps here are
#   'btd->dbt'       only the narrower factor is transposed
#   'dbt,btnh->dnh'  the product reads the wider factor as it is
#   'dnh->nhd'       the axes come in the order of w
# The barriers keep XLA from joining the steps again.
def _cpu_weight_gradient(x_axes, w_axes, y_axes, x, dy):
    """The gradient of w on CPUs: only the narrower of x and dy is transposed."""
    summed, free = (''.join(axis for axis in w_axes if axis in axes) for axes in (x_axes, y_axes))
    tokens = ''.join(axis for axis in x_axes if axis not in w_axes)
    factors = (x_axes, x, summed), (y_axes, dy, free)
    (narrow_axes, narrow, rows), (wide_axes, wide, columns) = sorted(factors, key=lambda factor: factor[1].size)
    transposed = jax.lax.optimization_barrier(jnp.einsum(f'{narrow_axes}->{rows}{tokens}', narrow))
    product = jnp.einsum(f'{rows}{tokens},{wide_axes}->{rows}{columns}', transposed, wide)
    return jnp.einsum(f'{rows}{columns}->{w_axes}', jax.lax.optimization_barrier(product))
