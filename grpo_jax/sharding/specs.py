"""Shardings of parameters, which follow from the parameter table, and of other arrays."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from grpo_jax.errors import BadInput
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import map_table

HOST = 'pinned_host'  # jax's memory kind for host memory that devices read directly


def params(table: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The tree of training shardings for a parameter table. Raises BadInput where an axis does not divide a shape."""

    def leaf(path, param):
        for size, axis in zip(param.shape, param.axes, strict=True):
            if axis and size % mesh.shape[axis]:
                fits = [n for n in range(1, mesh.shape[axis]) if size % n == 0]
                remedy = f'does not divide {path}, shape {param.shape}; lower it to {fits[-1]}'
                raise BadInput(f'mesh.{axis}', mesh.shape[axis], remedy)
        return NamedSharding(mesh, PartitionSpec(*param.axes))

    return map_table(leaf, table)


def sampler_params(table: Any, mesh: Mesh) -> Any:
    """The sampler's shardings for a parameter table: cut along tensor alone, so that decoding gathers no weights."""

    def leaf(path, param):
        return NamedSharding(mesh, PartitionSpec(*(axis if axis == 'tensor' else None for axis in param.axes)))

    return map_table(leaf, table)


def layer_sharding(sharding: NamedSharding) -> NamedSharding:
    """One layer's sharding, from the sharding of the array that stacks all layers."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def over_rows(mesh: Mesh) -> NamedSharding:
    """Sharding for arrays whose first axis is rows or prompts, which ROW_AXES split."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding for small arrays: every device has a copy."""
    return NamedSharding(mesh, PartitionSpec())


def in_host(shardings: Any) -> Any:
    """The same shardings, but in host memory (HOST)."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shardings)
