"""The probe's program: logprobs of a few completions, whatever the step samples."""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.learner import logprobs, packing, partition
from grpo_jax.learner.options import Learning
from grpo_jax.models import lora, transformer
from grpo_jax.models.linear import in_dtype
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.sharding.batches import Shapes
from grpo_jax.sharding.compiled import Executable, abstract
from grpo_jax.sharding.mesh import BATCH_AXES, Devices


def make_probe(
    model_config: transformer.ModelConfig,
    devices: Devices,
    shapes: Shapes,
    learning: Learning,
    packed: packing.Packing | None,
    rollout: Any,
) -> Executable:
    """The Executable (params, Rollout) -> f32[n, C], the policy's logprobs of a few completions that all devices have.

    rollout is abstract; shapes are those of a step, of whose microbatches it computes no more rows at once.
    """
    mesh, rows = devices.mesh, len(rollout.truncated)
    collectives = partition.make_collectives(model_config, mesh, learning.lora, learning.attention)
    chunk = logprobs.choose_chunk(learning.chunk, model_config.vocab_size, mesh)
    head = logprobs.Head(learning.temperature, chunk, False, collectives)
    devices_along = batches.devices_along(mesh, BATCH_AXES)
    if packed is None:
        at_once = shapes.prompts * shapes.group_size // (learning.minibatches * learning.microbatches)
    else:
        at_once = packed.rows * packed.columns // (shapes.queries + shapes.tokens)
    at_once = min(max(at_once // devices_along, 1), -(-rows // devices_along)) * devices_along

    def completion_logprobs(params, rollout):
        compute = in_dtype(params, learning.dtype)
        padded = jax.tree.map(lambda x: jnp.pad(x, ((0, -rows % at_once),) + ((0, 0),) * (x.ndim - 1)), rollout)
        parts = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), padded)
        values = jax.lax.map(
            lambda part: logprobs.rollout_logprobs(compute, part, model_config, head, 'none').logprobs, parts
        )
        return values.reshape(-1, values.shape[-1])[:rows]

    params = lora.abstract_params(model_config, learning.lora, learning.dtype, mesh)
    rollout = jax.tree.map(lambda x: abstract(x.shape, x.dtype, specs.replicated(mesh)), rollout)
    return compiled.make_executable(
        "the learner's probe", completion_logprobs, (params, rollout), devices, specs.replicated(mesh)
    )
