"""Compiles programs for absent devices, on all cores, and keeps what was read off them in a cache folder."""

import concurrent.futures
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import time
from typing import NamedTuple

import jax
import rich.console
import rich.progress

from grpo_jax.preflight import flops, hlo

FLAGS = ('LIBTPU_INIT_ARGS', 'XLA_FLAGS')  # environment that changes what the compiler does


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
    flops: float  # of matrix products
    unknown: int  # loops that were counted once
    refused: float  # bytes that the program would need, where the compiler says that they do not fit; else 0

    @property
    def collective_bytes(self):
        """Bytes sent, within slices and across."""
        return sum(self.within.values()), sum(self.across.values())


def measure(jobs, mesh, *, topology, slices, cache, progress, at_once):
    """[Measured] of plan.Jobs, at_once compiled at a time; progress(name, seconds, done, all) is called as they come.

    Programs are traced one after another, and each is compiled as soon as it is; equal ones once.
    """
    compiled, done, results = {}, 0, []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for job in jobs:
            traced = job.trace()
            operations, unknown = flops.count(traced.jaxpr, job.turns)
            lowered = traced.lower()
            key = key_of(lowered.as_text(), topology, slices)
            if key not in compiled:
                compiled[key] = pool.submit(read_or_compile, key, lowered, cache)
            results.append((job, compiled[key], operations / mesh.size, unknown))
        for future in concurrent.futures.as_completed(compiled.values()):
            done += 1
            job = next(job for job, other, *_ in results if other is future)
            progress(job.name, future.result()[0], done, len(compiled))
    found = []
    for job, future, operations, unknown in results:
        fields, text = future.result()
        moved = movement(text, mesh.size, slices, job.text_turns)
        found.append(Measured(**fields | moved | {'flops': operations, 'unknown': unknown + moved['unknown']}))
    return found


def key_of(text, topology, slices):
    """The name under which a program lies in the cache: everything that it depends on, hashed."""
    versions = [importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'libtpu')]
    parts = [text, topology, slices, versions, [os.environ.get(name, '') for name in FLAGS]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def read_or_compile(key, lowered, cache):
    """(bytes and seconds, fields of Measured; compiled text) from the cache, or from compiling, into it."""
    path = os.path.join(cache, f'{key}.json.gz')
    if os.path.exists(path):
        with gzip.open(path, 'rt', encoding='utf8') as file:
            found, text = json.load(file)
        return found | {'cached': True}, text
    found, text = make_executable(lowered)
    os.makedirs(cache, exist_ok=True)
    with gzip.open(f'{path}.writing', 'wt', encoding='utf8') as file:
        json.dump((found, text), file)
    os.replace(f'{path}.writing', path)
    return found | {'cached': False}, text


def make_executable(lowered):
    """What read_or_compile finds; the text is '' of a program that the compiler refuses."""
    begun = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error) or 'hbm' not in str(error).lower():
            raise
        return {
            'seconds': time.monotonic() - begun,
            'refused': needed(str(error)),
            'arguments': 0,
            'outputs': 0,
            'temporaries': 0,
            'peak': 0,
        }, ''
    memory = compiled.memory_analysis()
    return {
        'seconds': time.monotonic() - begun,
        'refused': 0,
        'arguments': memory.argument_size_in_bytes,
        'outputs': memory.output_size_in_bytes - memory.alias_size_in_bytes,
        'temporaries': memory.temp_size_in_bytes,
        'peak': getattr(memory, 'peak_memory_in_bytes', 0),
    }, compiled.as_text()


def movement(text, devices, slices, turns):
    """Fields of Measured that are read off the compiled text."""
    if not text:
        return {'traffic': 0.0, 'within': {}, 'across': {}, 'unknown': 0}
    traffic, within, across = hlo.Traffic(text), {}, {}
    moved = traffic.of_program(turns)
    for found in hlo.collectives(text, devices, turns):
        per = devices // slices  # data, the first axis of the mesh, goes over the slices
        kind = across if any(len({place // per for place in group}) > 1 for group in found.groups) else within
        kind[found.op] = kind.get(found.op, 0.0) + found.bytes
    return {'traffic': moved, 'within': within, 'across': across, 'unknown': traffic.unknown}


def needed(message):
    """Bytes that a program needs, from the compiler's refusal; infinity when it does not say."""
    found = re.search(r'(?:temporaries \(|Used )([\d.]+)([GMK])', message)
    return float(found[1]) * {'G': 2**30, 'M': 2**20, 'K': 2**10}[found[2]] if found else float('inf')


class Progress:
    """Shows what has been compiled, on stderr: a bar on a terminal, else a line a program."""

    def __init__(self):
        self._bar = None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn('compiling'),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn('{task.fields[shown]}'),
                console=rich.console.Console(stderr=True),
                transient=True,
            )
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
