"""Figures of accelerator chips, in one table."""

from collections.abc import Sequence
from typing import NamedTuple

LANES = 128  # of a TPU's vector register
LINES = 16  # that a TPU writes at once: of a bfloat16 tile


class Chip(NamedTuple):
    """Figures of a kind of chip, as its maker gives them, but for memory; 0: not known."""

    flops: float = 0.0  # a second, bfloat16
    bandwidth: float = 0.0  # bytes a second of main memory
    memory: float = 0.0  # bytes that a program may use, from the message of libtpu 0.0.42 when they do not suffice
    link: tuple[float, float] = (0.0, 0.0)  # bytes a second that a link sends, the least and the most published
    ring: int = 1  # a side of a slice is closed to a ring where it is a multiple of this
    network: float = 0.0  # bytes a second to other slices, over its share of the host's network cards
    cores: int = 1  # cores of a device, which share a program

    def links(self, sides: Sequence[int]) -> tuple[float, float]:
        """Bytes a second that a chip of a slice sends over all its links: in a corner, at the lower figure; the most.

        Along a side of two chips there is one link, and along a longer one there are two, but for its ends where it is
        no ring.
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
# the first of these texts that the name of a device's kind contains names the chip
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
    """The Chip of a device kind's name, like 'TPU v5 lite'; None for a name that is not in the table."""
    return next((chip for name, chip in KINDS.items() if name in device_kind), None)
