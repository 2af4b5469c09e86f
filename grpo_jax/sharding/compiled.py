"""Executables: each is compiled once for fixed shapes, and raises an error for arguments with other shapes."""

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

# Options for the learner's executables on CPUs, measured with jaxlib 0.10.2. YNN's sums over rows took a quarter of an
# update. oneDNN's products over a thousand tokens are up to 1.4 x as fast as Eigen's, but cannot be cached.
ON_CPU = {'xla_cpu_experimental_ynn_fusion_type': ''}
UNCACHED = {'xla_cpu_use_onednn': True, 'xla_cpu_experimental_onednn_fusion_type': 'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'}
# Options for all executables on GPUs. Without the first, scatters add in any order, and timings at compilation choose
# kernels. The second is off because with it jaxlib 0.11.2 scatters wrong numbers.
ON_GPU = {'xla_gpu_deterministic_ops': True, 'xla_gpu_enable_scatter_determinism_expander': False}
THREADS = 'compile'  # prefix of the names of compiling threads


class Executable:
    """A function for fixed shapes; `traced` traces it, and `compile` or the first call compiles it.

    The thread that asks first traces and lowers it, with that thread's jax settings. Another thread may compile it;
    callers wait until that is done. trace: returns the jax.stages.Traced. function: what is called, if no compilation
    is needed. name: for people. on_devices: whether a host array among the arguments is an error, since it would be a
    hidden transfer.
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
        """The jax.stages.Traced of the function, which is traced at the first access."""
        return self._trace()

    @property
    def hash(self) -> str:
        """Hash of the lowered text, equal for equal programs in any run; '' for a function that is not jitted."""
        self.lower()
        return self._hash

    def lower(self) -> None:
        """Traces and lowers the executable, if it is not lowered yet."""
        with self._lowering:
            if self._trace and not self._hash:
                self._lowered = self.traced.lower()
                self._hash = short_hash(self._lowered.as_text())

    def compile(self) -> 'Executable':
        """Compiles the executable, if it is not compiled yet, and returns it."""
        self.lower()
        with self._compiling:
            if self._function is None:
                self.compile_lowered(self._lowered)
                self._lowered = None
        return self

    def compile_lowered(self, lowered: Any) -> None:
        """Compiles a jax.stages.Lowered, and notes whether it came from the compilation cache."""
        _listen_for_cache_hits()
        _cache_hits.count = 0
        self._function = lowered.compile()
        self.cached = _cache_hits.count > 0

    @property
    def memory(self):
        """The compiler's memory_analysis() of the compiled program, in bytes on one device."""
        return self._function.memory_analysis()


_cache_hits = threading.local()  # count: cache hits in this thread's current compilation


@functools.cache
def _listen_for_cache_hits():
    """Makes jax's compilation cache count its hits in each thread's _cache_hits.count, from the first call on."""

    def count_hit(event, **_):
        if event == '/jax/compilation_cache/cache_hits':
            _cache_hits.count = getattr(_cache_hits, 'count', 0) + 1

    jax.monitoring.register_event_listener(count_hit)


def compile_all(executables: Sequence[Executable], name: str) -> None:
    """Compiles executables on all cores; name: what they are, for people."""
    with BackgroundCompiler() as compiler:
        compiler.add(executables)
        compiler.wait(name)


class BackgroundCompiler:
    """A context that compiles executables on background threads, in the order in which they were added.

    The end of the context does not wait for the compiler.
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
        """Queues executables, without starting them."""
        self._waiting += executables

    def start(self) -> None:
        """Traces all queued executables on this thread, and compiles them on background threads."""
        while self._waiting:
            self._start_next()

    def step(self, *_) -> None:
        """Starts one more executable if that leaves a core to the caller. Raises an error of a finished compilation."""
        running = [future for future in self._futures.values() if not future.done()]
        if self._waiting and len(running) < max((os.cpu_count() or 1) - 1, 1):
            self._start_next()
        for future in self._futures.values():
            if future.done():
                future.result()

    def _start_next(self):
        """Traces the next queued executable, and compiles it on a background thread."""
        executable = self._waiting.pop(0)
        executable.lower()
        self._futures[executable] = self._pool.submit(executable.compile)

    def wait(self, name: str) -> None:
        """Starts all queued executables, and returns when all are compiled; name: what they are, for people."""
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


def is_compiling() -> bool:
    """Whether a background thread is compiling, also one whose context has ended."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def make_executable(
    name: str, function: Callable, arguments: tuple, mesh: Mesh, out_shardings: Any, donate: int | None = None
) -> Executable:
    """The Executable for a function of the learner.

    name: what it is, for people. arguments: arrays or ShapeDtypeStructs with the shapes and shardings to compile for.
    donate: index of the argument whose memory the results may take. Under `jax.disable_jit()` the function is called
    as it is, so that a debugger can step through.
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
    """Compiler options, {name: value}, for the learner's executables on a mesh.

    On CPUs: the options in ON_CPU, and without a compilation cache also in UNCACHED, as far as this XLA accepts them.
    """
    device = mesh.devices.flat[0]
    if device.platform != 'cpu':
        return repeatable_on(device)
    cached = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
    return {name: value for name, value in _accepted_options().items() if name in ON_CPU or not cached}


def repeatable_on(device: Any) -> dict[str, Any]:
    """Compiler options that make results on a jax.Device equal from run to run."""
    return dict(ON_GPU) if device.platform == 'gpu' else {}


@functools.cache
def _accepted_options():
    """The CPU options, out of ON_CPU and UNCACHED, that this jaxlib accepts: jaxlib raises an error for the others."""

    def accepts(**option):
        try:
            jax.jit(lambda x: x @ x, compiler_options=option).lower(jnp.ones((2, 2))).compile()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in (ON_CPU | UNCACHED).items() if accepts(**{name: value})}


def device_bytes(tree: Any) -> int:
    """Bytes that arrays, or abstract arrays with shardings, take in one device's memory."""
    return _sum_bytes(x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != specs.HOST)


def host_bytes(tree: Any) -> int:
    """Bytes that a device's shards of arrays take in its host's memory (specs.HOST)."""
    return _sum_bytes(x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == specs.HOST)


def _sum_bytes(arrays):
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def short_hash(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def abstract(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """A ShapeDtypeStruct with a sharding."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Abstract arrays with the shapes and dtypes in `shapes` and the shardings in `shardings`, as a tree."""
    return jax.tree.map(lambda x, sharding: abstract(x.shape, x.dtype, sharding), shapes, shardings)


def abstract_params(table: Any, mesh: Mesh) -> Any:
    """A float32 ShapeDtypeStruct with its training sharding for each parameter in a table."""
    return jax.tree.map(
        lambda param, sharding: abstract(param.shape, jnp.float32, sharding),
        table,
        specs.params(table, mesh),
        is_leaf=lambda node: isinstance(node, Param),
    )
