"""What every benchmark prints and how it times: environment, the machine's matrix rate, interleaved CPU-seconds."""

from collections.abc import Callable, Mapping
import os
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp


def describe() -> str:
    """One line: processor, cores, Python, jax, device, load."""
    cpu = platform.processor() or 'CPU'
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo', encoding='utf8') as lines:
            cpu = next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), cpu)
    return (
        f'{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}, '
        f'{jax.devices()[0].device_kind}, load {os.getloadavg()[0]:.1f}'
    )


def matrix_rate(size: int = 1024, repeats: int = 7) -> float:
    """Measured FLOP per CPU-second of a square float32 matrix product."""
    x = jnp.ones((size, size))
    product = jax.jit(lambda x: x @ x).lower(x).compile()
    seconds, _ = interleaved({'product': lambda: jax.block_until_ready(product(x))}, repeats)
    return 2 * size**3 / seconds['product']


def interleaved(
    candidates: Mapping[str, Callable], repeats: int, clock: Callable[[], float] = time.process_time
) -> tuple[dict[str, float], dict[str, Any]]:
    """(median CPU-seconds, last result) by name of callables, warmed up before, that run in turn `repeats` times.

    The seconds are those of another clock, where it is given.
    """
    seconds, results = {name: [] for name in candidates}, {}
    for _ in range(repeats):
        for name, run in candidates.items():
            started = clock()
            results[name] = run()
            seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}, results
