"""Compiles decoding in kernels for a topology: python tests/compile_kernels.py TOPOLOGY. Prints each program's name."""

import dataclasses
import os
import sys

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from grpo_jax import sampler
from grpo_jax.models import families
from grpo_jax.preflight import hlo, plan, topology
from grpo_jax.sampler import schedule
from grpo_jax.sampler.programs import make_sampler
from grpo_jax.sharding import batches
from grpo_jax.sharding.mesh import Devices

# on a device: 2 heads of 64, 16 rows of 4 groups; 2 heads of 128, 3 rows
CASES = ('Qwen2.5-0.5B', {'data': 4}, 16, 4), ('Qwen2.5-7B', {'data': 2, 'tensor': 2}, 6, 1)
for name, axes, prompts, group in CASES:
    published = families.load_config(os.path.join(plan.MODELS, name))
    model_config = dataclasses.replace(published, layers=2, mlp=512, vocab_size=4096 + 64)
    mesh = topology.mesh(sys.argv[1], axes)
    sampling = sampler.Sampling(1.0, 256, (1,), 0, dtype='bfloat16', kernels='on')
    shapes = batches.Shapes(prompts, group, 50, 256)
    engine = make_sampler(model_config, Devices(mesh, compile_now=False), shapes, sampling, {})
    for program in schedule.largest(engine.schedule):
        if program.kind == 'decode':
            text = engine.programs.trace(program).lower().compile().as_text()
            kernels = [
                i.name
                for scope in hlo.parse(text)[0].values()
                for i in scope.values()
                if 'tpu_custom_call' in i.attributes
            ]
            print(name, program, sorted(kernel.split('.')[0] for kernel in kernels))
