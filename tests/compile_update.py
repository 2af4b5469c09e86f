"""Compiles the update of a model for a topology, and prints what a chip sends by kind of collective, as JSON.

    python tests/compile_update.py MODEL TOPOLOGY FSDP

The batch is configs/gsm8k.py's with as many prompts as chips, in two microbatches.
"""

import json
import os
import sys

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from grpo_jax.configs import gsm8k
from grpo_jax.tools.preflight import compiler, flops, plan

MICROBATCHES = 2

model, topology, fsdp = sys.argv[1:4]
sizes = {'model.path': model, 'data.prompts_per_step': int(fsdp), 'mesh.fsdp': int(fsdp)}
planned = plan.make(plan.change_config(gsm8k.get_config(), sizes | {'learner.microbatches': MICROBATCHES}), topology)
job = next(job for job in plan.list_jobs(planned)[0] if job.name == 'learner.update')
traced = job.trace()
_, text = compiler.compile_and_measure(traced.lower())
measured = compiler.read_movement(text, planned.mesh.size, 1, job.text_trip_counts)
products, _ = flops.count(traced.jaxpr, job.trip_counts)
print(
    json.dumps(
        {
            'microbatches': MICROBATCHES,
            'trained': planned.trained_bytes() * planned.mesh.size,  # float32
            'sent': measured['within'],
            'multiplied': measured['multiplied'] * planned.mesh.size / products,
        }
    )
)
