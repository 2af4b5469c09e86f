"""What a program moves, read off its compiled text: bytes of main memory, and collectives.

cost_analysis() will not do: it counts the body of a loop once, whatever its trip count, and reads of on-chip memory
as bytes. The compiled text is scheduled and has layouts and memory spaces, so that what crosses the border of HBM can
be read off: an instruction reads its operands that lie in HBM and writes its results that lie there. XLA does not
promise to keep the form of this text; it is that of jax 0.10 to 0.12 and libtpu 0.0.42.
"""

from collections.abc import Iterable, Iterator
import math
import re
from typing import NamedTuple

import numpy as np


class Array(NamedTuple):
    """One array of an instruction's result, like bf16[24,896]{1,0:T(8,128)(2,1)S(1)}."""

    item: int  # bytes
    dims: tuple[int, ...]
    order: tuple[int, ...]  # of dimensions, from the minor one
    tile: tuple[int, ...]  # sizes of a tile in the last, minor, dimensions
    hbm: bool  # no memory space is named; S(1) is on the chip

    def bytes(self, dims: tuple[int, ...] | None = None) -> int:
        """Bytes in memory of the array, or of the tiles that a piece of other dims takes up."""
        sizes = [(dims or self.dims)[i] for i in self.order]
        for i, width in enumerate(reversed(self.tile[-len(sizes) :] if sizes else ())):
            sizes[i] = -(-sizes[i] // width) * width
        return math.prod(sizes) * self.item


class Instruction(NamedTuple):
    """One line."""

    name: str
    op: str
    arrays: list[Array]  # of each leaf of the result
    operands: list[str]  # names
    inside: str  # text between the operation's parentheses
    attributes: str  # text after them
    root: bool


ITEM = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4}
# operations that name things, or finish what was counted when it was started
NO_TRAFFIC = (
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'after-all',
    'partition-id',
    'copy-done',
    'slice-done',
    'async-done',
    'all-reduce-done',
    'all-gather-done',
    'collective-permute-done',
)


Computations = dict[str, dict[str, Instruction]]


def parse(text: str) -> tuple[Computations, str]:
    """({computation: {name: Instruction}}, name of the entry)."""
    computations, entry, lines = {}, '', None
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
    head = _match(r' +(ROOT )?%([\w.-]+) = ', line)
    rest = line[head.end() :]
    end = _closing(rest) if rest.startswith('(') else rest.index(' ')
    shape, rest = rest[:end], rest[end:].lstrip()
    op, rest = rest[: rest.index('(')], rest[rest.index('(') :]
    end = _closing(rest)
    inside = rest[1 : end - 1]
    return Instruction(
        head[2],
        op,
        [_array(*leaf) for leaf in re.findall(r'(\w+)\[([\d,]*)\](?:\{([^}]*)\})?', shape)],
        re.findall(r'%([\w.-]+)', inside),
        inside,
        rest[end:],
        bool(head[1]),
    )


def _match(pattern, text):
    """The first match of a pattern that the text must have."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f'no {pattern} in {text}')
    return match


def _closing(text):
    """The end of the parenthesis that text begins with."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == '(') - (letter == ')')
        if not depth:
            return i + 1
    raise ValueError(text)


def _array(kind, dims, layout):
    sizes, order = (tuple(int(n) for n in re.findall(r'\d+', part)) for part in (dims, layout.partition(':')[0]))
    tile = re.search(r':T\(([\d,]+)\)', layout)
    tiling = tuple(map(int, tile[1].split(','))) if tile else ()
    return Array(ITEM.get(kind, 0), sizes, order, tiling, 'S(' not in layout)


class Traffic:
    """HBM bytes of a program, or of one decode step.

    `reread` is an upper bound of bytes that may come on top: tiles that an update in place fills in part have to be
    read first, unless the hardware writes less than a tile. `unknown` loops, whose trip count is not known, count once.
    """

    def __init__(self, text: str):
        self._computations, self._entry = parse(text)
        self.reread, self.unknown = 0, 0
        self.by_instruction: dict[str, int] = {}  # bytes, to see which instruction costs too much

    def count_step(self, blocks: Iterable[int]) -> int:
        """Bytes of one pass of the decode loop; blocks are the numbers of blocks that the loop of each chunk reads."""
        left = iter(blocks)
        total = self._computation(decode_loop(self._computations, self._entry)['body'], left, 1)
        assert next(left, None) is None, 'fewer loops over blocks than chunks'
        return total

    def count_program(self, trip_counts: Iterable[int]) -> int:
        """Bytes of the whole program; trip_counts are those of the loops whose text has none, in order."""
        return self._computation(self._entry, iter(trip_counts), 1)

    def _computation(self, name: str, trip_counts: Iterator[int], times: int) -> int:
        scope = self._computations[name]
        total = 0
        for i in scope.values():
            total += self._bytes(i, scope, trip_counts, times)
        return total

    def _bytes(self, i: Instruction, scope: dict[str, Instruction], trip_counts: Iterator[int], times: int) -> int:
        if i.op in NO_TRAFFIC:
            return 0
        if i.op == 'while':
            count = trip_count(i, scope, self._computations, trip_counts)
            self.unknown += count is None
            count = 1 if count is None else count
            return count * sum(
                self._computation(_called(i, role), trip_counts, times * count) for role in ('condition', 'body')
            )
        if i.op in ('call', 'async-start'):
            return self._computation(_called(i, 'calls' if i.op == 'async-start' else 'to_apply'), trip_counts, times)
        if i.op == 'conditional':  # the branch that costs most
            return max(self._computation(name, trip_counts, times) for name in branches(i))
        moved = self._moved(i, scope)
        self.by_instruction[i.name] = moved * times
        written = zip(i.arrays, self._written(i, scope), strict=True)
        self.reread += times * sum(partial for array, (_, partial) in written if array.hbm)
        return moved

    def _moved(self, i, scope):
        estimate = re.search(r'"bytes_accessed":"(\d+)"', i.attributes) if i.op == 'custom-call' else None
        if estimate:  # a kernel reads only blocks of its operands; its cost estimate has their bytes
            return int(estimate[1])
        if i.op == 'copy-start':  # its result is (copy, original, token)
            return sum(array.bytes() for array in i.arrays[:2] if array.hbm)
        if i.op in ('slice-start', 'dynamic-slice-start'):  # (whole, slice, token); of the whole, the slice is read
            whole, part = i.arrays[:2]
            return part.bytes() * (whole.hbm + part.hbm)
        total = sum(n for array, (n, _) in zip(i.arrays, self._written(i, scope), strict=True) if array.hbm)
        for position, name in enumerate(i.operands):
            if any(array.hbm for array in scope[name].arrays):
                total += self._read(i, position, scope)
        return total

    def _read(self, i, position, scope):
        """Bytes that an instruction reads of an operand; of the cache and of stacked weights it reads slices."""
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
        return i.op == 'bitcast' or (
            i.op == 'fusion'
            and all(x.op in ('parameter', 'bitcast') for x in self._computations[_called(i, 'calls')].values())
        )

    def _written(self, i, scope):
        """(bytes written, those of them in partly filled tiles) of each result; an update in place writes itself."""
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
    return _match(rf'{role}=%([\w.-]+)', i.attributes)[1]


def decode_loop(computations: Computations, entry: str) -> dict[str, str]:
    """{'body', 'condition'} of the loop over steps: the outermost loop that has loops (over layers) in it."""
    for i in computations[entry].values():
        if i.op == 'while' and any(x.op == 'while' for x in computations[_called(i, 'body')].values()):
            return {role: _called(i, role) for role in ('body', 'condition')}
    raise ValueError('no loop over steps')


def branches(conditional: Instruction) -> list[str]:
    """Names of the computations that a conditional chooses from."""
    named = re.search(r'branch_computations=\{([^}]*)\}', conditional.attributes)
    return (
        re.findall(r'%([\w.-]+)', named[1])
        if named
        else [_called(conditional, f'{role}_computation') for role in ('true', 'false')]
    )


def trip_count(
    loop: Instruction, scope: dict[str, Instruction], computations: Computations, trip_counts: Iterator[int]
) -> int | None:
    """A loop's trip count, from the text or else the next of trip_counts; None when neither has it."""
    known = _known_trip_count(loop, scope, computations)
    return next(trip_counts, None) if known is None else known


def _known_trip_count(loop, scope, computations):
    """A loop's trip count where the text has it (over layers, and over the first blocks of prompts), else None."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = computations[_called(loop, 'condition')]
    test = next(x for x in condition.values() if x.root)
    if test.op != 'compare' or 'direction=LT' not in test.attributes:
        return None
    limit = condition[test.operands[1]]
    if limit.op == 'get-tuple-element':  # carried along: a constant where the loop is entered?
        position = int(_match(r'index=(\d+)', limit.attributes)[1])
        limit = scope[scope[loop.operands[0]].operands[position]]
    return int(limit.inside) if limit.op == 'constant' else None


class Collective(NamedTuple):
    """A kind of collective of a program."""

    op: str  # all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute
    groups: list[list[int]]  # of devices that talk to each other, by their positions in the mesh
    times: int  # that it runs
    bytes: float  # that a device sends to others in all of them, by rings


# bytes that one of n devices sends, in units of what it hands in
SENT = {
    'all-gather': lambda n: n - 1,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'ragged-all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
    'collective-broadcast': lambda n: 1,
}


def collectives(text: str, devices: int, trip_counts: Iterable[int] = (), decoding: bool = False) -> list[Collective]:
    """Collectives of a program in the order of the text, or those of one pass of its decode loop.

    trip_counts as in Traffic.count_program. A collective that is spread over several fusions counts once.
    """
    computations, entry = parse(text)
    left, by_kind, channels = iter(trip_counts), {}, set()

    def visit(name, times):
        scope = computations[name]
        for i in scope.values():
            op = i.op.removesuffix('-start')
            if i.op == 'while':
                count = times * (trip_count(i, scope, computations, left) or 1)
                visit(_called(i, 'body'), count)
                visit(_called(i, 'condition'), count)
            elif i.op == 'conditional':
                for branch in branches(i):
                    visit(branch, times)
            elif i.op in ('fusion', 'call', 'async-start'):
                visit(_called(i, 'to_apply' if i.op == 'call' else 'calls'), times)
            elif op in SENT:
                channel = re.search(r'channel_id=(\d+)', i.attributes)
                if channel is None or channel[1] not in channels:
                    channels.update([channel[1]] if channel else [])
                    # the fusion of a reduction with a slice of its result
                    op = 'reduce-scatter' if 'all-reduce-scatter' in name else op
                    note(op, i, scope, times)

    def note(op, i, scope, times):
        groups = replica_groups(i.attributes, devices)
        size = sum(math.prod(array.dims) * array.item for name in i.operands for array in scope[name].arrays)
        sent = size * (1 if op == 'collective-permute' else SENT[op](len(groups[0])))
        before = by_kind.get((op, str(groups)), Collective(op, groups, 0, 0.0))
        by_kind[op, str(groups)] = before._replace(times=before.times + times, bytes=before.bytes + times * sent)

    if decoding:
        loop = decode_loop(computations, entry)
        visit(loop['body'], 1)
        visit(loop['condition'], 1)
    else:
        visit(entry, 1)
    return list(by_kind.values())


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Lists of device numbers that talk to each other."""
    pairs = re.search(r'(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}', attributes)
    if pairs:
        return [[int(n) for n in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', pairs[1])]
    iota = re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes)
    if iota:
        shape, dims, axes = ([int(n) for n in part.split(',')] if part else None for part in iota.groups())
        return np.arange(devices).reshape(dims or ()).transpose(axes).reshape(shape or ()).tolist()
    # mesh['a'=1,'b'=4] {'b'}: devices in the order of a grid, groups along the named axes; device_ids=([2,8]T(1,0))
    # gives another order
    grid = re.search(
        r"replica_groups=mesh\[([\w'=,]+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
        r"\{([\w',]+)\}",
        attributes,
    )
    if grid:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", grid[1]))
        axes = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", grid[4])]
        others = [i for i in range(len(sizes)) if i not in axes]
        order = np.arange(devices)
        if grid[2]:
            order = order.reshape([int(n) for n in grid[2].split(',')])
            order = order.transpose([int(n) for n in grid[3].split(',')]) if grid[3] else order
        grouped = order.reshape([int(n) for n in sizes.values()]).transpose(others + axes)
        return grouped.reshape(-1, math.prod(grouped.shape[len(others) :])).tolist()
    if 'replica_groups={}' in attributes:
        return [list(range(devices))]
    raise NotImplementedError(attributes)
