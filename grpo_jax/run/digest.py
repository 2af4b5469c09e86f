"""Digests of arrays, which tell whether values that are read back equal the values that were written.

A digest is a sum of integers over elements, which depends on values and positions, not on the mesh. A change of one
element always changes the digest; another change is missed with probability 2^-64.
"""

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt
import numpy as np

from grpo_jax.hosts import processes
from grpo_jax.sharding import compiled

BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # {bytes of an element: dtype of its bits}
ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # odd factors of the positions along the axes, in turn


class Digest(NamedTuple):
    """A digest of an array, with its dtype and shape."""

    kind: str  # dtype and shape, like float32[4,8]
    sums: str  # two 32-bit sums in hexadecimal
    finite: bool  # whether all elements are


def digests(tree: Any) -> dict[str, Digest]:
    """{name: Digest} of the arrays in a tree; names are like params/layers/wq. All processes must call it."""
    leaves = leaves_by_name(tree)
    # one by one: with few threads, many sums over several devices at once deadlock
    return {name: _digest(leaf) for name, leaf in leaves.items()}


def _digest(leaf):
    """The Digest of an array; u8 arrays, whose size changes from step to step, are hashed on the host."""
    if leaf.dtype == np.uint8:
        return Digest(kind_of(leaf), hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16], True)
    low, high, bad = processes.fetch(_program(leaf)(leaf))
    return Digest(kind_of(leaf), f'{low:08x}{high:08x}', not bad)


def hash_tree(tree: Any) -> str:
    """One hash over names, dtypes, shapes and values of a tree's arrays; all processes must call it."""
    return compiled.short_hash(repr(sorted((name, one.kind, one.sums) for name, one in digests(tree).items())))


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """{name: leaf} of a tree; names are like params/layers/wq."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def kind_of(array: Any) -> str:
    """An array's dtype and shape, like float32[4,8]."""
    return f'{array.dtype}[{",".join(map(str, array.shape))}]'


def _program(leaf):
    """The jitted function `sums` for arrays on the leaf's mesh; its result is replicated on all the mesh's devices."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _compile_sums(jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))
    return _compile_sums(None)


@functools.cache
def _compile_sums(sharding):
    """`sums`, jitted, with its result in this sharding; one for each sharding."""
    return jax.jit(sums, out_shardings=sharding)


def sums(array: Array) -> UInt[Array, ' 3']:
    """[sum, other sum, number of elements that are not finite]; sums of hashes of the elements and places, mod 2^32."""
    array = jax.device_put(array, jax.memory.Space.Device)  # an offloaded array lies in the hosts' memory
    finite = jnp.isfinite(array) if jnp.issubdtype(array.dtype, jnp.floating) else jnp.bool(True)
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    bits = jax.lax.bitcast_convert_type(array, BITS[array.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.uint32(0)
    for axis in range(array.ndim):
        odd = jnp.uint32(ODD[axis % len(ODD)] + 2 * (axis // len(ODD)))
        position = position + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * odd
    position = _mix(position)
    mixed = _mix(bits + position)
    return jnp.stack([jnp.sum(part, dtype=jnp.uint32) for part in (mixed, mixed * (position | 1), ~finite)])


def _mix(x):
    """Permutes 32-bit numbers so that each input bit changes all output bits (Wellons, hash-prospector: lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
