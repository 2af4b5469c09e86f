"""Executables: each is compiled once, for fixed shapes, and refuses arguments of other shapes by name."""

from collections.abc import Callable, Iterable, Sequence
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

from grpo_jax.sharding import specs
from grpo_jax.text import during
from grpo_jax.types import Param

# options of the learner's executables on CPUs, measured with jaxlib 0.10.2: YNN's sums over a row took a quarter of an
# update; oneDNN's products of a thousand tokens are up to 1.4 x as fast as Eigen's, but no compilation cache takes them
ON_CPU = {'xla_cpu_experimental_ynn_fusion_type': ''}
UNCACHED = {'xla_cpu_use_onednn': True, 'xla_cpu_experimental_onednn_fusion_type': 'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'}
# of all executables on GPUs: without the first, scatters add up in any order, and timings of the moment choose kernels;
# with the second, jaxlib 0.11.2 scatters other numbers than were asked for
ON_GPU = {'xla_gpu_deterministic_ops': True, 'xla_gpu_enable_scatter_determinism_expander': False}
THREADS = 'compile'  # how the names of those that compile begin


class Executable:
    """A function for fixed shapes; `traced` traces it, `compile` or the first call compiles it; name is for people.

    It is traced and lowered by the thread that asks first, whose settings of jax it has, and may be compiled by another
    one: who needs it meanwhile waits. on_devices: its arguments are on the devices, and a host array among them, which
    would be a hidden transfer, is an error.
    """

    def __init__(
        self, trace: Callable[[], Any] | None, function: Callable | None = None, name: str = 'a program', *,
        on_devices: bool = False,
    ):  # fmt: skip
        self.name, self.cached = name, False  # cached: whether it came from jax's compilation cache
        self._trace: Any = trace
        self._function: Any = function
        self._on_devices = on_devices
        self._hash, self._lowered = '', None
        self._lowering, self._compiling = threading.Lock(), threading.Lock()

    def __call__(self, *arguments):
        if not self._function:
            compile_all([self], self.name)
        if not self._on_devices:
            return self._function(*arguments)
        with jax.transfer_guard_host_to_device('disallow'):
            return self._function(*arguments)

    @functools.cached_property
    def traced(self):
        """The jax.stages.Traced."""
        return self._trace()

    @property
    def hash(self) -> str:
        """Of the lowered text; it tells the executables of two runs apart. '' for what is never compiled."""
        self.lower()
        return self._hash

    def lower(self) -> None:
        """Traces and lowers the executable, unless that is done."""
        with self._lowering:
            if self._trace and not self._hash:
                self._lowered = self.traced.lower()
                self._hash = hashed(self._lowered.as_text())

    def compile(self) -> 'Executable':
        """Compiles the executable, unless that is done, and returns it."""
        self.lower()
        with self._compiling:
            if self._function is None:
                self.compile_lowered(self._lowered)
                self._lowered = None
        return self

    def compile_lowered(self, lowered: Any) -> None:
        """Compiles the jax.stages.Lowered."""
        _listen_for_cache_hits()
        _cache_hits.count = 0
        self._function = lowered.compile()
        self.cached = _cache_hits.count > 0

    @property
    def memory(self):
        """The compiler's memory_analysis(), in bytes of one device."""
        return self._function.memory_analysis()


_cache_hits = threading.local()  # count: of the compilation that this thread is at


@functools.cache
def _listen_for_cache_hits():
    """From now on jax's compilation cache counts its hits in each thread."""

    def count_hit(event, **_):
        if event == '/jax/compilation_cache/cache_hits':
            _cache_hits.count = getattr(_cache_hits, 'count', 0) + 1

    jax.monitoring.register_event_listener(count_hit)


def compile_all(executables: Sequence[Executable], name: str) -> None:
    """Compiles executables on all cores; `name` tells people what they are."""
    with BackgroundCompiler() as compiler:
        compiler.add(executables)
        compiler.wait(name)


class BackgroundCompiler:
    """A context in which executables are compiled behind what the caller does, in the order in which they were added.

    Whatever ends the context does not wait for the compiler.
    """

    def __init__(self):
        self._waiting: list[Executable] = []
        self._futures: dict[Executable, concurrent.futures.Future] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count(), THREADS)  # threads come with the first task

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, executables: Iterable[Executable]) -> None:
        """Adds executables; nothing is done yet."""
        self._waiting += executables

    def start(self) -> None:
        """Traces here what was added so far, and compiles it on other threads."""
        while self._waiting:
            self._start_next()

    def step(self, *_) -> None:
        """Starts one more, if that leaves a core to the caller's steps; raises what has gone wrong meanwhile."""
        running = [future for future in self._futures.values() if not future.done()]
        if self._waiting and len(running) < max((os.cpu_count() or 1) - 1, 1):
            self._start_next()
        for future in self._futures.values():
            if future.done():
                future.result()

    def _start_next(self):
        executable = self._waiting.pop(0)
        executable.lower()
        self._futures[executable] = self._pool.submit(executable.compile)

    def wait(self, name: str) -> None:
        """Starts what waits, and returns when all is compiled; `name` tells people what."""
        executables = [*self._futures, *self._waiting]
        several = len(executables) > 1

        def count(_):
            compiling.done += 1

        with during(f'compiling {name}', len(executables) if several else 0, even=False) as compiling:
            self.start()
            for future in self._futures.values():
                future.add_done_callback(count)
            for future in self._futures.values():
                future.result()
            cached = sum(executable.cached for executable in executables)
            compiling.result = f'compiled {name}'
            compiling.note = f'{cached} from the cache' if several else 'from the cache' if cached else 'not cached'


def busy() -> bool:
    """Whether something is being compiled, also for a context that has ended."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def make_executable(
    name: str, function: Callable, arguments: tuple, mesh: Mesh, out_shardings: Any, donate: int | None = None
) -> Executable:
    """The Executable of a learner's function for arguments like these (arrays or ShapeDtypeStructs), on a mesh.

    name says what it is, to people. donate is the number of the argument whose memory the results may take. Under
    `jax.disable_jit()` the function is called as it is, to be stepped through.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
        return Executable(None, function)
    jitted = jax.jit(
        function,
        out_shardings=out_shardings,
        donate_argnums=() if donate is None else donate,
        compiler_options=options_on(mesh),
    )
    return Executable(lambda: jitted.trace(*arguments), name=name, on_devices=True)


def options_on(mesh: Mesh) -> dict[str, Any]:
    """Compiler options of the learner's executables on a mesh: on CPUs, those above that this XLA accepts."""
    device = mesh.devices.flat[0]
    if device.platform != 'cpu':
        return repeatable_on(device)
    cached = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
    return {name: value for name, value in _accepted().items() if name in ON_CPU or not cached}


def repeatable_on(device: Any) -> dict[str, Any]:
    """Compiler options of a program on a jax.Device, without which its results would vary from run to run."""
    return dict(ON_GPU) if device.platform == 'gpu' else {}


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
