"""Compiles decoding in kernels for a topology: python tests/compile_kernels.py TOPOLOGY. Prints each program's name."""

import dataclasses
import os
import sys

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from grpo_jax import sampler
from grpo_jax.models import hf
from grpo_jax.preflight import hlo, plan, topology
from grpo_jax.sampler.programs import make_sampler
from grpo_jax.sharding import batches

# on a device: 2 heads of 64, 16 rows of 4 groups; 2 heads of 128, 3 rows
CASES = ('Qwen2.5-0.5B', {'data': 4}, 16, 4), ('Qwen2.5-7B', {'data': 2, 'tensor': 2}, 6, 1)
for name, axes, prompts, group in CASES:
    published = hf.load_config(os.path.join(plan.MODELS, name))
    c = dataclasses.replace(published, layers=2, mlp=512, vocab_size=4096 + 64)
    mesh = topology.mesh(sys.argv[1], axes)
    engine = make_sampler(
        c,
        mesh,
        batches.Shapes(prompts, group, 50, 256),
        sampler.Sampling(1.0, 256, (1,), 0),
        {},
        dtype='bfloat16',
        cache_dtype='bfloat16',
        weights_dtype='bfloat16',
        budget=0,
        kernels='on',
        ahead=False,
    )
    wanted, _ = engine.programs.traced(engine.visit_largest)
    for program, traced in wanted.items():
        if program.startswith('decode'):
            text = traced.lower().compile().as_text()
            kernels = [
                i.name
                for scope in hlo.parse(text)[0].values()
                for i in scope.values()
                if 'tpu_custom_call' in i.attributes
            ]
            print(name, program, sorted(kernel.split('.')[0] for kernel in kernels))
