"""Compiles programs for absent devices, on all cores, and keeps what was read off them in a cache folder."""

from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import time
from typing import Any, NamedTuple

import jax

from grpo_jax.hosts.files import atomic_write
from grpo_jax.run import console
from grpo_jax.text import during
from grpo_jax.tools.preflight import flops, hlo_collectives, products
from grpo_jax.tools.preflight import plan as plans
from grpo_jax.tools.preflight.traffic import Traffic

FLAGS = ('LIBTPU_INIT_ARGS', 'XLA_FLAGS')  # environment that changes what the compiler does


class Compiling(NamedTuple):
    """How programs are compiled."""

    cache: str  # folder of what was compiled before
    progress: Callable[[str, dict, int, int], Any]  # called as (name, fields of Measured, done, all) after each one
    at_once: int  # programs that are compiled at a time


class Measured(NamedTuple):
    """What is known of a compiled program; bytes and operations are those of one device in one run of it."""

    seconds: float  # of compiling, beside others
    cached: bool
    arguments: int
    outputs: int  # that do not take an argument's place
    temporaries: int
    peak: int  # the compiler's own figure: of all of these, the most at one time; 0 where it gives none
    traffic: float  # read from and written to main memory
    within: dict  # bytes sent to devices of the same slice, by kind of collective
    across: dict  # bytes sent to other slices
    flops: float  # of matrix products, as the program says before it is compiled
    multiplied: float  # the same, as the compiled text has them; 0 where there is no text
    unknown: int  # loops that were counted once
    refused: float  # bytes that the program would need, where the compiler says that they do not fit; else 0

    @property
    def collective_bytes(self) -> tuple[int | float, int | float]:
        """Bytes sent, within slices and across."""
        return sum(self.within.values()), sum(self.across.values())

    @property
    def in_use(self) -> int:
        """Bytes that the program's arguments, results and temporaries take up."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def fragmentation(self) -> int:
        """Bytes of these that are not in use at the peak: gaps between temporaries, and what is dead by then."""
        return max(self.in_use - self.peak, 0) if self.peak else 0

    @property
    def repeated(self) -> float:
        """How much more is multiplied than the program says, as a share of that: by all devices, or a second time."""
        return self.multiplied / self.flops - 1 if self.flops and self.multiplied else 0.0


def measure(jobs: Sequence[plans.Job], plan: plans.PlannedRun, compiling: Compiling) -> list[Measured]:
    """Traces and compiles the programs of a plan, and reads off them what can be known.

    Programs are traced one after another, and each is compiled as soon as it is traced; equal ones once.
    """
    devices, slices = plan.mesh.size, plan.slices
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
        moved = read_movement(text, devices, slices, job.text_trip_counts)
        every.append(Measured(**fields | moved | {'flops': operations, 'unknown': unknown + moved['unknown']}))
    return every


def cache_key(text: str, topology: str, slices: int) -> str:
    """The name of a program in the cache: the hash of everything that the compiled program depends on."""
    versions = [importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'libtpu')]
    parts = [text, topology, slices, versions, [os.environ.get(name, '') for name in FLAGS]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def read_or_compile(key: str, lowered: jax.stages.Lowered, cache: str) -> tuple[dict[str, Any], str]:
    """(bytes and seconds, fields of Measured; compiled text) from the cache, or from compiling, into it."""
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
    """(bytes and seconds, compiled text); the text is '' of a program that the compiler refuses."""
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
    """Fields of Measured that are read off the compiled text."""
    if not text:
        return {'traffic': 0.0, 'within': {}, 'across': {}, 'unknown': 0, 'multiplied': 0.0}
    traffic, within, across = Traffic(text), {}, {}
    moved = traffic.count_program(trip_counts)
    for collective in hlo_collectives.list_collectives(text, devices, trip_counts):
        devices_per_slice = devices // slices  # data, the first axis of the mesh, goes over the slices
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
    """Bytes that a program needs, from the compiler's refusal; infinity when the message has no size."""
    size = re.search(r'(?:temporaries \(|Used )([\d.]+)([GMK])', message)
    return float(size[1]) * {'G': 2**30, 'M': 2**20, 'K': 2**10}[size[2]] if size else float('inf')


def print_progress(name: str, fields: dict[str, Any], done: int, every: int) -> None:
    """Prints a line about a program that has been compiled, or was before."""
    how = 'from the cache' if fields['cached'] else f'in {console.duration(fields["seconds"])}'
    console.console.print(f'preflight: {done} of {every}: {name} {how}')
