"""How Pallas kernels for TPUs are called: on every device of a mesh, and interpreted on other platforms."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl


def call(kernel: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """Like pl.pallas_call: a function of the kernel's inputs. Off TPUs, it interprets the kernel."""
    compiled, interpreted = (pl.pallas_call(kernel, **options, interpret=i) for i in (False, True))
    return functools.partial(jax.lax.platform_dependent, tpu=compiled, default=interpreted)


def on_devices(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Wraps a function in shard_map, so that each device runs it on its shard; without a mesh, returns it unchanged.

    XLA's partitioner cannot split a kernel. The specs name mesh axes that an outer `shard_map` has left to it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    if not free:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False)
