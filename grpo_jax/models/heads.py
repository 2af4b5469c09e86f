"""A decoder with a scalar head, as critics and reward models are: its parameter table, and its values."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.models import transformer
from grpo_jax.models.mesh_ops import ALONE, MeshOps
from grpo_jax.types import Array


def param_table(c: transformer.ModelConfig) -> dict[str, Any]:
    """The decoder's parameter table with value_head [D], zeros at first, in place of lm_head."""
    table = {name: param for name, param in transformer.param_table(c).items() if name != 'lm_head'}
    return table | {'value_head': transformer.Param((c.width,), (None,), 0.0)}


def values(
    params: transformer.Params,
    tokens: Int[Array, 'B T'],
    mask: Bool[Array, 'B T'],
    c: transformer.ModelConfig,
    *,
    remat: str,
    dtype: Any,
    mesh_ops: MeshOps = ALONE,
) -> Float[Array, 'B T']:
    """Returns f32[B, T]: number t is the head's output for the tokens up to and including token t.

    mask: True for valid tokens; where it is False, the number has no meaning. dtype: the computation's. remat and
    mesh_ops are as in transformer.forward.
    """
    cast_params = jax.tree.map(lambda p: p.astype(dtype), params)
    hidden = transformer.forward(
        cast_params, tokens, transformer.positions_of(mask), mask, c, remat=remat, mesh_ops=mesh_ops
    )
    return jnp.einsum('btd,d->bt', hidden, cast_params['value_head'], preferred_element_type=jnp.float32)
