"""Counts the bytes that a compiled program reads from and writes to HBM, from its text.

The text shows layouts and memory spaces. Only operands and results in HBM count.
"""

from collections.abc import Iterable
import math
import re

from grpo_jax.tools.preflight import hlo, hlo_collectives
from grpo_jax.tools.preflight.hlo import Instruction, Scope

# operations that move nothing, or whose bytes were counted at their start
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
    """Counts the HBM bytes of a program, or of one decode step.

    `reread` is the most bytes that may come on top: an update in place reads tiles that it fills in part, unless the
    hardware can write less than a tile. `unknown` is the number of loops without a trip count, which count once.
    """

    def __init__(self, text: str):
        self._program = hlo.parse(text)
        self.reread, self.unknown = 0, 0
        self.by_instruction: dict[str, int] = {}  # bytes, to see which instruction costs too much

    def count_step(self, blocks: Iterable[int]) -> float:
        """Returns the HBM bytes of one pass of the decode loop; blocks: how many cache blocks each chunk reads."""
        blocks_left = iter(blocks)
        _, body = hlo.decode_loop(self._program)
        total = hlo.Walk(self._program, blocks_left, self._count_instruction).total(body)
        assert next(blocks_left, None) is None, 'fewer loops over blocks than chunks'
        return total

    def count_program(self, trip_counts: Iterable[int]) -> float:
        """Returns the HBM bytes of the whole program; trip_counts: of the loops whose text has no count, in order."""
        walk = hlo.Walk(self._program, iter(trip_counts), self._count_instruction)
        total = walk.total(self._program.entry)
        self.unknown += walk.unknown
        return total

    def _count_instruction(self, i: Instruction, scope: Scope, times: int) -> int:
        """The HBM bytes of one run of an instruction; adds the bytes of `times` runs to by_instruction and reread."""
        if i.op in NO_TRAFFIC:
            return 0
        moved = self._bytes_moved(i, scope)
        self.by_instruction[i.name] = moved * times
        self.reread += times * sum(partial for _, partial in self._bytes_written(i, scope))
        return moved

    def _bytes_moved(self, i, scope):
        """HBM bytes that one run of an instruction reads and writes."""
        estimate = re.search(r'"bytes_accessed":"(\d+)"', i.attributes) if i.op == 'custom-call' else None
        if estimate:  # a kernel reads only blocks of its operands; its cost estimate has their bytes
            return int(estimate[1])
        if i.op == 'copy-start':  # its result is (copy, original, token)
            return sum(array.bytes() for array in i.arrays[:2] if array.hbm)
        if i.op in ('slice-start', 'dynamic-slice-start'):  # (whole, slice, token); only the slice is read
            whole, part = i.arrays[:2]
            return part.bytes() * (whole.hbm + part.hbm)
        total = sum(n for n, _ in self._bytes_written(i, scope))
        for position, name in enumerate(i.operands):
            if any(array.hbm for array in scope[name].arrays):
                total += self._bytes_read(i, position, scope)
        return total

    def _bytes_read(self, i, position, scope):
        """Bytes that instruction `i` reads from its operand number `position`, which lies in HBM.

        An instruction that slices reads only the slice; one that updates in place, or ends a collective, reads nothing.
        """
        whole = scope[i.operands[position]].bytes
        if position == 0 and i.op in ('dynamic-slice', 'slice', 'gather'):
            return min(i.bytes, whole)
        if position == 0 and i.op == 'dynamic-update-slice':
            return 0  # in place: the array itself is not read
        if i.op == 'fusion':
            inner = self._program.computations[i.called_name('calls')]
            if 'custom_call_target="AsyncCollectiveDone"' in hlo.root(inner).attributes:
                return 0  # it only waits for a collective that another fusion started
            name = hlo.parameters(inner)[position]
            return self._bytes_used(inner, name, name in self._passed_buffers(i)[1])
        return whole

    def _bytes_used(self, inner, name, handed_on=False):
        """Bytes that a fused computation reads from its parameter or instruction `name`.

        handed_on: whether `name` is the buffer of a running collective. The reads of collectives and of the result then
        do not count, see _passed_buffers.
        """
        total = inner[name].bytes if inner[name].root else 0
        for user in inner.values():
            for position, operand in enumerate(user.operands):
                if operand != name or (handed_on and (user.root or user.op in hlo_collectives.SENT)):
                    continue
                total += (
                    self._bytes_used(inner, user.name)
                    if self._renames(user)
                    else self._bytes_read(user, position, inner)
                )
        return min(total, inner[name].bytes)

    def _renames(self, i):
        """Whether an instruction is a bitcast, or a fusion of bitcasts, which move nothing."""
        if i.op != 'fusion':
            return i.op == 'bitcast'
        inner = self._program.computations[i.called_name('calls')]
        return all(x.op in ('parameter', 'bitcast') for x in inner.values())

    def _bytes_written(self, i, scope):
        """[(bytes written to HBM, how many of these lie in partly filled tiles)] for each result of an instruction."""
        sizes = self._result_sizes(i, scope)
        if i.op == 'fusion':
            outputs, _ = self._passed_buffers(i)
            sizes = [(0, 0) if place in outputs else size for place, size in enumerate(sizes)]
        elif i.op in ('collective-permute-start', 'all-gather-start'):  # (operands, results, ...)
            sizes = [(0, 0)] * len(i.operands) + sizes[len(i.operands) :]
        return [size if array.hbm else (0, 0) for array, size in zip(i.arrays, sizes, strict=True)]

    def _result_sizes(self, i, scope):
        """[(bytes, how many of these lie in partly filled tiles)] for each result, in any memory.

        An update in place counts the bytes of the update alone.
        """
        if i.op == 'dynamic-update-slice':
            dims = scope[i.operands[1]].arrays[0].dims
            touched = i.arrays[0].bytes(dims)
            return [(touched, touched if touched > math.prod(dims) * i.arrays[0].item else 0)]
        if i.op == 'fusion':
            inner = self._program.computations[i.called_name('calls')]
            return self._result_sizes(hlo.root(inner), inner)
        if i.op == 'tuple':
            return [n for name in i.operands for n in self._result_sizes(scope[name], scope)]
        if i.op == 'bitcast':
            return self._result_sizes(scope[i.operands[0]], scope)
        return [(array.bytes(), 0) for array in i.arrays]

    def _passed_buffers(self, i):
        """(positions of results, names of parameters) whose buffers a fusion only passes on, as two sets.

        A collective that runs beside several fusions passes through them as a chain of buffers: results of one fusion
        are operands of the next. The first fusion starts the collective, and alone counts: one read, one write.
        """
        inner = self._program.computations[i.called_name('calls')]
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
