"""Executables: each is compiled once, for fixed shapes, and refuses arguments of other shapes by name."""

from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import hashlib
import math
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax import activity
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
        self.cached = False  # whether it came from jax's compilation cache
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
        self.finish(self.traced.lower())
        return self

    def finish(self, lowered: jax.stages.Lowered) -> None:
        """Compiles what `traced.lower()` has given."""
        _cache_hits.count = 0
        self.hash, self._function = hashed(lowered.as_text()), lowered.compile()
        self.cached = _cache_hits.count > 0

    @property
    def memory(self):
        """The compiler's memory_analysis(), in bytes of one device."""
        return self._function.memory_analysis()


_cache_hits = threading.local()  # count: of the compilation that this thread is at


def _count_hit(event, **_):
    if event == '/jax/compilation_cache/cache_hits':
        _cache_hits.count = getattr(_cache_hits, 'count', 0) + 1


jax.monitoring.register_event_listener(_count_hit)


def compile_all(executables: Sequence[Executable], name: str) -> None:
    """Compiles executables on all cores; `name` says what they are in the activity that this is."""
    several = len(executables) > 1

    def count(_):
        compiling.done += 1

    with activity.during(f'compiling {name}', len(executables) if several else 0, even=False) as compiling:
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count(), 'compile')
        try:
            futures = []
            for executable in executables:
                futures.append(pool.submit(executable.finish, executable.traced.lower()))
                futures[-1].add_done_callback(count)
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # what interrupts this does not wait for the compiler
        cached = sum(executable.cached for executable in executables)
        compiling.result = f'compiled {name}'
        compiling.note = f'{cached} from the cache' if several else 'from the cache' if cached else 'not cached'


def make_executable(
    name: str, function: Callable, arguments: tuple, devices: Devices, out_shardings: Any, donate: int | None = None
) -> Executable:
    """The Executable of a learner's function for arguments like these (arrays or ShapeDtypeStructs).

    name says what it is, to people. donate is the number of the argument whose memory the results may take. Under
    `jax.disable_jit()` the function is called as it is, to be stepped through.
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
    if devices.compile_now:
        compile_all([executable], name)
    return executable


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
