"""What sampling would cost on TPUs that are not here: memory and traffic of the engine's programs, compiled for them.

python -m benchmarks.tpu_decode [--topology=v5e:2x2] [--model=0.5B] [--json=FILE]

Needs libtpu (see tools/preflight/topology.py). Prefill, decoding of a fresh batch (8 rows share a prompt) and of a
shrunken one (each row has its own) are compiled, once with all columns in one chunk and once growing. Bounds: temporary
memory of 5 % of the cache, so nowhere a copy of it; bytes of a decode step of 1.1 x (weights + live cache); within the
loop no collective over the axes of rows. Exit status 1 when one does not hold.
"""

import argparse
import json
import math
import os
import sys
import time
from typing import NamedTuple

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}

import jax
import numpy as np

from grpo_jax import sampler
from grpo_jax.models.hf import families
from grpo_jax.sampler import schedule
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, compiled
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.tools.preflight import hlo_collectives, topology
from grpo_jax.tools.preflight import plan as plans
from grpo_jax.tools.preflight.traffic import Traffic

PROMPTS, GROUP, QUERIES, TOKENS = 8, 8, 256, 1024  # of a data shard
MOST_TEMP, MOST_TRAFFIC = 0.05, 1.1
# Qwen2.5; tensor only where it divides the heads of keys and values, or weights are gathered in every layer
AXES = {'0.5B': {'data': 4, 'fsdp': 1, 'tensor': 1}, '7B': {'data': 1, 'fsdp': 1, 'tensor': 4}}


class Job(NamedTuple):
    """A program to compile, and what it works on, abstract."""

    name: str
    traced: jax.stages.Traced
    weights: dict
    batch: object  # sampler.state.DecodeBatch, in as many columns as it may reach


def build_engine(c, mesh, budget):
    """The engine as it is made for training, with the platform's block and segment."""
    shards = math.prod(mesh.shape[axis] for axis in ROW_AXES)
    sampling = sampler.Sampling(1.0, TOKENS, (151645,), 151643, dtype='bfloat16', cache_bytes=budget)
    shapes = batches.Shapes(PROMPTS * shards, GROUP, QUERIES, TOKENS)
    return make_sampler(c, mesh, shapes, sampling, {})


def list_jobs(engine):
    """The prefill of a fresh batch, and each decode program of `schedule.largest_programs`."""
    programs, spec = engine.programs, engine.programs.spec
    keys = schedule.largest_programs(engine.schedule)
    decoding = [key for key in keys if key.kind == 'decode']
    opening = next(key for key in keys if key.kind == 'open')
    return [
        Job(str(key), programs.trace(key), spec.abstract_weights, spec.abstract_batch(like))
        for key, like in [(opening, decoding[0]), *((key, key) for key in decoding)]
    ]


def measure(job, c, mesh):
    """Dict of what the table has on a program."""
    begun = time.monotonic()
    compiled = job.traced.lower().compile()
    seconds, memory = time.monotonic() - begun, compiled.memory_analysis()
    return dict(
        program=job.name,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        **assess(job, c, mesh, compiled.as_text(), memory.temp_size_in_bytes),
    )


def assess(job, c, mesh, text, temp):
    """Dict of temporaries against the cache and, of a decode program, of one step."""
    cache = job.batch.cache
    held = compiled.device_bytes((cache.prompt, cache.chunks))
    result = dict(cache=held, temp_share=temp / held)
    if job.name.startswith('decode'):
        # the last step reads all blocks of all chunks; a head of its own leaves but a few rows of the embedding to read
        read = {name: w for name, w in job.weights.items() if name != 'embed' or c.tie_embeddings}
        blocks = [] if cache.prompt.flat else [chunk.k.shape[1] for chunk in cache.chunks]
        traffic = Traffic(text)
        step, needed = traffic.count_step(blocks), compiled.device_bytes(read) + held
        result |= dict(
            step=step,
            needed=needed,
            ratio=step / needed,
            ratio_reread=(step + traffic.reread) / needed,
            collectives=[
                (found.op, found.groups, found.times, over_rows(found.groups, mesh))
                for found in hlo_collectives.list_collectives(text, mesh.size, decoding=True)
            ],
        )
    return result


def over_rows(groups, mesh):
    """Whether a group has devices of several shards of rows. Device numbers are places in the mesh."""
    axes = [mesh.axis_names.index(axis) for axis in ROW_AXES]
    places = [np.stack(np.unravel_index(group, mesh.devices.shape))[axes] for group in groups]
    return any((place != place[:, :1]).any() for place in places)


def holds(row):
    """Whether a program keeps the bounds."""
    return (
        row['temp_share'] <= MOST_TEMP
        and row.get('ratio', 0) <= MOST_TRAFFIC
        and not any(over for *_, over in row.get('collectives', ()))
    )


HEAD = (
    f'{"program":46} {"compile":>7} {"arguments":>9} {"temp":>7} {"cache":>7} {"temp/":>6} {"step":>7} '
    f'{"needed":>7} {"step/":>6} {"tiles":>6} {"over":>4}\n'
    f'{"":46} {"s":>7} {"MB":>9} {"MB":>7} {"MB":>7} {"cache":>6} {"MB":>7} {"MB":>7} {"needed":>6} {"reread":>6} '
    f'{"data":>4}'
)


def table_row(row):
    """A line of the table; tiles reread: the ratio when a tile that is written in part is read first."""
    text = (
        f'{row["program"]:46} {row["seconds"]:7.0f} {row["arguments"] / 1e6:9.1f} {row["temp"] / 1e6:7.2f} '
        f'{row["cache"] / 1e6:7.1f} {row["temp_share"]:6.2%}'
    )
    if 'step' in row:
        over = sum(times for *_, times, over in row['collectives'] if over)
        text += (
            f' {row["step"] / 1e6:7.1f} {row["needed"] / 1e6:7.1f} {row["ratio"]:6.3f} {row["ratio_reread"]:6.3f}'
            f' {over:4d}'
        )
    return text + ('' if holds(row) else '   beyond the bounds')


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--topology', default='v5e:2x2')
    parser.add_argument('--model', choices=AXES, default='0.5B')
    parser.add_argument('--json', default='')
    arguments = parser.parse_args()
    c, section = families.load_config(os.path.join(plans.MODELS, f'Qwen2.5-{arguments.model}')), AXES[arguments.model]
    mesh, rows = topology.mesh(arguments.topology, section), []
    print(
        f'Qwen2.5-{arguments.model} in bfloat16 on {arguments.topology}, data {section["data"]} x '
        f'tensor {section["tensor"]}; all figures are of one device\n{HEAD}',
        flush=True,
    )
    whole = build_engine(c, mesh, 0)
    for engine in (whole, build_engine(c, mesh, whole.schedule.bytes(PROMPTS, PROMPTS * GROUP, 1) - 1)):
        for job in list_jobs(engine):
            rows.append(
                dict(
                    topology=arguments.topology,
                    model=arguments.model,
                    chunks=engine.schedule.chunks,
                    **measure(job, c, mesh),
                )
            )
            print(table_row(rows[-1]), flush=True)
    for row in rows:
        for op, groups, times, _ in row.get('collectives', ()):
            print(f'{row["program"]}: {times} {op} a step over {groups}')
    if arguments.json:
        with open(arguments.json, 'w', encoding='utf8') as out:
            json.dump(rows, out, indent=1)
    sys.exit(not all(map(holds, rows)))


if __name__ == '__main__':
    main()
