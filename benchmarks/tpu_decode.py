"""What sampling would cost on TPUs that are not here: memory and traffic of the engine's programs, compiled for them.

python -m benchmarks.tpu_decode [--topology=v5e:2x2] [--model=0.5b] [--json=FILE]

Needs libtpu (see grpo_jax.distributed.topology). Prefill, decoding of a fresh wave (8 rows share a prompt) and of a
shrunken one (each row has its own) are compiled, once with all columns in one chunk and once growing. Bounds: temporary
memory of 5 % of the cache, so nowhere a copy of it; bytes of a decode step of 1.1 x (weights + live cache); within the
loop no collective over the axes of rows. Exit status 1 when one does not hold.
"""
import argparse
import json
import math
import os
import re
import sys
import time
from typing import NamedTuple

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}

import jax
import numpy as np

from grpo_jax import sampler
from grpo_jax.distributed import placement, rollouts, topology
from grpo_jax.distributed.mesh import ROW_AXES
from grpo_jax.models import transformer

PROMPTS, GROUP, QUERIES, TOKENS = 8, 8, 256, 1024  # of a data shard
MOST_TEMP, MOST_TRAFFIC = 0.05, 1.1

QWEN = dict(norm_eps=1e-6, rope_theta=1e6, rope_scaling=(), qk_norm=False, qkv_bias=True, out_bias=False,
            mlp_bias=False)
MODELS = {  # Qwen2.5; tensor only where it divides the heads of keys and values, or weights are gathered in every layer
    '0.5b': (transformer.ModelConfig(vocab_size=151936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64,
                                     mlp=4864, tie_embeddings=True, **QWEN), {'data': 4, 'fsdp': 1, 'tensor': 1}),
    '7b': (transformer.ModelConfig(vocab_size=152064, width=3584, layers=28, heads=28, kv_heads=4, head_dim=128,
                                   mlp=18944, tie_embeddings=False, **QWEN), {'data': 1, 'fsdp': 1, 'tensor': 4}),
}


# ---- the engine's programs

class Job(NamedTuple):
    """A program to compile, and what it works on, abstract."""

    name: str
    traced: jax.stages.Traced
    weights: dict
    wave: object      # sampler.wave.Wave


def make_engine(c, mesh, budget):
    """The engine as it is made for training, with the platform's block and segment."""
    shards = math.prod(mesh.shape[axis] for axis in ROW_AXES)
    sampling = sampler.Sampling(temperature=1.0, max_tokens=TOKENS, stop_tokens=(151645,), pad_token=151643)
    return rollouts.make_engine(
        c, mesh, placement.Shapes(PROMPTS * shards, GROUP, QUERIES, TOKENS), sampling, {}, dtype='bfloat16',
        cache_dtype='bfloat16', weights_dtype='bfloat16', budget=budget, ahead=False)


def jobs_of(engine):
    """Prefill, decoding of a fresh wave in as many chunks as it reaches, and of a half of it in all chunks."""
    plan, programs, jobs = engine.plan, engine.programs, []
    programs._wanted = {}  # programs are traced and noted, as in compile_all, but not compiled

    def note(wave):
        name, job = list(programs._wanted.items())[-1]
        jobs.append(Job(name, job.args[0], weights, wave))

    params, prompts, key = programs.inputs()
    weights, book = programs.weights(params), programs.new_book(prompts, key, 0, None, None)
    batch, chunks = plan.wave_prompts(), 1
    wave = programs.open_groups(weights, book, 0, batch)
    note(wave)
    while chunks < len(plan.chunks) and plan.fits(batch, batch * plan.group, chunks + 1):
        wave, chunks = programs.grow(wave, chunks), chunks + 1
    programs.segment(weights, wave, book, 0)
    note(wave)
    wave = programs.shrink(wave, plan.rows[0])
    while chunks < len(plan.chunks):
        wave, chunks = programs.grow(wave, chunks), chunks + 1
    programs.segment(weights, wave, book, 0)
    note(wave)
    return jobs


def device_bytes(tree):
    """Bytes on one device of abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(job, c, mesh):
    """Dict of what the table has on a program."""
    begun = time.monotonic()
    compiled = job.traced.lower().compile()
    seconds, memory = time.monotonic() - begun, compiled.memory_analysis()
    return dict(program=job.name, seconds=seconds, arguments=memory.argument_size_in_bytes,
                temp=memory.temp_size_in_bytes, **assess(job, c, mesh, compiled.as_text(), memory.temp_size_in_bytes))


def assess(job, c, mesh, text, temp):
    """Dict of temporaries against the cache and, of a decode program, of one step."""
    cache = job.wave.cache
    held = device_bytes((cache.prompt, cache.chunks))
    result = dict(cache=held, temp_share=temp / held)
    if job.name.startswith('decode'):
        # the last step reads all blocks of all chunks; a head of its own leaves but a few rows of the embedding to read
        read = {name: w for name, w in job.weights.items() if name != 'embed' or c.tie_embeddings}
        blocks = [chunk.k.shape[1] for chunk in cache.chunks]
        traffic = Traffic(text)
        step, needed = traffic.of_step(blocks), device_bytes(read) + held
        result |= dict(step=step, needed=needed, ratio=step / needed, ratio_reread=(step + traffic.reread) / needed,
                       collectives=collectives(text, mesh))
    return result


# ---- bytes, read off the compiled text
#
# cost_analysis() will not do: it counts the body of a loop once, whatever its trip count, and reads of on-chip memory
# as bytes. The compiled text is scheduled and has layouts and memory spaces, so that what crosses the border of HBM can
# be read off: an instruction reads its operands that lie in HBM and writes its results that lie there.

class Array(NamedTuple):
    """One array of an instruction's result, like bf16[24,896]{1,0:T(8,128)(2,1)S(1)}."""

    item: int      # bytes
    dims: tuple
    order: tuple   # of dimensions, from the minor one
    tile: tuple    # sizes of a tile in the last, minor, dimensions
    hbm: bool      # no memory space is named; S(1) is on the chip

    def bytes(self, dims=None):
        """Bytes in memory, or those of the tiles that a piece of other dims lies in."""
        sizes = [(dims or self.dims)[i] for i in self.order]
        for i, width in enumerate(reversed(self.tile[-len(sizes):] if sizes else ())):
            sizes[i] = -(-sizes[i] // width) * width
        return math.prod(sizes) * self.item


class Instruction(NamedTuple):
    """One line."""

    name: str
    op: str
    arrays: list         # Array of each leaf of the result
    operands: list       # names
    inside: str          # text between the operation's parentheses
    attributes: str      # text after them
    root: bool


ITEM = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4}
# name things, or finish what was counted when it was started
FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id', 'copy-done',
        'slice-done', 'async-done', 'all-reduce-done', 'all-gather-done', 'collective-permute-done')


def parse(text):
    """({computation: {name: Instruction}}, name of the entry)."""
    computations, entry, lines = {}, None, None
    for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
        head = re.match(r'(ENTRY )?%([\w.-]+) \(.*\{$', line)
        if head:
            lines = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith('  ') and lines is not None:
            instruction = _instruction(line)
            lines[instruction.name] = instruction
    return computations, entry


def _instruction(line):
    head = re.match(r' +(ROOT )?%([\w.-]+) = ', line)
    rest = line[head.end():]
    end = _closing(rest) if rest.startswith('(') else rest.index(' ')
    shape, rest = rest[:end], rest[end:].lstrip()
    op, rest = rest[:rest.index('(')], rest[rest.index('('):]
    end = _closing(rest)
    inside = rest[1:end - 1]
    return Instruction(head[2], op, [_array(*leaf) for leaf in re.findall(r'(\w+)\[([\d,]*)\](?:\{([^}]*)\})?', shape)],
                       re.findall(r'%([\w.-]+)', inside), inside, rest[end:], bool(head[1]))


def _closing(text):
    """Where the parenthesis that text begins with is closed."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == '(') - (letter == ')')
        if not depth:
            return i + 1
    raise ValueError(text)


def _array(kind, dims, layout):
    numbers = [tuple(int(n) for n in re.findall(r'\d+', part)) for part in (dims, layout.partition(':')[0])]
    tile = re.search(r':T\(([\d,]+)\)', layout)
    return Array(ITEM.get(kind, 0), *numbers, tuple(map(int, tile[1].split(','))) if tile else (), 'S(' not in layout)


class Traffic:
    """HBM bytes of one decode step.

    `reread` of them are an upper bound on top: of tiles that an update in place fills in part, which have to be read
    first unless the hardware writes less than a tile.
    """

    def __init__(self, text):
        self._computations, self._entry = parse(text)
        self.reread, self.parts = 0, {}  # parts: bytes by instruction, to find what costs too much

    def of_step(self, blocks):
        """Bytes of one turn of the decode loop; blocks has for each chunk, in order, those that its loop reads."""
        left = iter(blocks)
        total = self._computation(decode_loop(self._computations, self._entry)['body'], left, 1)
        assert next(left, None) is None, 'fewer loops over blocks than chunks'
        return total

    def _computation(self, name, blocks, times):
        scope = self._computations[name]
        return sum(self._bytes(i, scope, blocks, times) for i in scope.values())

    def _bytes(self, i, scope, blocks, times):
        if i.op in FREE:
            return 0
        if i.op == 'while':
            turns = _turns(i, scope, self._computations)
            turns = next(blocks) if turns is None else turns
            return turns * sum(self._computation(_called(i, role), blocks, times * turns)
                               for role in ('condition', 'body'))
        if i.op == 'call':
            return self._computation(_called(i, 'to_apply'), blocks, times)
        moved = self._moved(i, scope)
        self.parts[i.name] = moved * times
        written = zip(i.arrays, self._written(i, scope), strict=True)
        self.reread += times * sum(partial for array, (_, partial) in written if array.hbm)
        return moved

    def _moved(self, i, scope):
        if i.op == 'copy-start':  # its result is (copy, original, token)
            return sum(array.bytes() for array in i.arrays[:2] if array.hbm)
        if i.op in ('slice-start', 'dynamic-slice-start'):  # (whole, slice, token); of the whole, the slice is read
            whole, part = i.arrays[:2]
            return part.bytes() * (whole.hbm + part.hbm)
        if i.op in ('conditional', 'async-start'):
            raise NotImplementedError(i)
        total = sum(n for array, (n, _) in zip(i.arrays, self._written(i, scope), strict=True) if array.hbm)
        for position, name in enumerate(i.operands):
            if any(array.hbm for array in scope[name].arrays):
                total += self._read(i, position, scope)
        return total

    def _read(self, i, position, scope):
        """Bytes that an instruction reads of an operand: of the cache and of stacked weights, slices."""
        whole = _size(scope[i.operands[position]])
        if position == 0 and i.op in ('dynamic-slice', 'slice', 'gather'):
            return min(_size(i), whole)
        if position == 0 and i.op == 'dynamic-update-slice':
            return 0  # in place: the rest stays where it is
        if i.op == 'fusion':
            inner = self._computations[_called(i, 'calls')]
            name = next(p.name for p in inner.values() if p.op == 'parameter' and p.inside == str(position))
            return self._used(inner, name)
        return whole

    def _used(self, inner, name):
        """Bytes that a fused computation reads of its parameter."""
        total = _size(inner[name]) if inner[name].root else 0
        for user in inner.values():
            for position, operand in enumerate(user.operands):
                if operand == name:
                    total += self._used(inner, user.name) if self._renames(user) else self._read(user, position, inner)
        return min(total, _size(inner[name]))

    def _renames(self, i):
        """Whether the result is the operand, under another name or shape."""
        return i.op == 'bitcast' or (i.op == 'fusion' and all(
            x.op in ('parameter', 'bitcast') for x in self._computations[_called(i, 'calls')].values()))

    def _written(self, i, scope):
        """(bytes written, of them in partly filled tiles) of each result; of one updated in place, the update."""
        if i.op == 'dynamic-update-slice':
            dims = scope[i.operands[1]].arrays[0].dims
            touched = i.arrays[0].bytes(dims)
            return [(touched, touched if touched > math.prod(dims) * i.arrays[0].item else 0)]
        if i.op == 'fusion':
            inner = self._computations[_called(i, 'calls')]
            return self._written(next(x for x in inner.values() if x.root), inner)
        if i.op == 'tuple':
            return [n for name in i.operands for n in self._written(scope[name], scope)]
        if i.op == 'bitcast':
            return self._written(scope[i.operands[0]], scope)
        return [(array.bytes(), 0) for array in i.arrays]


def _size(i):
    return sum(array.bytes() for array in i.arrays)


def _called(i, role):
    return re.search(rf'{role}=%([\w.-]+)', i.attributes)[1]


def decode_loop(computations, entry):
    """{'body', 'condition'} of the loop over steps: the outermost that has loops, those over layers, in it."""
    for i in computations[entry].values():
        if i.op == 'while' and any(x.op == 'while' for x in computations[_called(i, 'body')].values()):
            return {role: _called(i, role) for role in ('body', 'condition')}
    raise ValueError('no loop over steps')


def _turns(loop, scope, computations):
    """A loop's trip count where the text tells (over layers, and over prompts' blocks, from the first), else None."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = computations[_called(loop, 'condition')]
    test = next(x for x in condition.values() if x.root)
    if test.op != 'compare' or 'direction=LT' not in test.attributes:
        return None
    limit = condition[test.operands[1]]
    if limit.op == 'get-tuple-element':  # carried along: a constant where the loop is entered?
        place = int(re.search(r'index=(\d+)', limit.attributes)[1])
        limit = scope[scope[loop.operands[0]].operands[place]]
    return int(limit.inside) if limit.op == 'constant' else None


# ---- collectives

def collectives(text, mesh):
    """[(operation, replica groups, times a step, whether it is over the axes of rows)] of the decode loop."""
    computations, entry = parse(text)
    found = {}

    def visit(name, times):
        scope = computations[name]
        for i in scope.values():
            if i.op == 'while':
                turns = times * (_turns(i, scope, computations) or 1)
                visit(_called(i, 'body'), turns)
                visit(_called(i, 'condition'), turns)
            elif re.match(r'(all-|reduce-scatter|collective-|ragged-)', i.op) and not i.op.endswith('-done'):
                groups = replica_groups(i.attributes, mesh.size)
                key = i.op.removesuffix('-start'), str(groups)
                found[key] = found.get(key, (0, over_rows(groups, mesh)))
                found[key] = found[key][0] + times, found[key][1]
    loop = decode_loop(computations, entry)
    visit(loop['body'], 1)
    visit(loop['condition'], 1)
    return [(*key, *value) for key, value in found.items()]


def replica_groups(attributes, devices):
    """Lists of device numbers that talk to each other."""
    pairs = re.search(r'(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}', attributes)
    if pairs:
        return [[int(n) for n in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', pairs[1])]
    iota = re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes)
    if iota:
        shape, dims, order = ([int(n) for n in part.split(',')] if part else None for part in iota.groups())
        return np.arange(devices).reshape(dims).transpose(order).reshape(shape).tolist()
    # mesh['a'=1,'b'=4] {'b'}: devices in order of a grid, groups along the named axes
    grid = re.search(r"replica_groups=mesh\[([\w'=,]+)\] \{([\w',]+)\}", attributes)
    if grid:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", grid[1]))
        axes = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", grid[2])]
        others = [i for i in range(len(sizes)) if i not in axes]
        places = np.arange(devices).reshape([int(n) for n in sizes.values()]).transpose(others + axes)
        return places.reshape(-1, math.prod(places.shape[len(others):])).tolist()
    if 'replica_groups={}' in attributes:
        return [list(range(devices))]
    raise NotImplementedError(attributes)


def over_rows(groups, mesh):
    """Whether a group has devices of several shards of rows. Device numbers are places in the mesh."""
    axes = [mesh.axis_names.index(axis) for axis in ROW_AXES]
    places = [np.stack(np.unravel_index(group, mesh.devices.shape))[axes] for group in groups]
    return any((place != place[:, :1]).any() for place in places)


# ---- the table

def holds(row):
    """Whether a program keeps the bounds."""
    return (row['temp_share'] <= MOST_TEMP and row.get('ratio', 0) <= MOST_TRAFFIC
            and not any(over for *_, over in row.get('collectives', ())))


HEAD = (f'{"program":46} {"compile":>7} {"arguments":>9} {"temp":>7} {"cache":>7} {"temp/":>6} {"step":>7} '
        f'{"needed":>7} {"step/":>6} {"tiles":>6} {"over":>4}\n'
        f'{"":46} {"s":>7} {"MB":>9} {"MB":>7} {"MB":>7} {"cache":>6} {"MB":>7} {"MB":>7} {"needed":>6} {"reread":>6} '
        f'{"data":>4}')


def table_row(row):
    """A line of the table; tiles reread: the ratio when a tile that is written in part is read first."""
    text = (f'{row["program"]:46} {row["seconds"]:7.0f} {row["arguments"] / 1e6:9.1f} {row["temp"] / 1e6:7.2f} '
            f'{row["cache"] / 1e6:7.1f} {row["temp_share"]:6.2%}')
    if 'step' in row:
        over = sum(times for *_, times, over in row['collectives'] if over)
        text += (f' {row["step"] / 1e6:7.1f} {row["needed"] / 1e6:7.1f} {row["ratio"]:6.3f} {row["ratio_reread"]:6.3f}'
                 f' {over:4d}')
    return text + ('' if holds(row) else '   beyond the bounds')


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--topology', default='v5e:2x2')
    parser.add_argument('--model', choices=MODELS, default='0.5b')
    parser.add_argument('--json', default='')
    arguments = parser.parse_args()
    c, section = MODELS[arguments.model]
    mesh, rows = topology.mesh(arguments.topology, section), []
    print(f'Qwen2.5-{arguments.model.upper()} in bfloat16 on {arguments.topology}, data {section["data"]} x '
          f'tensor {section["tensor"]}; all figures are of one device\n{HEAD}', flush=True)
    whole = make_engine(c, mesh, 0)
    for engine in (whole, make_engine(c, mesh, whole.plan.bytes(PROMPTS, PROMPTS * GROUP, 1) - 1)):
        for job in jobs_of(engine):
            rows.append(dict(topology=arguments.topology, model=arguments.model, chunks=engine.plan.chunks,
                             **measure(job, c, mesh)))
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
