"""The text of a compiled program, parsed: its computations, and what their instructions cost over all loops.

cost_analysis() will not do: it counts the body of a loop once, whatever its trip count, and reads of on-chip memory
as bytes. The compiled text is scheduled and has layouts and memory spaces, and the loops with their limits. XLA does
not promise to keep the form of this text; it is that of jax 0.10 to 0.12 and libtpu 0.0.42.
"""

from collections.abc import Callable, Iterator
import functools
import math
import re
from typing import NamedTuple


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

    @property
    def bytes(self) -> int:
        """Bytes of its result."""
        return sum(array.bytes() for array in self.arrays)

    def called(self, role: str) -> str:
        """The name of the computation that it calls in a role, such as body."""
        return match(rf'{role}=%([\w.-]+)', self.attributes)[1]

    @property
    def index(self) -> int:
        """The place in a tuple that a get-tuple-element takes."""
        return int(match(r'index=(\d+)', self.attributes)[1])


Scope = dict[str, Instruction]  # a computation: its instructions by name
Computations = dict[str, Scope]


class Parsed(NamedTuple):
    """A parsed text."""

    computations: Computations
    entry: str


ITEM = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4}


@functools.lru_cache(1)  # a text is read for its traffic, its collectives and its products
def parse(text: str) -> Parsed:
    """Parsed of a text."""
    computations, entry, lines = {}, '', None
    for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
        head = re.match(r'(ENTRY )?%([\w.-]+) \(.*\{$', line)
        if head:
            lines = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith('  ') and lines is not None:
            instruction = _instruction(line)
            lines[instruction.name] = instruction
    return Parsed(computations, entry)


def _instruction(line):
    head = match(r' +(ROOT )?%([\w.-]+) = ', line)
    rest = line[head.end() :]
    end = _closing(rest) if rest.startswith('(') else rest.index(' ')
    shape, rest = rest[:end], rest[end:].lstrip()
    op, rest = rest[: rest.index('(')], rest[rest.index('(') :]
    end = _closing(rest)
    inside = rest[1 : end - 1]
    arrays = []
    for kind, dims, layout in re.findall(r'(\w+)\[([\d,]*)\](?:\{([^}]*)\})?', shape):
        sizes, order = (tuple(int(n) for n in re.findall(r'\d+', part)) for part in (dims, layout.partition(':')[0]))
        tile = re.search(r':T\(([\d,]+)\)', layout)
        tiling = tuple(map(int, tile[1].split(','))) if tile else ()
        arrays.append(Array(ITEM.get(kind, 0), sizes, order, tiling, 'S(' not in layout))
    return Instruction(head[2], op, arrays, re.findall(r'%([\w.-]+)', inside), inside, rest[end:], bool(head[1]))


def match(pattern: str, text: str) -> re.Match[str]:
    """The first match of a pattern that the text must have."""
    first = re.search(pattern, text)
    if first is None:
        raise ValueError(f'no {pattern} in {text}')
    return first


def _closing(text):
    """The end of the parenthesis that text begins with."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == '(') - (letter == ')')
        if not depth:
            return i + 1
    raise ValueError(text)


def root(scope: Scope) -> Instruction:
    """A computation's result."""
    return next(i for i in scope.values() if i.root)


def parameters(scope: Scope) -> list[str]:
    """Names of a computation's parameters, in order."""
    by_place = {int(i.inside): i.name for i in scope.values() if i.op == 'parameter'}
    return [by_place[place] for place in range(len(by_place))]


def branches(conditional: Instruction) -> list[str]:
    """Names of the computations that a conditional chooses from."""
    named = re.search(r'branch_computations=\{([^}]*)\}', conditional.attributes)
    return (
        re.findall(r'%([\w.-]+)', named[1])
        if named
        else [conditional.called(f'{role}_computation') for role in ('true', 'false')]
    )


def decode_loop(program: Parsed) -> list[str]:
    """[condition, body] of the loop over steps: the outermost loop that has loops (over layers) in it."""
    for i in program.computations[program.entry].values():
        if i.op == 'while' and any(x.op == 'while' for x in program.computations[i.called('body')].values()):
            return [i.called(role) for role in ('condition', 'body')]
    raise ValueError('no loop over steps')


class Walk:
    """A way through a program that sums what its instructions cost, over all loops and the costlier of its branches.

    trip_counts are those of the loops whose text has none, in order; when they are used up, `unknown` loops count once.
    cost(instruction, scope, times) is asked for every instruction that is no loop, call or branch; times is how often
    the instruction runs, for those who keep books of their own.
    """

    def __init__(self, program: Parsed, trip_counts: Iterator[int], cost: Callable[[Instruction, Scope, int], float]):
        self.computations, self.unknown = program.computations, 0
        self._left, self._cost = trip_counts, cost

    def total(self, name: str, times: int = 1) -> float:
        """The sum over a computation."""
        scope, total = self.computations[name], 0
        for i in scope.values():
            if i.op == 'while':
                count = trip_count(i, scope, self.computations)
                count = next(self._left, None) if count is None else count
                self.unknown += count is None
                count = 1 if count is None else count
                total += count * sum(self.total(i.called(role), times * count) for role in ('condition', 'body'))
            elif i.op in ('call', 'async-start'):
                total += self.total(i.called('calls' if i.op == 'async-start' else 'to_apply'), times)
            elif i.op == 'conditional':
                total += max(self.total(branch, times) for branch in branches(i))
            else:
                total += self._cost(i, scope, times)
        return total


def trip_count(loop: Instruction, scope: Scope, computations: Computations) -> int | None:
    """How often a loop runs, where the text tells: (limit - start) / step of the number that its condition compares.

    A number whose start or step is not told begins at 0 and goes up by 1. The loops of a windowed product, which are
    unrolled, step by 2.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = computations[loop.called('condition')]
    test = root(condition)
    if test.op != 'compare' or 'direction=LT' not in test.attributes:
        return None
    start, entered = scope[loop.operands[0]], {}
    for name, place in _carried(condition).items():  # the numbers with which the loop is entered
        entered[name] = evaluate(start.operands[place], scope, computations, {}) if start.op == 'tuple' else None
    limit = evaluate(test.operands[1], condition, computations, entered)
    if limit is None:
        return None
    number = condition[test.operands[0]]
    if number.op != 'get-tuple-element':
        return limit
    body = computations[loop.called('body')]
    following = root(body).operands[number.index] if root(body).op == 'tuple' else root(body).name
    from_zero = {name: 0 if place == number.index else None for name, place in _carried(body).items()}
    step = evaluate(following, body, computations, from_zero)
    return max(-(-(limit - (entered[number.name] or 0)) // (step or 1)), 0)


def _carried(scope):
    """{name: its place} of what a computation takes from the tuple that is its parameter."""
    taken = [i for i in scope.values() if i.op == 'get-tuple-element' and scope[i.operands[0]].op == 'parameter']
    return {i.name: i.index for i in taken}


SAME = 'copy', 'bitcast', 'reshape', 'convert', 'copy-done', 'copy-start'
ARITHMETIC = {'add': int.__add__, 'subtract': int.__sub__, 'multiply': int.__mul__}


def evaluate(name: str, scope: Scope, computations: Computations, known: dict[str, int | None]) -> int | None:
    """The whole number that an instruction results in, given those of others; None where it depends on more."""
    if name in known:
        return known[name]
    i = scope[name]
    if i.op == 'constant':
        return int(i.inside) if re.fullmatch(r'-?\d+', i.inside) else None
    if i.op in SAME:
        return evaluate(i.operands[0], scope, computations, known)
    if i.op == 'get-tuple-element' and scope[i.operands[0]].op == 'tuple':
        return evaluate(scope[i.operands[0]].operands[i.index], scope, computations, known)
    if i.op == 'fusion':
        inner = computations[i.called('calls')]
        values = [evaluate(operand, scope, computations, known) for operand in i.operands]
        return evaluate(root(inner).name, inner, computations, dict(zip(parameters(inner), values, strict=True)))
    if i.op in ARITHMETIC:
        first, second = (evaluate(operand, scope, computations, known) for operand in i.operands)
        return None if first is None or second is None else ARITHMETIC[i.op](first, second)
    return None
