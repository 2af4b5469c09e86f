"""What a critic costs in memory: the update of GRPO, with and without a reference, and of PPO, compiled for TPUs.

python -m benchmarks.ppo_memory [--topology=v5e:2x2] [--presets=dr_grpo,grpo,ppo]

Needs libtpu (see grpo_jax.distributed.topology); nothing runs. Qwen2.5-0.5B, float32 master weights and moments cut
over fsdp, bfloat16 computation, 32 prompts x 8 completions of 256 + 1024 tokens in 8 microbatches, layers recomputed.
"""
import argparse
import os
import time

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}

import jax
import jax.numpy as jnp

from configs import default
from grpo_jax import algorithms
from grpo_jax.distributed import placement, programs, topology
from grpo_jax.learner import optimizer as optimizers
from grpo_jax.models import hf
from grpo_jax.preflight import plan as plans

SHAPES = placement.Shapes(prompts=32, group_size=8, queries=256, tokens=1024)


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--topology', default='v5e:2x2')
    parser.add_argument('--presets', default='dr_grpo,grpo,ppo')
    arguments = parser.parse_args()
    devices = len(topology.devices(arguments.topology))
    mesh = topology.mesh(arguments.topology, {'data': 1, 'fsdp': devices, 'tensor': 1})
    config = default.get_config()
    optimizer = optimizers.make(config.optimizer, 100)
    c = hf.load_config(os.path.join(plans.MODELS, 'Qwen2.5-0.5B'))
    print(f'jax {jax.__version__}, {arguments.topology}, MiB of one device; state: weights, moments, reference, critic')
    for preset in arguments.presets.split(','):
        began = time.monotonic()
        method = algorithms.make(default.get_config(preset).algorithm)
        learner = placement.make_learner(
            c, method, optimizer, mesh, SHAPES, dtype=jnp.bfloat16, epochs=1, minibatches=1,
            microbatches=8, chunk=1024, remat=True, temperature=1.0, critic_optimizer=optimizer, value_clip=0.2)
        memory = learner.update.memory
        state = programs.device_bytes(learner.state)
        print(f'{preset:8} state {state / 2**20:7.0f}  arguments {memory.argument_size_in_bytes / 2**20:7.0f}  '
              f'temporaries {memory.temp_size_in_bytes / 2**20:7.0f}  '
              f'compiled in {time.monotonic() - began:.0f} s', flush=True)


if __name__ == '__main__':
    main()
