"""A scalar head on the decoder: what critics and reward models are."""

import jax
import jax.numpy as jnp

from grpo_jax.models import transformer
from grpo_jax.models.collectives import ALONE


def param_table(c):
    """The decoder's table with value_head [D], which starts at 0, in place of lm_head."""
    table = {name: param for name, param in transformer.param_table(c).items() if name != 'lm_head'}
    return table | {'value_head': transformer.Param((c.width,), (None,), 0.0)}


def values(params, tokens, mask, c, *, remat, dtype, collectives=ALONE):
    """f32[B, T]: the head's score of the text up to and with each token; not meaningful where masked.

    tokens i32[B, T], mask bool[B, T]. Computes in dtype; remat is that of transformer.forward.
    """
    compute = jax.tree.map(lambda p: p.astype(dtype), params)
    hidden = transformer.forward(
        compute, tokens, transformer.positions_of(mask), mask, c, remat=remat, collectives=collectives
    )
    return jnp.einsum('btd,d->bt', hidden, compute['value_head'], preferred_element_type=jnp.float32)
