"""Digests of arrays, which tell whether values that were read back are those that were written.

A digest is a function of values and positions alone, whatever the mesh, since it is a sum of integers over elements. A
change of one element always changes it; other changes go unseen with a chance of 2^-64.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt

from grpo_jax.hosts import processes
from grpo_jax.sharding import compiled

BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes of an element
ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # what the axes' positions are multiplied by, in turn


class Digest(NamedTuple):
    """What is known of an array's content."""

    kind: str  # dtype and shape, like float32[4,8]
    sums: str  # two 32-bit sums in hexadecimal
    finite: bool


def digests(tree: Any) -> dict[str, Digest]:
    """The Digest of each array of a tree by the array's name, like params/layers/wq; all processes must call it."""
    leaves = leaves_by_name(tree)
    # one by one: many sums over several devices at once wait for one another for ever where threads are few
    sums = [processes.fetch(_program(leaf)(leaf)) for leaf in leaves.values()]
    return {
        name: Digest(kind_of(leaf), f'{low:08x}{high:08x}', not bad)
        for (name, leaf), (low, high, bad) in zip(leaves.items(), sums, strict=True)
    }


def combined(tree: Any) -> str:
    """One digest of a tree's arrays, their names, dtypes and shapes; all processes must call it."""
    return compiled.hashed(repr(sorted((name, one.kind, one.sums) for name, one in digests(tree).items())))


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their names, like params/layers/wq."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def kind_of(array: Any) -> str:
    """An array's dtype and shape, like float32[4,8]."""
    return f'{array.dtype}[{",".join(map(str, array.shape))}]'


def _program(leaf):
    """The compiled sums of an array that lies as `leaf` does; their result lies whole on every device."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _compiled(jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))
    return _compiled(None)


@functools.cache
def _compiled(sharding):
    return jax.jit(sums, out_shardings=sharding)


def sums(array: Array) -> UInt[Array, ' 3']:
    """Two sums over the elements of an array, modulo 2^32, and the number of elements that are not finite."""
    array = jax.device_put(array, jax.memory.Space.Device)  # it may wait in the hosts' memory
    finite = jnp.isfinite(array) if jnp.issubdtype(array.dtype, jnp.floating) else jnp.bool(True)
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    bits = jax.lax.bitcast_convert_type(array, BITS[array.dtype.itemsize]).astype(jnp.uint32)
    where = jnp.uint32(0)
    for axis in range(array.ndim):
        odd = jnp.uint32(ODD[axis % len(ODD)] + 2 * (axis // len(ODD)))
        where = where + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * odd
    where = _mix(where)
    mixed = _mix(bits + where)
    return jnp.stack([jnp.sum(part, dtype=jnp.uint32) for part in (mixed, mixed * (where | 1), ~finite)])


def _mix(x):
    """A permutation of the 32-bit numbers that spreads each bit over all (Wellons, hash-prospector: lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
