"""Compiles what runs in kernels: python tests/compile_kernels.py TOPOLOGY MODEL... Prints each program."""

import dataclasses
import os
import sys

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax import sampler
from grpo_jax.learner import Learning, partition
from grpo_jax.models import attention
from grpo_jax.models.hf import families
from grpo_jax.sampler import schedule
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches
from grpo_jax.tools.preflight import hlo, plan, topology


def find_kernels(text):
    """The names of a compiled text's kernels, without their numbers."""
    instructions = [i for scope in hlo.parse(text).computations.values() for i in scope.values()]
    return sorted(i.name.split('.')[0] for i in instructions if 'tpu_custom_call' in i.attributes)


# on a device: 2 heads of 64, 16 rows of 4 groups; 2 heads of 128, 3 rows
CASES = {'Qwen2.5-0.5B': (1, 4, 4), 'Qwen2.5-7B': (2, 3, 1)}
for name in sys.argv[2:]:
    tensor, prompts, group = CASES[name]
    published = families.load_config(os.path.join(plan.MODELS, name))
    model_config = dataclasses.replace(published, layers=2, mlp=512, vocab_size=4096 + 64)
    data = len(topology.devices(sys.argv[1], 1)) // tensor
    mesh = topology.mesh(sys.argv[1], {'data': data, 'tensor': tensor})
    sampling = sampler.Sampling(1.0, 256, (1,), 0, dtype='bfloat16', kernels='on')
    shapes = batches.Shapes(prompts * data, group, 50, 256)
    engine = make_sampler(model_config, mesh, shapes, sampling, {})
    for program in schedule.largest_programs(engine.schedule):
        if program.kind in ('open', 'decode'):
            text = engine.programs.trace(program).lower().compile().as_text()
            print(name, program, find_kernels(text))

    # the learner's attention with its gradients: 7 heads of a head of keys or 4, a window, 640 columns
    mesh_ops = partition.make_mesh_ops(model_config, mesh, Learning())

    def mean(q, k, v, visible, window, attend=mesh_ops.attend):
        return jnp.mean(attend(q, k, v, visible, attention.Rule(window=window)), dtype=jnp.float32)

    rows = NamedSharding(mesh, PartitionSpec('data'))
    heads = model_config.heads, model_config.kv_heads, model_config.kv_heads
    shapes = [(2 * data, 640, count, model_config.head_dim) for count in heads]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows) for shape in shapes]
    visible = jax.ShapeDtypeStruct((2 * data, 640), bool, sharding=rows)
    gradients = jax.jit(jax.value_and_grad(mean, (0, 1, 2)))
    text = gradients.lower(*arrays, visible, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
    print(name, 'attention', find_kernels(text))
