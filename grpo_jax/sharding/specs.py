"""Shardings of parameters, state and batches, all derived from the parameter table."""

import jax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.errors import BadInput
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import map_table

HOST = 'pinned_host'  # a memory kind: the part of a host's memory that its devices read by themselves


def params(table, mesh):
    """NamedSharding of each parameter of a table for training; BadInput when an axis does not divide a dimension."""

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


def sampler_params(table, mesh):
    """The training layout with fsdp dropped: decoding must not gather weights at every step."""

    def leaf(path, param):
        return NamedSharding(mesh, PartitionSpec(*(a if a == 'tensor' else None for a in param.axes)))

    return map_table(leaf, table)


def rows(mesh):
    """Sharding of arrays whose first axis is rows (or prompts): split over data, fsdp and context."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh):
    """Sharding of small values that every device holds."""
    return NamedSharding(mesh, PartitionSpec())


def in_host(shardings):
    """The same shardings in the hosts' memory."""
    return jax.tree.map(lambda one: one.with_memory_kind(HOST), shardings)
