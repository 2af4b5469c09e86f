"""Compiles programs for absent devices, on all cores, and keeps their sizes and texts in a cache folder."""

from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import time
from typing import Any, NamedTuple

import jax

from grpo_jax.hosts.files import atomic_write
from grpo_jax.run import console
from grpo_jax.text import during
from grpo_jax.tools.preflight import flops, hlo_collectives, products, topology
from grpo_jax.tools.preflight import plan as plans
from grpo_jax.tools.preflight.traffic import Traffic

PACKAGES = ('jax', 'jaxlib', 'libtpu')
FLAGS = ('LIBTPU_INIT_ARGS', 'XLA_FLAGS')  # environment variables that change the compiler's output


class Compiling(NamedTuple):
    """How `measure` compiles programs."""

    cache: str  # folder of programs that were compiled before
    progress: Callable[[str, dict, int, int], Any]  # called as print_progress after each program
    at_once: int  # programs that are compiled at a time


class Measured(NamedTuple):
    """The sizes and costs of a compiled program, for one device and one run of the program."""

    seconds: float  # that compiling took, beside other programs
    cached: bool
    arguments: int
    outputs: int  # without results that are written over an argument
    temporaries: int
    peak: int  # the most bytes in use at one time, by the compiler's own count; 0 when it gives none
    traffic: float  # bytes read from and written to main memory
    within: dict  # bytes sent to devices of the same slice, by kind of collective
    across: dict  # bytes sent to other slices
    flops: float  # of matrix products, counted before compiling
    multiplied: float  # the same, counted in the compiled text; 0 without a text
    unknown: int  # loops of unknown length, which count once
    refused: float  # bytes that the program needs when the compiler says that they do not fit; else 0

    @property
    def collective_bytes(self) -> tuple[int | float, int | float]:
        """(bytes sent within slices, bytes sent across slices)."""
        return sum(self.within.values()), sum(self.across.values())

    @property
    def in_use(self) -> int:
        """Bytes of the program's arguments, results and temporaries together."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def fragmentation(self) -> int:
        """Bytes of `in_use` that are not in use at the peak: gaps between temporaries, and dead buffers."""
        return max(self.in_use - self.peak, 0) if self.peak else 0

    @property
    def repeated_share(self) -> float:
        """multiplied / flops - 1: the share of matrix products that are computed again, or on all devices."""
        return self.multiplied / self.flops - 1 if self.flops and self.multiplied else 0.0


def measure(jobs: Sequence[plans.Job], plan: plans.PlannedRun, compiling: Compiling) -> list[Measured]:
    """Returns the Measured of each job: traces the jobs' programs, and compiles each different one on a thread."""
    devices, slices = plan.mesh.size, plan.slices
    margin = topology.margin() if plan.on_gpus else 0.0
    compiled, results = {}, []
    pool = concurrent.futures.ThreadPoolExecutor(compiling.at_once)
    with during(f'compiling for {plan.topology}', even=False) as shown, contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # Ctrl-C does not wait for the compiler
        for job in jobs:
            traced = job.trace()
            operations, unknown = flops.count(traced.jaxpr, job.trip_counts)
            lowered = traced.lower()
            key = cache_key(lowered.as_text(), plan.topology, slices)
            if key not in compiled:
                compiled[key] = pool.submit(read_or_compile, key, lowered, compiling.cache)
            results.append((job, compiled[key], operations / devices, unknown))
        shown.total = len(compiled)
        for done, future in enumerate(concurrent.futures.as_completed(compiled.values()), 1):
            shown.done = done
            job = next(job for job, other, *_ in results if other is future)
            compiling.progress(job.name, future.result()[0], done, len(compiled))
    every = []
    for job, future, operations, unknown in results:
        fields, text = future.result()
        fields = fields | {'temporaries': round(fields['temporaries'] * (1 + margin))}
        text = '' if plan.on_gpus else text  # read_movement can read the texts of TPUs alone
        moved = read_movement(text, devices, slices, job.text_trip_counts)
        every.append(Measured(**fields | moved | {'flops': operations, 'unknown': unknown + moved['unknown']}))
    return every


def cache_key(text: str, topology: str, slices: int) -> str:
    """Returns a program's name in the cache: a hash of everything that the compiled program depends on."""
    versions = [importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)]
    parts = [text, topology, slices, versions, jax.default_backend()]
    parts += [os.environ.get(name, '') for name in FLAGS]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def read_or_compile(key: str, lowered: jax.stages.Lowered, cache: str) -> tuple[dict[str, Any], str]:
    """Returns compile_and_measure's values from the folder `cache`; a program that it lacks is compiled and added."""
    path = os.path.join(cache, f'{key}.json.gz')
    if os.path.exists(path):
        with gzip.open(path, 'rt', encoding='utf8') as file:
            fields, text = json.load(file)
        return fields | {'cached': True}, text
    fields, text = compile_and_measure(lowered)
    os.makedirs(cache, exist_ok=True)
    with atomic_write(path, 'wb') as file:
        file.write(gzip.compress(json.dumps((fields, text)).encode()))
    return fields | {'cached': False}, text


def compile_and_measure(lowered: jax.stages.Lowered) -> tuple[dict[str, Any], str]:
    """Returns ({field of Measured: seconds or bytes}, compiled text or, for a program that does not fit, '')."""
    started = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error) or 'hbm' not in str(error).lower():
            raise
        sizes = dict.fromkeys(('arguments', 'outputs', 'temporaries', 'peak'), 0)
        return {'seconds': time.monotonic() - started, 'refused': needed_bytes(str(error)), **sizes}, ''
    memory: Any = compiled.memory_analysis()
    return {
        'seconds': time.monotonic() - started,
        'refused': 0,
        'arguments': memory.argument_size_in_bytes,
        'outputs': memory.output_size_in_bytes - memory.alias_size_in_bytes,
        'temporaries': memory.temp_size_in_bytes,
        'peak': getattr(memory, 'peak_memory_in_bytes', 0),
    }, compiled.as_text() or ''


def read_movement(text: str, devices: int, slices: int, trip_counts: Sequence[int]) -> dict[str, Any]:
    """Returns the fields of Measured that are read from a compiled text: traffic, sends, products. Zeros for no text.

    devices: how many, in all slices; trip_counts: of the loops whose text has no count.
    """
    if not text:
        return {'traffic': 0.0, 'within': {}, 'across': {}, 'unknown': 0, 'multiplied': 0.0}
    traffic, within, across = Traffic(text), {}, {}
    moved = traffic.count_program(trip_counts)
    for collective in hlo_collectives.list_collectives(text, devices, trip_counts):
        devices_per_slice = devices // slices  # neighbours in the mesh, whose first axis, data, spans the slices
        leaves = any(len({device // devices_per_slice for device in group}) > 1 for group in collective.groups)
        kind = across if leaves else within
        kind[collective.op] = kind.get(collective.op, 0.0) + collective.bytes
    return {
        'traffic': moved,
        'within': within,
        'across': across,
        'unknown': traffic.unknown,
        'multiplied': products.count(text, trip_counts),
    }


def needed_bytes(message: str) -> float:
    """Returns the bytes that a program needs, read from the compiler's refusal; infinity when it names no size."""
    size = re.search(r'(?:temporaries \(|Used )([\d.]+)([GMK])', message)
    return float(size[1]) * {'G': 2**30, 'M': 2**20, 'K': 2**10}[size[2]] if size else float('inf')


def print_progress(name: str, fields: dict[str, Any], done: int, total: int) -> None:
    """Prints a line about a compiled program: its name, and how long it took or that the cache had it."""
    how = 'from the cache' if fields['cached'] else f'in {console.duration(fields["seconds"])}'
    console.console.print(f'preflight: {done} of {total}: {name} {how}')
