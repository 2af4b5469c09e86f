"""How long the demo is silent: from the start of the command to its first row, with a cold and a warm cache.

python -m benchmarks.first_step [--other=FOLDER] [--runs=3]

Two commands: the demo, whose first row is that of the cold start's first update, and the same without a cold start,
whose first row is that of GRPO's first step. Each is ended when its row is on the disk. Seconds are wall and CPU of the
command with its children, medians; --other is another checkout, which takes turns with this one.
"""

import argparse
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import environment

ROOT = pathlib.Path(__file__).parent.parent
COMMANDS = {  # name -> (flags, the file of the first row)
    'cold start': ([], 'cold_start/metrics.jsonl'),
    'GRPO': (['--config.supervised.updates=0'], 'metrics.jsonl'),
}
TIMEOUT = 600  # seconds


def first_row(checkout: pathlib.Path, flags: list[str], row: str, cache: str) -> tuple[float, float]:
    """(wall, CPU) seconds from the start of the demo in a checkout until the file `row` in its workdir has a row."""
    with tempfile.TemporaryDirectory() as workdir:
        kept = {'JAX_PLATFORMS': 'cpu', 'JAX_COMPILATION_CACHE_DIR': cache, 'PYTHONPATH': str(checkout)}
        command = [sys.executable, '-m', 'grpo_jax.train', '--config=configs/arithmetic.py', f'--workdir={workdir}']
        began, path = time.monotonic(), pathlib.Path(workdir, row)
        process = subprocess.Popen(
            [*command, *flags],
            cwd=checkout,
            env=os.environ | kept,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (path.exists() and path.stat().st_size):
                if process.poll() is not None or time.monotonic() - began > TIMEOUT:
                    raise RuntimeError(f'{command} has no row after {time.monotonic() - began:.0f} s')
                time.sleep(0.05)
            return time.monotonic() - began, cpu_seconds(process.pid)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def cpu_seconds(pid: int) -> float:
    """CPU-seconds of a process so far, and of its children that have ended."""
    with open(f'/proc/{pid}/stat', encoding='utf8') as stat:
        times = stat.read().rpartition(')')[2].split()[11:15]
    return sum(map(int, times)) / os.sysconf('SC_CLK_TCK')


def main():
    """Prints a table of medians, with all runs' wall seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--other', type=pathlib.Path, help='another checkout')
    parser.add_argument('--runs', type=int, default=3)
    arguments = parser.parse_args()
    checkouts = {'other': arguments.other.resolve()} if arguments.other else {}
    checkouts |= {'here': ROOT}
    seconds: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    print(environment.describe(), flush=True)
    for _ in range(arguments.runs):
        for name, (flags, row) in COMMANDS.items():
            for which, checkout in checkouts.items():
                cache = tempfile.mkdtemp()
                for kind in ('cold', 'warm'):
                    measured = first_row(checkout, flags, row, cache)
                    seconds.setdefault((name, kind, which), []).append(measured)
                    print(f'{name}, {kind}, {which}: wall {measured[0]:.1f}, CPU {measured[1]:.1f}', flush=True)
                shutil.rmtree(cache)
    for (name, kind, which), runs in sorted(seconds.items()):
        wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        every = ', '.join(f'{run[0]:.1f}' for run in runs)
        print(f'| {name} | {kind} | {which} | {wall:.1f} | {cpu:.1f} | {every} |')


if __name__ == '__main__':
    main()
