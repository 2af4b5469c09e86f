"""What loading takes: memory beyond the weights that a process holds, bytes read, seconds.

python -m benchmarks.loading [--layers=28]

A checkpoint of Qwen2.5-1.5B's shapes (28 layers), random bfloat16 numbers in 6 shards, is written to a temporary folder
and loaded by new processes: by one with 8 fake devices, by two with 4 each, and by one with a device. Memory is the
highest of the process's life, less what it had before it loaded, once all was imported; bytes are those that it asked
files for. The shards are in the memory of the operating system by then: seconds are those of reading, not of a disk.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks import environment
from grpo_jax.hosts import processes
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.hf import names as tensor_names
from grpo_jax.sharding import mesh, specs

ROOT = pathlib.Path(__file__).parent.parent
SHARDS = 6
MIB = 2**20


def write(folder, changes, shards=SHARDS):
    """Writes a folder of Qwen2.5-1.5B's config with these changes and bfloat16 weights in that many shards."""
    folder = pathlib.Path(folder)
    config = json.loads(pathlib.Path(hf.find('configs/models/Qwen2.5-1.5B'), 'config.json').read_text(encoding='utf8'))
    (folder / 'config.json').write_text(json.dumps(config | changes), encoding='utf8')
    c = families.load_config(folder)
    tensors = list(stored_shapes(c))
    pool = (np.random.default_rng(0).standard_normal(2**20) * 0.02).astype(ml_dtypes.bfloat16)
    weight_map = {}
    for shard in range(shards):
        name = f'model-{shard + 1:05}-of-{shards:05}.safetensors'
        chosen = tensors[len(tensors) * shard // shards : len(tensors) * (shard + 1) // shards]
        save_file({tensor: np.resize(pool, shape) for tensor, shape in chosen}, folder / name)
        weight_map |= {tensor: name for tensor, _ in chosen}
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}), encoding='utf8')


def stored_shapes(c):
    """(name, shape) of each tensor of a model as Hugging Face stores it."""
    places = tensor_names.find_tensors(transformer.param_table(c), c).values()
    return {name: place.shape for place in places for name in place.names}.items()


def measure(folder, count, devices):
    """A dict a process of what loading the folder took: `count` processes of that many fake devices each."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
    variables = os.environ | {'JAX_NUM_CPU_DEVICES': str(devices), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
    started = [
        subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.loading', f'--child={folder},{address},{count},{process}'],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f'a process of {count} has ended with {[process.returncode for process in started]}')
    return [json.loads(text) for text in texts]


def load(folder, address, count, process):
    """Loads the folder over all devices and prints a line of JSON."""
    with processes.session(*((address, count, process) if count > 1 else (None, None, None))):
        c = families.load_config(folder)
        shardings = specs.params(transformer.param_table(c), mesh.make({'fsdp': jax.device_count()}))
        jax.block_until_ready(jax.device_put(np.zeros(8)))
        before, read, began = status('VmRSS'), bytes_read(), time.perf_counter()
        params = jax.block_until_ready(hf.load_params(folder, c, shardings))
        seconds = time.perf_counter() - began
        # a part that several devices have is held once
        held = sum(
            shard.data.nbytes
            for array in jax.tree.leaves(params)
            for shard in {str(shard.index): shard for shard in array.addressable_shards}.values()
        )
        figures = {'held': held, 'peak': status('VmHWM') - before, 'read': bytes_read() - read, 'seconds': seconds}
    print(json.dumps(figures))


def status(field):
    """Bytes of this process's memory now (VmRSS), or at its highest (VmHWM; ru_maxrss has that of its parent in it)."""
    text = pathlib.Path('/proc/self/status').read_text(encoding='ascii')
    return int(re.search(rf'{field}:\s*(\d+) kB', text)[1]) * 1024


def bytes_read():
    """Bytes that this process has asked files for."""
    return int(pathlib.Path('/proc/self/io').read_text(encoding='ascii').split()[1])


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--layers', type=int, default=28)
    parser.add_argument('--child', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, address, count, process = arguments.child.rsplit(',', 3)
        load(folder, address, int(count), int(process))
        return
    print(environment.describe())
    folder = tempfile.mkdtemp(prefix='loading')
    try:
        write(folder, {'num_hidden_layers': arguments.layers})
        print('processes devices   held MiB   peak MiB  peak/held   read MiB  seconds')
        for count, devices in [(1, 8), (2, 4), (1, 1)]:
            for row in measure(folder, count, devices):
                held, peak, read = (row[name] / MIB for name in ('held', 'peak', 'read'))
                print(
                    f'{count:9} {devices:7} {held:10.0f} {peak:10.0f} {peak / held:10.3f} {read:10.0f} '
                    f'{row["seconds"]:8.1f}',
                    flush=True,
                )
    finally:
        shutil.rmtree(folder)


if __name__ == '__main__':
    main()
