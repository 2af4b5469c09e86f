"""Bytes of main memory that a compiled program moves, read off its text.

The text has layouts and memory spaces, so that what crosses the border of HBM can be read off: an instruction reads its
operands that lie in HBM and writes its results that lie there.
"""

from collections.abc import Iterable
import math
import re

from grpo_jax.tools.preflight import hlo, hlo_collectives
from grpo_jax.tools.preflight.hlo import Instruction, Scope

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


class Traffic:
    """HBM bytes of a program, or of one decode step.

    `reread` is an upper bound of bytes that may come on top: tiles that an update in place fills in part have to be
    read first, unless the hardware writes less than a tile. `unknown` loops, whose trip count is not known, count once.
    """

    def __init__(self, text: str):
        self._program = hlo.parse(text)
        self.reread, self.unknown = 0, 0
        self.by_instruction: dict[str, int] = {}  # bytes, to see which instruction costs too much

    def count_step(self, blocks: Iterable[int]) -> float:
        """Bytes of one pass of the decode loop; blocks are the numbers of blocks that the loop of each chunk reads."""
        left = iter(blocks)
        _, body = hlo.decode_loop(self._program)
        total = hlo.Walk(self._program, left, self._bytes).total(body)
        assert next(left, None) is None, 'fewer loops over blocks than chunks'
        return total

    def count_program(self, trip_counts: Iterable[int]) -> float:
        """Bytes of the whole program; trip_counts are those of the loops whose text has none, in order."""
        walk = hlo.Walk(self._program, iter(trip_counts), self._bytes)
        total = walk.total(self._program.entry)
        self.unknown += walk.unknown
        return total

    def _bytes(self, i: Instruction, scope: Scope, times: int) -> int:
        if i.op in NO_TRAFFIC:
            return 0
        moved = self._moved(i, scope)
        self.by_instruction[i.name] = moved * times
        self.reread += times * sum(partial for _, partial in self._written(i, scope))
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
        total = sum(n for n, _ in self._written(i, scope))
        for position, name in enumerate(i.operands):
            if any(array.hbm for array in scope[name].arrays):
                total += self._read(i, position, scope)
        return total

    def _read(self, i, position, scope):
        """Bytes that an instruction reads of an operand; of the cache and of stacked weights it reads slices."""
        whole = scope[i.operands[position]].bytes
        if position == 0 and i.op in ('dynamic-slice', 'slice', 'gather'):
            return min(i.bytes, whole)
        if position == 0 and i.op == 'dynamic-update-slice':
            return 0  # in place: the rest stays where it is
        if i.op == 'fusion':
            inner = self._program.computations[i.called('calls')]
            if 'custom_call_target="AsyncCollectiveDone"' in hlo.root(inner).attributes:
                return 0  # it only waits for the end of a collective that another fusion has started
            name = hlo.parameters(inner)[position]
            return self._used(inner, name, name in self._handed_on(i)[1])
        return whole

    def _used(self, inner, name, handed_on=False):
        """Bytes that a fused computation reads of its parameter, by more than the collective that hands it on."""
        total = inner[name].bytes if inner[name].root else 0
        for user in inner.values():
            for position, operand in enumerate(user.operands):
                if operand != name or (handed_on and (user.root or user.op in hlo_collectives.SENT)):
                    continue
                total += self._used(inner, user.name) if self._renames(user) else self._read(user, position, inner)
        return min(total, inner[name].bytes)

    def _renames(self, i):
        """Whether the result is the operand, under another name or shape."""
        if i.op != 'fusion':
            return i.op == 'bitcast'
        inner = self._program.computations[i.called('calls')]
        return all(x.op in ('parameter', 'bitcast') for x in inner.values())

    def _written(self, i, scope):
        """(bytes written to HBM, those of them in partly filled tiles) of each result that an instruction writes."""
        sizes = self._sizes(i, scope)
        if i.op == 'fusion':
            outputs, _ = self._handed_on(i)
            sizes = [(0, 0) if place in outputs else size for place, size in enumerate(sizes)]
        elif i.op in ('collective-permute-start', 'all-gather-start'):  # (operands, results, ...)
            sizes = [(0, 0)] * len(i.operands) + sizes[len(i.operands) :]
        return [size if array.hbm else (0, 0) for array, size in zip(i.arrays, sizes, strict=True)]

    def _sizes(self, i, scope):
        """(bytes, those of them in partly filled tiles) of each result; an update in place has its own."""
        if i.op == 'dynamic-update-slice':
            dims = scope[i.operands[1]].arrays[0].dims
            touched = i.arrays[0].bytes(dims)
            return [(touched, touched if touched > math.prod(dims) * i.arrays[0].item else 0)]
        if i.op == 'fusion':
            inner = self._program.computations[i.called('calls')]
            return self._sizes(hlo.root(inner), inner)
        if i.op == 'tuple':
            return [n for name in i.operands for n in self._sizes(scope[name], scope)]
        if i.op == 'bitcast':
            return self._sizes(scope[i.operands[0]], scope)
        return [(array.bytes(), 0) for array in i.arrays]

    def _handed_on(self, i):
        """(places of a fusion's results, names of its parameters): buffers that it neither reads nor writes.

        A collective that runs beside several fusions goes through them as a chain of buffers, results that are operands
        again. The first fusion starts it, and there it counts: as an operand that is read and a result that is written.
        """
        inner = self._program.computations[i.called('calls')]
        last, names = hlo.root(inner), hlo.parameters(inner)
        aliases = re.findall(r'\{(\d*)\}: \((\d+), \{\}\)', i.attributes.partition('output_to_operand_aliasing=')[2])
        outputs, handed = set(), set()
        for place, operand in ((int(place or 0), int(operand)) for place, operand in aliases):
            leaf = inner[last.operands[place]] if last.op == 'tuple' else last
            if leaf.op in ('parameter', 'custom-call', *hlo_collectives.SENT):
                outputs.add(place)
            if leaf.op == 'parameter' or leaf.op in hlo_collectives.SENT:
                handed.add(names[operand])
        return outputs, handed
