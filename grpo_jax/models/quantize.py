"""Weights in int8 for rollouts: half the bytes of bfloat16 a decode step, at a price in agreement."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.models import linear

# the axes that a product with the matrix sums over; every other element has its own scale
SUMMED = {
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
    """A matrix as values * scale."""

    values: jax.Array  # i8, of the matrix's shape
    scale: jax.Array  # f32, 1 along the summed axes


def matrices(params):
    """The parameters with every matrix as an Int8; norms and biases stay."""

    def leaf(path, array):
        axes = SUMMED.get(path[-1].key)
        if axes is None:
            return array
        array = array.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(array), axes, keepdims=True) / 127, 1e-30)
        return Int8(jnp.round(array / scale).astype(jnp.int8), scale)

    return jax.tree_util.tree_map_with_path(leaf, params)


def layout(shardings, table):
    """The shardings of `matrices(params)`, given those of params and the parameter table."""

    def leaf(path, sharding, param):
        axes = SUMMED.get(path[-1].key)
        if axes is None:
            return sharding
        spec = tuple(sharding.spec) + (None,) * (len(param.shape) - len(sharding.spec))
        kept = PartitionSpec(*(None if i in axes else axis for i, axis in enumerate(spec)))
        return Int8(sharding, NamedSharding(sharding.mesh, kept))

    return jax.tree_util.tree_map_with_path(leaf, shardings, table)


def product(spec, x, w, **options):
    """einsum(spec, x, w) where w may be an Int8; XLA fuses the conversion into the read of the int8 values."""
    if not isinstance(w, Int8):
        return jnp.einsum(spec, x, w, **options) if options else linear.einsum(spec, x, w)
    inputs, output = spec.replace('...', '').split('->')
    summed, matrix = set(inputs) - set(output), inputs.split(',')[1]
    scale = w.scale.reshape([n for n, axis in zip(w.scale.shape, matrix, strict=True) if axis not in summed])
    y = jnp.einsum(spec, x, w.values.astype(x.dtype), **options)
    return y * scale.astype(y.dtype)


def rows(table, index, dtype):
    """Rows of an embedding table that may be an Int8, in dtype."""
    if not isinstance(table, Int8):
        return table[index]
    return (table.values[index] * table.scale[index]).astype(dtype)
