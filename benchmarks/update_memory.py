"""Memory of an update by preset, by what is recomputed and by what waits in the hosts' memory, compiled for TPUs.

python -m benchmarks.update_memory [--topology=v5e:2x2] [--only=ppo]

Needs libtpu (see grpo_jax.tools.preflight.topology); nothing runs. Qwen2.5-0.5B, float32 master weights and moments cut
over fsdp, bfloat16 computation, 32 prompts x 8 completions of 256 + 1024 tokens in 16 microbatches.
"""

import argparse
import os
import time

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}

import jax

from grpo_jax import algorithms
from grpo_jax.configs import default
from grpo_jax.learner import Learning, Optimization, Optimizers, build_optimizer
from grpo_jax.learner.programs import make_learner
from grpo_jax.models.hf import families
from grpo_jax.sharding import batches, compiled
from grpo_jax.tools.preflight import compiler, topology
from grpo_jax.tools.preflight import plan as plans

SHAPES = batches.Shapes(prompts=32, group_size=8, queries=256, tokens=1024)
CASES = (
    ('dr_grpo', 'full', ()),
    ('grpo', 'full', ()),
    ('ppo', 'full', ()),
    ('grpo', 'none', ()),
    ('grpo', 'dots', ()),
    ('grpo', 'full', ('optimizer',)),
    ('grpo', 'full', ('optimizer', 'reference')),
)


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--topology', default='v5e:2x2')
    parser.add_argument('--only', default='', help='a preset')
    arguments = parser.parse_args()
    devices = len(topology.devices(arguments.topology))
    mesh = topology.mesh(arguments.topology, {'data': 1, 'fsdp': devices, 'tensor': 1})
    optimizer = build_optimizer(Optimization.from_config(default.get_config().optimizer), 100)
    model_config = families.load_config(os.path.join(plans.MODELS, 'Qwen2.5-0.5B'))
    print(f'jax {jax.__version__}, {arguments.topology}, MiB of one device; state: weights, moments, reference, critic')
    for preset, remat, offload in CASES:
        if arguments.only not in ('', preset):
            continue
        started = time.monotonic()
        learning = Learning(
            microbatches=16, chunk=1024, remat=remat, offload=frozenset(offload), dtype='bfloat16', value_clip=0.2
        )
        learner = make_learner(
            model_config,
            algorithms.make(default.get_config(preset).algorithm),
            Optimizers(optimizer, optimizer),
            mesh,
            SHAPES,
            learning,
        )
        print(
            f'{preset:8} remat {remat:5} offload {"+".join(offload) or "-":20} '
            f'state {compiled.device_bytes(learner.abstract_state) / 2**20:7.0f}  {needs(learner.update.program)}  '
            f'compiled in {time.monotonic() - started:.0f} s',
            flush=True,
        )


def needs(program):
    """Its arguments and temporaries, or what the compiler says that it would need in all."""
    try:
        memory = program.compile().memory
    except jax.errors.JaxRuntimeError as error:
        return f'refused: {compiler.needed_bytes(str(error)) / 2**20:.0f} in all'
    return (
        f'arguments {memory.argument_size_in_bytes / 2**20:7.0f}  temporaries {memory.temp_size_in_bytes / 2**20:7.0f}'
    )


if __name__ == '__main__':
    main()
