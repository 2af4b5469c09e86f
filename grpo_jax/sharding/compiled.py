"""Executables: each is compiled once, for fixed shapes, and refuses arguments of other shapes by name."""

from collections.abc import Callable
import functools
import hashlib
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.hosts import json_file
from grpo_jax.sharding import specs
from grpo_jax.sharding.mesh import Devices
from grpo_jax.types import Param

# options of the learner's executables on CPUs, measured with jaxlib 0.10.2: YNN's sums over a row took a quarter of an
# update; oneDNN's products of a thousand tokens are up to 1.4 x as fast as Eigen's, but no compilation cache takes them
ON_CPU = {'xla_cpu_experimental_ynn_fusion_type': ''}
UNCACHED = {'xla_cpu_use_onednn': True, 'xla_cpu_experimental_onednn_fusion_type': 'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'}


class Executable:
    """A function for fixed shapes; `traced` traces it, `compile` or the first call compiles it."""

    def __init__(self, trace: Callable[[], Any] | None, function: Callable | None = None):
        self.hash = ''  # of the lowered text; it tells the executables of two runs apart
        self._trace: Any = trace
        self._function: Any = function

    def __call__(self, *arguments):
        return (self._function or self.compile()._function)(*arguments)

    @functools.cached_property
    def traced(self):
        """The jax.stages.Traced."""
        return self._trace()

    def compile(self) -> 'Executable':
        """Compiles the executable, and returns it."""
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
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
        return Executable(None, function)
    jitted = jax.jit(
        function,
        out_shardings=out_shardings,
        donate_argnums=() if donate is None else donate,
        compiler_options=options_on(devices.mesh),
    )
    executable = Executable(lambda: jitted.trace(*arguments))
    return executable.compile() if devices.compile_now else executable


def options_on(mesh: Mesh) -> dict[str, Any]:
    """Compiler options of the learner's executables on a mesh: on CPUs, those above that this XLA accepts."""
    if mesh.devices.flat[0].platform != 'cpu':
        return {}
    cached = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
    return {name: value for name, value in _accepted().items() if name in ON_CPU or not cached}


@functools.cache
def _accepted():
    """The options that this jaxlib accepts; it raises for others."""

    def accepts(**option):
        try:
            jax.jit(lambda x: x @ x, compiler_options=option).lower(jnp.ones((2, 2))).compile()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in (ON_CPU | UNCACHED).items() if accepts(**{name: value})}


def compile_traced(traced: Any) -> Executable:
    """Executable of a traced function."""
    return Executable(lambda: traced).compile()


def device_bytes(tree: Any) -> int:
    """Bytes that arrays, or abstract arrays with shardings, take in the memory of one device."""
    return _bytes(x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != specs.HOST)


def waiting_bytes(tree: Any) -> int:
    """Bytes of one device's arrays that are in the memory of its host."""
    return _bytes(x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == specs.HOST)


def _bytes(arrays):
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def hashed(text: str) -> str:
    """16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_hashes(workdir: str, **executables: Any):
    """Writes the executables' hashes to programs.json, which shows what two runs compute differently."""
    json_file.write(
        os.path.join(workdir, 'programs.json'), {name: executable.hash for name, executable in executables.items()}
    )


def abstract(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """ShapeDtypeStruct with a sharding."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def abstract_params(table: Any, mesh: Mesh) -> Any:
    """ShapeDtypeStruct, with its training sharding, of each parameter of a table."""
    return jax.tree.map(
        lambda param, sharding: abstract(param.shape, jnp.float32, sharding),
        table,
        specs.params(table, mesh),
        is_leaf=lambda node: isinstance(node, Param),
    )
