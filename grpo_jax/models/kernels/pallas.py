"""How Pallas kernels for TPUs are called: on every device of a mesh, and interpreted on other platforms."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl


def call(kernel: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """Returns a function of the kernel's inputs, as pl.pallas_call does; off TPUs it interprets the kernel."""
    compiled, interpreted = (pl.pallas_call(kernel, **options, interpret=i) for i in (False, True))
    return functools.partial(jax.lax.platform_dependent, tpu=compiled, default=interpreted)


def shard_map_free_axes(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Wraps a function in shard_map over the mesh axes that are not manual yet, so each device runs it on its shard.

    Returns the function unchanged if no such axis is left: without a mesh, or inside a shard_map over all axes. A
    Pallas kernel needs this, since XLA's partitioner cannot split it. The specs name only axes that are not manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free_axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if not free_axes:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=free_axes, check_vma=False)
