"""Abstract parameters of a policy on a mesh, to compile programs for and to restore checkpoints onto."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.models import lora, transformer
from grpo_jax.models.linear import Int8
from grpo_jax.sharding import compiled


def abstract_policy(c: transformer.ModelConfig, options: lora.LoraOptions, dtype: Any, mesh: Mesh) -> Any:
    """The policy's parameters as ShapeDtypeStructs with training shardings: float32 if trained, `dtype` if frozen.

    Frozen matrices in int8 have int8 values and float32 scales.
    """
    trained, frozen = lora.split(compiled.abstract_params(lora.policy_table(c, options), mesh))

    def leaf(x):
        if isinstance(x, Int8):
            return x._replace(values=compiled.abstract(x.values.shape, jnp.int8, x.values.sharding))
        return compiled.abstract(x.shape, dtype, x.sharding)

    return lora.join(trained, jax.tree.map(leaf, frozen, is_leaf=lambda x: isinstance(x, Int8)))


def abstract_trained(c: transformer.ModelConfig, options: lora.LoraOptions, dtype: Any, mesh: Mesh) -> Any:
    """The trained part of abstract_policy, which is what a checkpoint holds."""
    return lora.split(abstract_policy(c, options, dtype, mesh))[0]
