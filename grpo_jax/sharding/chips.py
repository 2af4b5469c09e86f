"""Figures of accelerator chips, in one table."""

from typing import NamedTuple


class Chip(NamedTuple):
    """Figures of a kind of chip, as its maker gives them, but for memory; 0: not known."""

    flops: float = 0.0  # a second, bfloat16
    bandwidth: float = 0.0  # bytes a second of main memory
    memory: float = 0.0  # bytes that a program may use, from the message of libtpu 0.0.42 when they do not suffice
    links: float = 0.0  # bytes a second that a chip sends to its neighbours, over all links together
    network: float = 0.0  # bytes a second to other slices, over its share of the host's network cards
    cores: int = 1  # cores of a device, which share a program


GIB = 2**30
TPUS = {
    'v4': Chip(flops=275e12, bandwidth=1228e9, memory=30.75 * GIB, links=300e9, network=6.25e9, cores=2),
    'v5e': Chip(flops=197e12, bandwidth=819e9, memory=15.75 * GIB, links=200e9, network=3.125e9),
    'v5p': Chip(flops=459e12, bandwidth=2765e9, memory=95.74 * GIB, links=600e9, network=6.25e9, cores=2),
    'v6e': Chip(flops=918e12, bandwidth=1640e9, memory=31.25 * GIB, links=400e9, network=12.5e9),
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
