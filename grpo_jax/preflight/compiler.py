"""Compiles programs for absent devices, on all cores, and keeps what was read off them in a cache folder."""
import concurrent.futures
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import sys
import time
from typing import NamedTuple

import jax
import rich.console
import rich.progress

from grpo_jax import checkpoint
from grpo_jax.distributed import flops, hlo

FLAGS = ('LIBTPU_INIT_ARGS', 'XLA_FLAGS')  # environment that changes what the compiler does


class Measured(NamedTuple):
    """What is known of a compiled program; bytes and operations are those of one device in one run of it."""

    seconds: float        # of compiling
    cached: bool
    arguments: int
    outputs: int          # that do not take an argument's place
    temporaries: int
    peak: int             # the compiler's own figure: of all of these, the most at one time; 0 where it gives none
    traffic: float        # read from and written to main memory
    within: dict          # bytes sent to devices of the same slice, by kind of collective
    across: dict          # bytes sent to other slices
    flops: float          # of matrix products
    unknown: int          # loops that were counted once
    refused: float        # bytes that the program would need, where the compiler says that they do not fit; else 0

    @property
    def collective_bytes(self):
        """Bytes sent, within slices and across."""
        return sum(self.within.values()), sum(self.across.values())


def measure(jobs, mesh, *, topology, slices, cache, progress):
    """[Measured] of plan.Jobs; progress(name, seconds, done, all) is called as they come.

    Programs are traced one after another, and each is compiled as soon as it is; equal ones once.
    """
    compiled, done, results = {}, 0, []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in jobs:
            traced = job.trace()
            operations, unknown = flops.count(traced.jaxpr, job.turns)
            lowered = traced.lower()
            key = key_of(lowered.as_text(), topology, slices, job.text_turns)
            if key not in compiled:
                compiled[key] = pool.submit(read_or_compile, key, lowered, mesh.size, slices, job.text_turns, cache)
            results.append((job, compiled[key], operations / mesh.size, unknown))
        for future in concurrent.futures.as_completed(compiled.values()):
            done += 1
            job = next(job for job, other, *_ in results if other is future)
            progress(job.name, future.result(), done, len(compiled))
    return [_measured(future.result(), operations, unknown) for _, future, operations, unknown in results]


def _measured(found, operations, unknown):
    return Measured(**found | {'flops': operations, 'unknown': unknown + found['unknown']})


def key_of(text, topology, slices, turns):
    """The name under which results lie in the cache: everything that they depend on, hashed."""
    versions = [importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'libtpu')]
    flags = [os.environ.get(name, '') for name in FLAGS]
    parts = [text, topology, slices, turns, versions, flags, inspect.getsource(hlo), inspect.getsource(compile_)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def read_or_compile(key, lowered, devices, slices, turns, cache):
    """Fields of Measured from the cache, or from compiling, into it."""
    path = os.path.join(cache, f'{key}.json')
    if os.path.exists(path):
        with open(path, encoding='utf8') as file:
            return json.load(file) | {'cached': True}
    found = compile_(lowered, devices, slices, turns)
    os.makedirs(cache, exist_ok=True)
    checkpoint.write_json(path, found)
    return found | {'cached': False}


def compile_(lowered, devices, slices, turns):
    """Fields of Measured but `cached` and `flops`."""
    begun = time.monotonic()
    empty = dict(arguments=0, outputs=0, temporaries=0, peak=0, traffic=0.0, within={}, across={}, unknown=0, refused=0)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error) or 'hbm' not in str(error).lower():
            raise
        return empty | {'seconds': time.monotonic() - begun, 'refused': needed(str(error))}
    seconds, memory, text = time.monotonic() - begun, compiled.memory_analysis(), compiled.as_text()
    traffic, within, across = hlo.Traffic(text), {}, {}
    moved = traffic.of_program(turns)
    for found in hlo.collectives(text, devices, turns):
        per = devices // slices  # data, the first axis of the mesh, goes over the slices
        kind = across if any(len({place // per for place in group}) > 1 for group in found.groups) else within
        kind[found.op] = kind.get(found.op, 0.0) + found.bytes
    return empty | dict(
        seconds=seconds, arguments=memory.argument_size_in_bytes, temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        peak=getattr(memory, 'peak_memory_in_bytes', 0), traffic=moved, within=within, across=across,
        unknown=traffic.unknown)


def needed(message):
    """Bytes that a program needs, from the compiler's refusal; infinity when it does not say."""
    found = re.search(r'(?:temporaries \(|Used )([\d.]+)([GMK])', message)
    return float(found[1]) * {'G': 2 ** 30, 'M': 2 ** 20, 'K': 2 ** 10}[found[2]] if found else float('inf')


class Progress:
    """Shows what has been compiled, on stderr: a bar on a terminal, else a line a program."""

    def __init__(self):
        self._bar = None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn('compiling'), rich.progress.BarColumn(), rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(), rich.progress.TextColumn('{task.fields[shown]}'),
                console=rich.console.Console(stderr=True), transient=True)
            self._task = self._bar.add_task('', total=None, shown='')
            self._bar.start()

    def __call__(self, name, found, done, every):
        text = f'{name} from the cache' if found['cached'] else f'{name} in {found["seconds"]:.0f} s'
        if self._bar:
            self._bar.update(self._task, completed=done, total=every, shown=text)
        else:
            print(f'preflight: {done} of {every}: {text}', file=sys.stderr, flush=True)

    def close(self):
        """Takes the bar away."""
        if self._bar:
            self._bar.stop()
