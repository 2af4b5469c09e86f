"""What a long run gathers: memory, threads, open files, children and /dev/shm of a process that saves and renews often.

python -m benchmarks.growth [--steps=3000]

A small run with a checkpoint every 5 steps and a renewal of its reference every 7. Memory is read at every step, after
the C library has handed back what is free, and the least of a sixtieth of the run counts: writes that are under way
come and go by tens of MiB. The slope is that of a line through these without the first tenth, in which programs are
compiled and pools fill.
"""

import argparse
import contextlib
import ctypes
import glob
import os
import pathlib
import tempfile
import threading

import numpy as np

from benchmarks import environment
from grpo_jax import train
from grpo_jax.configs import arithmetic
from grpo_jax.run import measure

READINGS = 60


def get_config(steps):
    """The demo with a small step."""
    config = arithmetic.get_config('grpo')
    config.steps, config.supervised.updates = steps, 0
    config.data.options = {'digits': 1, 'count': 40, 'blurts': 0.5, 'wrong': 0.5}
    config.data.prompts_per_step, config.data.max_prompt_tokens = 4, 6
    config.rollout.group_size, config.rollout.max_tokens = 4, 6
    config.evaluation.every, config.evaluation.prompts, config.evaluation.samples = 0, 2, 4
    config.checkpoint.every, config.log.rollouts = 5, 10
    config.collection.reference, config.collection.reference_every = 'hard', 7
    config.algorithm.kl_coef = 0.04
    return config


def read():
    """KiB, threads, open files, children, files in /dev/shm."""
    children = 0
    for path in glob.glob('/proc/self/task/*/children'):
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            children += len(pathlib.Path(path).read_text(encoding='ascii').split())
    counts = threading.active_count(), len(os.listdir('/proc/self/fd')), children
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return measure.host_mib() * 1024, *counts, len(os.listdir('/dev/shm'))


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--steps', type=int, default=3000)
    steps = parser.parse_args().steps
    print(environment.describe())
    every, all_readings = max(steps // READINGS, 1), []

    def read_all(step, row):
        all_readings.append((step, *read()))

    with tempfile.TemporaryDirectory() as folder:
        train.run(get_config(steps), f'{folder}/run', on_step=read_all)
    windows = [all_readings[start : start + every] for start in range(0, len(all_readings), every)]
    readings = [min(window, key=lambda reading: reading[1]) for window in windows]
    print('  step      MiB threads files children shm')
    for step, memory, *counts in readings[:: len(readings) // 10]:
        print(f'{step:6} {memory / 1024:8.0f} {counts[0]:7} {counts[1]:5} {counts[2]:8} {counts[3]:3}')
    late = np.array(readings[len(readings) // 10 :])
    slope, _ = np.polyfit(late[:, 0], late[:, 1], 1)
    most = np.array(all_readings)[:, 2:].max(0).astype(int).tolist()
    print(f'{slope:.2f} KiB a step from step {late[0, 0]:.0f} on; at most {most}')


if __name__ == '__main__':
    main()
