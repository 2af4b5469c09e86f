"""Figures of accelerator chips that a run reads; sizes of slices, and memory of GPUs: tools/preflight/topology.py."""

from collections.abc import Sequence
from typing import NamedTuple

LANES = 128  # in a TPU's vector register
LINES = 16  # that a TPU writes at once: the height of a bfloat16 tile


class Chip(NamedTuple):
    """Figures of a kind of chip, as its maker publishes them (except memory); 0: not known."""

    flops: float = 0.0  # a second, bfloat16
    bandwidth: float = 0.0  # bytes a second, to and from main memory
    memory: float = 0.0  # bytes that a program may use, from the message of libtpu 0.0.42 when they do not suffice
    link: tuple[float, float] = (0.0, 0.0)  # bytes a second that a link sends: the lowest and the highest published
    ring: int = 1  # a side of a slice is a ring if its length is a multiple of this
    network: float = 0.0  # bytes a second to other slices, its share of the host's network cards
    cores: int = 1  # cores of a device, which share a program

    def links(self, sides: Sequence[int]) -> tuple[float, float]:
        """(least, most) bytes a second that a chip sends over all its links, in a slice with sides of these lengths.

        The least is for a chip in a corner and the lower figure in `link`. Along a side of two chips, a chip has one
        link. Along a longer one it has two, except at the ends of a side that is no ring.
        """
        corner = sum(1 if side % self.ring else 2 for side in sides if side > 2) + sum(side == 2 for side in sides)
        most = sum(min(side - 1, 2) for side in sides)
        return corner * self.link[0], most * self.link[1]


GIB = 2**30
TPUS = {
    'v4': Chip(flops=275e12, bandwidth=1228e9, memory=30.75 * GIB, link=(45e9, 50e9), ring=4, network=6.25e9, cores=2),
    'v5e': Chip(flops=197e12, bandwidth=819e9, memory=15.75 * GIB, link=(45e9, 50e9), ring=16, network=3.125e9),
    'v5p': Chip(
        flops=459e12, bandwidth=2765e9, memory=95.74 * GIB, link=(90e9, 100e9), ring=4, network=6.25e9, cores=2
    ),
    'v6e': Chip(flops=918e12, bandwidth=1640e9, memory=31.25 * GIB, link=(90e9, 100e9), ring=16, network=12.5e9),
}
# text in the name of a device's kind -> Chip; the first match counts
KINDS = {
    'v5 lite': TPUS['v5e'],
    'v5e': TPUS['v5e'],
    'v5': TPUS['v5p'],
    'v6': TPUS['v6e'],
    'v4': TPUS['v4'],
    'H200': Chip(flops=989e12, bandwidth=4800e9),
    'H100': Chip(flops=989e12, bandwidth=3350e9),
    'A100': Chip(flops=312e12, bandwidth=2039e9),
}


def lookup(device_kind: str) -> Chip | None:
    """The Chip for a device kind, like 'TPU v5 lite'; None for a kind that is not in the table."""
    return next((chip for name, chip in KINDS.items() if name in device_kind), None)
