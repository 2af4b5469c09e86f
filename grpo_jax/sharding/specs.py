"""Shardings of parameters, state and batches, all derived from the parameter table."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from grpo_jax.errors import BadInput
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import map_table

HOST = 'pinned_host'  # a memory kind: the part of the host's memory that its devices read directly


def params(table: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Training NamedSharding of each parameter of a table; BadInput when a mesh axis does not divide a dimension."""

    def leaf(path, param):
        for size, axis in zip(param.shape, param.axes, strict=True):
            if axis and size % mesh.shape[axis]:
                fits = [n for n in range(1, mesh.shape[axis]) if size % n == 0]
                raise BadInput(
                    f'mesh.{axis}',
                    mesh.shape[axis],
                    f'does not divide {path}, shape {param.shape}; the nearest size that does is {fits[-1]}',
                )
        return NamedSharding(mesh, PartitionSpec(*param.axes))

    return map_table(leaf, table)


def sampler_params(table: Any, mesh: Mesh) -> Any:
    """The training shardings without fsdp: decoding must not gather weights at every step."""

    def leaf(path, param):
        return NamedSharding(mesh, PartitionSpec(*(axis if axis == 'tensor' else None for axis in param.axes)))

    return map_table(leaf, table)


def unstacked(sharding: NamedSharding) -> NamedSharding:
    """The sharding of one layer's array, of that of all layers' arrays stacked."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def over_rows(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays whose first axis is rows or prompts: data, fsdp and context split it."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of small values, of which every device has a copy."""
    return NamedSharding(mesh, PartitionSpec())


def in_host(shardings: Any) -> Any:
    """The same shardings, in the memory of the hosts."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shardings)
