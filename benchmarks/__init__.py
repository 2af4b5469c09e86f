"""Measurements, each `python -m benchmarks.X`; figures that were measured are in README.md.

One thread, so that CPU-seconds mean work and not waiting; set here, before anything imports jax.
"""

import os

os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1'
)
