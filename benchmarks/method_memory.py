"""The memory that GRPO, PPO, DPO and REINFORCE++ need on one chip: what waits there, and what their programs take.

python -m benchmarks.method_memory [--model=Qwen/Qwen2.5-0.5B] [--topology=v5e:1x1] [--presets=grpo,ppo] [--cache=DIR]

Preflight compiles the programs of configs/gsm8k.py for the topology, with 64 completions a step; nothing runs. The
sampler needs the same with each preset and is left out.
"""

import argparse
import os
from typing import NamedTuple

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}

from grpo_jax.configs import gsm8k
from grpo_jax.sharding import compiled
from grpo_jax.tools.preflight import compiler, plan, verdict

PRESETS = ('dr_grpo', 'grpo', 'reinforce_pp', 'dpo', 'ppo')
SIZES = {'data.prompts_per_step': 8, 'learner.microbatches': 8}


class Memory(NamedTuple):
    """Bytes on a device; the last two are what is in use while the programs of that phase run."""

    policy: int
    optimizer: int
    reference: int
    critic: int  # with its own optimizer
    logprobs: int | float
    update: int | float


def make_plan(preset: str, model: str, topology: str) -> plan.PlannedRun:
    """The plan of a run of configs/gsm8k.py in the sizes of the table."""
    return plan.make(plan.change_config(gsm8k.get_config(preset), {'model.path': model} | SIZES), topology)


def held(planned: plan.PlannedRun) -> tuple[int, ...]:
    """Bytes on a device of a plan's policy, optimizer, reference and critic; nothing is compiled."""
    state = planned.learner.abstract_state
    parts = (state.params, state.opt_state, state.ref_params, state.aux.get('critic'))
    return tuple(map(compiled.device_bytes, parts))


def measure(planned: plan.PlannedRun, cache: str) -> Memory:
    """The Memory of a plan, whose learner's programs are compiled; cache: a folder of what was compiled before."""
    jobs = [job for job in plan.list_jobs(planned)[0] if job.phase in ('logprobs', 'update')]
    measured = compiler.measure(jobs, planned, compiler.Compiling(cache, lambda *told: None, 1))
    used = {'logprobs': 0, 'update': 0}
    for job, figures in zip(jobs, measured, strict=True):
        used[job.phase] = max(used[job.phase], verdict.bytes_in_use(job, figures))
    return Memory(*held(planned), **used)


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--model', default='Qwen/Qwen2.5-0.5B')
    parser.add_argument('--topology', default='v5e:1x1')
    parser.add_argument('--presets', default=','.join(PRESETS))
    parser.add_argument('--cache', default='/tmp/grpo_jax_method_memory')
    flags = parser.parse_args()
    for preset in flags.presets.split(','):
        memory = measure(make_plan(preset, flags.model, flags.topology), flags.cache)
        print(f'| `:{preset}` | ' + ' | '.join(f'{size / 2**30:.2f}' for size in memory) + ' |', flush=True)


if __name__ == '__main__':
    main()
