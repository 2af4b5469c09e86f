"""Compiled programs: each is compiled once, for fixed shapes, and refuses others by name."""

from collections.abc import Callable
import functools
import hashlib
import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.hosts import json_file
from grpo_jax.sharding import specs
from grpo_jax.sharding.mesh import Devices
from grpo_jax.types import Param

# of a learner's programs on CPUs, jaxlib 0.10.2: YNN's sums over a row took a quarter of an update, and oneDNN's
# products of a thousand tokens are up to 1.4 x as fast as Eigen's; but a compilation cache cannot hold oneDNN's
ON_CPU = {'xla_cpu_experimental_ynn_fusion_type': ''}
UNCACHED = {'xla_cpu_use_onednn': True, 'xla_cpu_experimental_onednn_fusion_type': 'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'}


class Executable:
    """A function for fixed shapes, traced when that is asked for, compiled by `compile` or when it is first called."""

    def __init__(self, trace: Callable | None, function: Callable | None = None):
        self.hash = ''  # of the lowered text, which tells two runs' programs apart
        self._trace, self._function = trace, function

    def __call__(self, *arguments):
        return (self._function or self.compile()._function)(*arguments)

    @functools.cached_property
    def traced(self):
        """The jax.stages.Traced."""
        return self._trace()

    def compile(self):
        """Itself, compiled."""
        lowered = self.traced.lower()
        self.hash, self._function = hashed(lowered.as_text()), lowered.compile()
        return self

    @property
    def memory(self):
        """The compiler's memory_analysis(), in bytes of one device."""
        return self._function.memory_analysis()


def make_executable(
    function: Callable, arguments: tuple, devices: Devices, out_shardings: Any, donate: int | None = None
) -> Executable:
    """The Executable of a learner's function for arguments like these (arrays or ShapeDtypeStructs).

    donate is the number of the argument whose memory the results may take. Under `jax.disable_jit()` the function is
    called as it is, to be stepped through.
    """
    if jax.config.jax_disable_jit:
        return Executable(None, function)
    jitted = jax.jit(
        function,
        out_shardings=out_shardings,
        donate_argnums=() if donate is None else donate,
        compiler_options=options_on(devices.mesh),
    )
    executable = Executable(lambda: jitted.trace(*arguments))
    return executable.compile() if devices.compile_now else executable


def options_on(mesh):
    """Compiler options of a learner's programs on a mesh: on CPUs, those above that XLA knows."""
    if mesh.devices.flat[0].platform != 'cpu':
        return {}
    known = _known()
    return {name: known[name] for name in known if name in ON_CPU or not jax.config.jax_compilation_cache_dir}


@functools.cache
def _known():
    """The options that this jaxlib takes; it refuses others."""

    def takes(**option):
        try:
            jax.jit(lambda x: x @ x, compiler_options=option).lower(jnp.ones((2, 2))).compile()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in (ON_CPU | UNCACHED).items() if takes(**{name: value})}


def compile_traced(traced):
    """Program of a traced function."""
    return Executable(lambda: traced).compile()


def device_bytes(tree):
    """Bytes in the memory of one device of arrays, or abstract ones, with shardings."""
    return _bytes(x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != specs.HOST)


def waiting_bytes(tree):
    """Bytes of one device that lie in its host's memory."""
    return _bytes(x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == specs.HOST)


def _bytes(arrays):
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def hashed(text):
    """16 hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_hashes(workdir, **programs):
    """Writes the programs' hashes to programs.json: what two runs computed differently shows there."""
    json_file.write(os.path.join(workdir, 'programs.json'), {n: p.hash for n, p in programs.items()})


def abstract(shape, dtype, sharding_):
    """ShapeDtypeStruct with a sharding."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_)


def abstract_params(table, mesh):
    """ShapeDtypeStruct of each parameter of a table with its training sharding."""
    return jax.tree.map(
        lambda param, s: abstract(param.shape, jnp.float32, s),
        table,
        specs.params(table, mesh),
        is_leaf=lambda node: isinstance(node, Param),
    )
