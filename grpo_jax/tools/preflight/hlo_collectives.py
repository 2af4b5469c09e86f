"""Lists the collectives in a compiled program's text: which devices communicate, and how much they send."""

from collections.abc import Iterable
import math
import re
from typing import NamedTuple

import numpy as np

from grpo_jax.tools.preflight import hlo


class Collective(NamedTuple):
    """All collectives of a program with the same operation and groups."""

    op: str  # all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute
    groups: list[list[int]]  # positions in the mesh of devices that communicate
    times: int  # how often they run together
    bytes: float  # what a device sends in all of them, over rings


# bytes that one of n devices sends, in units of the bytes of its operand
SENT = {
    'all-gather': lambda n: n - 1,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'ragged-all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
    'collective-broadcast': lambda n: 1,
}


def list_collectives(
    text: str, devices: int, trip_counts: Iterable[int] = (), decoding: bool = False
) -> list[Collective]:
    """Returns the Collectives in a compiled program's text, in order of appearance.

    devices: how many, in all slices; trip_counts: as in Traffic.count_program; decoding: whether only one pass of the
    decode loop counts. A collective that is spread over several fusions counts once.
    """
    program, by_kind, parts = hlo.parse(text), {}, set()

    def cost(i: hlo.Instruction, scope: hlo.Scope, times: int, computation: str = '') -> int:
        """Adds a collective, or the collectives in a fusion, to by_kind; 0, since Walk sums what this returns."""
        op = i.op.removesuffix('-start')
        if i.op == 'fusion':
            inner = program.computations[i.called_name('calls')]
            for x in inner.values():
                cost(x, inner, times, i.called_name('calls'))
        elif op in SENT:
            part = collective_key(i.attributes) if computation else None
            if part is None or part not in parts:
                parts.add(part)
                # XLA fuses a reduction with a slice of its result to a reduce-scatter
                add('reduce-scatter' if 'all-reduce-scatter' in computation else op, i, scope, times)
        return 0

    def add(op, i, scope, times):
        groups = replica_groups(i.attributes, devices)
        size = sum(math.prod(array.dims) * array.item for name in i.operands for array in scope[name].arrays)
        sent = size * (1 if op == 'collective-permute' else SENT[op](len(groups[0])))
        before = by_kind.get((op, str(groups)), Collective(op, groups, 0, 0.0))
        by_kind[op, str(groups)] = before._replace(times=before.times + times, bytes=before.bytes + times * sent)

    walk = hlo.Walk(program, iter(trip_counts), cost)
    for name in hlo.decode_loop(program) if decoding else [program.entry]:
        walk.total(name)
    return list(by_kind.values())


def collective_key(attributes: str) -> tuple[str, ...] | None:
    """Returns the key that the instructions of one collective share when it is spread over fusions; None without a key.

    The key is (channel, chain, name), with '' for what the attributes lack. Channel 1 alone is no key, since all
    collectives of jax.shard_map have it.
    """
    patterns = r'channel_id=(\d+)', r'chain_id="(\d+)"', r'async_collective_name="([^"]+)"'
    channel, chain, name = (match[1] if (match := re.search(p, attributes)) else '' for p in patterns)
    return None if channel in ('', '1') and not chain + name else (channel, chain, name)


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Returns the groups of devices that communicate in a collective, as lists of positions in the mesh."""
    pairs = re.search(r'(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}', attributes)
    if pairs:
        return [[int(n) for n in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', pairs[1])]
    iota = re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes)
    if iota:
        shape, dims, axes = ([int(n) for n in part.split(',')] if part else None for part in iota.groups())
        return np.arange(devices).reshape(dims or ()).transpose(axes).reshape(shape or ()).tolist()
    # mesh['a'=1,'b'=4] {'b'}: the devices form a grid, and a group runs along the named axes;
    # device_ids=([2,8]T(1,0)) gives the grid another order of devices
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
