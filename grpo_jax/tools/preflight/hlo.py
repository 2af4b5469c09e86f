"""Parses the text of a compiled program, and sums the costs of its instructions over all loops.

cost_analysis() does not serve: it counts a loop's body once whatever the trip count, and reads of on-chip memory as
HBM bytes. The compiled text is scheduled, and shows layouts, memory spaces and the limits of loops. The parser reads
the texts of jax 0.10 to 0.12 and libtpu 0.0.42; XLA does not promise to keep their form.
"""

from collections.abc import Callable, Iterator
import functools
import math
import re
from typing import NamedTuple


class Array(NamedTuple):
    """One array of an instruction's result, like bf16[24,896]{1,0:T(8,128)(2,1)S(1)}."""

    item: int  # bytes of an element
    dims: tuple[int, ...]
    order: tuple[int, ...]  # dimensions, the minor one first
    tile: tuple[int, ...]  # sizes of a tile in the last, minor, dimensions
    hbm: bool  # in HBM: the layout names no memory space; S(1) is on the chip

    def bytes(self, dims: tuple[int, ...] | None = None) -> int:
        """Returns the array's bytes in memory with its tiling; with dims, the bytes of a slice of these dims."""
        sizes = [(dims or self.dims)[i] for i in self.order]
        for i, width in enumerate(reversed(self.tile[-len(sizes) :] if sizes else ())):
            sizes[i] = -(-sizes[i] // width) * width
        return math.prod(sizes) * self.item


class Instruction(NamedTuple):
    """One instruction, a line of the text."""

    name: str
    op: str
    arrays: list[Array]  # one for each leaf of the result
    operands: list[str]  # names of instructions
    inside: str  # text between the operation's parentheses
    attributes: str  # text after the parentheses
    root: bool  # whether it is the computation's result

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes() for array in self.arrays)

    def called_name(self, role: str) -> str:
        """Returns the name of the computation that the instruction calls in a role, such as 'body'."""
        return require_match(rf'{role}=%([\w.-]+)', self.attributes)[1]

    @property
    def index(self) -> int:
        """The position that a get-tuple-element reads in its tuple."""
        return int(require_match(r'index=(\d+)', self.attributes)[1])


Scope = dict[str, Instruction]  # a computation: its instructions by name
Computations = dict[str, Scope]


class Parsed(NamedTuple):
    """A parsed text: its computations by name, and the name of the entry computation."""

    computations: Computations
    entry: str


ITEM_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4}


@functools.lru_cache(1)  # one text is parsed three times: for traffic, collectives and products
def parse(text: str) -> Parsed:
    """Parses a compiled program's text into computations and instructions."""
    computations, entry, lines = {}, '', None
    for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
        head = re.match(r'(ENTRY )?%([\w.-]+) \(.*\{$', line)
        if head:
            lines = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith('  ') and lines is not None:
            instruction = _parse_instruction(line)
            lines[instruction.name] = instruction
    return Parsed(computations, entry)


def _parse_instruction(line):
    """The Instruction of a line like `  ROOT %name = f32[2]{0} add(%a, %b), attributes`."""
    head = require_match(r' +(ROOT )?%([\w.-]+) = ', line)
    rest = line[head.end() :]
    end = _closing_parenthesis(rest) if rest.startswith('(') else rest.index(' ')
    shape, rest = rest[:end], rest[end:].lstrip()
    op, rest = rest[: rest.index('(')], rest[rest.index('(') :]
    end = _closing_parenthesis(rest)
    inside = rest[1 : end - 1]
    arrays = []
    for kind, dims, layout in re.findall(r'(\w+)\[([\d,]*)\](?:\{([^}]*)\})?', shape):
        sizes, order = (tuple(int(n) for n in re.findall(r'\d+', part)) for part in (dims, layout.partition(':')[0]))
        tile = re.search(r':T\(([\d,]+)\)', layout)
        tiling = tuple(map(int, tile[1].split(','))) if tile else ()
        arrays.append(Array(ITEM_BYTES.get(kind, 0), sizes, order, tiling, 'S(' not in layout))
    return Instruction(head[2], op, arrays, re.findall(r'%([\w.-]+)', inside), inside, rest[end:], bool(head[1]))


def require_match(pattern: str, text: str) -> re.Match[str]:
    """Returns the first match of a pattern; raises ValueError without a match."""
    first = re.search(pattern, text)
    if first is None:
        raise ValueError(f'no {pattern} in {text}')
    return first


def _closing_parenthesis(text):
    """The index just after the parenthesis that closes the one at the start of the text."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == '(') - (letter == ')')
        if not depth:
            return i + 1
    raise ValueError(text)


def root(scope: Scope) -> Instruction:
    """Returns the instruction that gives a computation's result."""
    return next(i for i in scope.values() if i.root)


def parameters(scope: Scope) -> list[str]:
    """Returns the names of a computation's parameters, in order."""
    by_place = {int(i.inside): i.name for i in scope.values() if i.op == 'parameter'}
    return [by_place[place] for place in range(len(by_place))]


def branches(conditional: Instruction) -> list[str]:
    """Returns the names of the computations that a conditional chooses from."""
    named = re.search(r'branch_computations=\{([^}]*)\}', conditional.attributes)
    return (
        re.findall(r'%([\w.-]+)', named[1])
        if named
        else [conditional.called_name(f'{role}_computation') for role in ('true', 'false')]
    )


def decode_loop(program: Parsed) -> list[str]:
    """Returns the names [condition, body] of the decode loop: the first loop of the entry with an inner loop."""
    for i in program.computations[program.entry].values():
        if i.op == 'while' and any(x.op == 'while' for x in program.computations[i.called_name('body')].values()):
            return [i.called_name(role) for role in ('condition', 'body')]
    raise ValueError('no loop over steps')


class Walk:
    """Sums the cost of a program's instructions over all loops, and over the costliest branch of each conditional.

    trip_counts: of the loops whose text has no count, in order. Further such loops count once, and `unknown` counts
    them. cost(instruction, scope, times): the cost of one run of an instruction that is no loop, call or conditional;
    times, how often it runs, is for callers that keep their own counts.
    """

    def __init__(self, program: Parsed, trip_counts: Iterator[int], cost: Callable[[Instruction, Scope, int], float]):
        self.computations, self.unknown = program.computations, 0
        self._counts_left, self._cost = trip_counts, cost

    def total(self, name: str, times: int = 1) -> float:
        """Returns the cost of one run of the computation `name`; times: how often the program runs it, for `cost`."""
        scope, total = self.computations[name], 0
        for i in scope.values():
            if i.op == 'while':
                count = trip_count(i, scope, self.computations)
                count = next(self._counts_left, None) if count is None else count
                self.unknown += count is None
                count = 1 if count is None else count
                total += count * sum(self.total(i.called_name(role), times * count) for role in ('condition', 'body'))
            elif i.op in ('call', 'async-start'):
                total += self.total(i.called_name('calls' if i.op == 'async-start' else 'to_apply'), times)
            elif i.op == 'conditional':
                total += max(self.total(branch, times) for branch in branches(i))
            else:
                total += self._cost(i, scope, times)
        return total


def trip_count(loop: Instruction, scope: Scope, computations: Computations) -> int | None:
    """Returns a loop's trip count, (limit - start) / step of the counter; None when the text shows no limit.

    scope: the computation with the loop. An unknown start counts as 0 and an unknown step as 1; XLA's loops of windowed
    products step by 2.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = computations[loop.called_name('condition')]
    test = root(condition)
    if test.op != 'compare' or 'direction=LT' not in test.attributes:
        return None
    start, entered = scope[loop.operands[0]], {}
    for name, place in _tuple_elements(condition).items():  # values on entry to the loop
        entered[name] = integer_value(start.operands[place], scope, computations, {}) if start.op == 'tuple' else None
    limit = integer_value(test.operands[1], condition, computations, entered)
    if limit is None:
        return None
    number = condition[test.operands[0]]
    if number.op != 'get-tuple-element':
        return limit
    body = computations[loop.called_name('body')]
    following = root(body).operands[number.index] if root(body).op == 'tuple' else root(body).name
    from_zero = {name: 0 if place == number.index else None for name, place in _tuple_elements(body).items()}
    step = integer_value(following, body, computations, from_zero)
    return max(-(-(limit - (entered[number.name] or 0)) // (step or 1)), 0)


def _tuple_elements(scope):
    """{name: index} of the instructions that read an element of the computation's parameter, a tuple."""
    reads = [i for i in scope.values() if i.op == 'get-tuple-element' and scope[i.operands[0]].op == 'parameter']
    return {i.name: i.index for i in reads}


SAME_VALUE = 'copy', 'bitcast', 'reshape', 'convert', 'copy-done', 'copy-start'
ARITHMETIC = {'add': int.__add__, 'subtract': int.__sub__, 'multiply': int.__mul__}


def integer_value(name: str, scope: Scope, computations: Computations, known: dict[str, int | None]) -> int | None:
    """Returns an instruction's integer result; None when the text does not determine it.

    known: {name: result, or None} of instructions whose results are given.
    """
    if name in known:
        return known[name]
    i = scope[name]
    if i.op == 'constant':
        return int(i.inside) if re.fullmatch(r'-?\d+', i.inside) else None
    if i.op in SAME_VALUE:
        return integer_value(i.operands[0], scope, computations, known)
    if i.op == 'get-tuple-element' and scope[i.operands[0]].op == 'tuple':
        return integer_value(scope[i.operands[0]].operands[i.index], scope, computations, known)
    if i.op == 'fusion':
        inner = computations[i.called_name('calls')]
        values = [integer_value(operand, scope, computations, known) for operand in i.operands]
        return integer_value(root(inner).name, inner, computations, dict(zip(parameters(inner), values, strict=True)))
    if i.op in ARITHMETIC:
        first, second = (integer_value(operand, scope, computations, known) for operand in i.operands)
        return None if first is None or second is None else ARITHMETIC[i.op](first, second)
    return None
