"""What differs from layer to layer besides weights: windows and rotary positions, which `lax.scan` reads as arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from grpo_jax.models import attention
from grpo_jax.types import Array

ENDLESS = 2**30  # positions of a window in layers without one


class LayerKind(NamedTuple):
    """Values of all layers, or of one; None: layers do not differ."""

    window: Int[Array, '*L'] | None
    rope: Int[Array, '*L'] | None  # which of the model's rotary positions


def make_kinds(c: Any) -> LayerKind:
    """The LayerKind of all layers of a ModelConfig."""
    windows = c.windows or (0,) * c.layers
    window = jnp.asarray([window or ENDLESS for window in windows], jnp.int32) if c.windows else None
    if not c.local_rope and not c.unrotated:
        return LayerKind(window, None)
    last = len(_ropes(c)) - 1
    ropes = [last if i in c.unrotated else int(bool(c.local_rope and windows[i])) for i in range(c.layers)]
    return LayerKind(window, jnp.asarray(ropes, jnp.int32))


def _ropes(c):
    """(theta, scaling) of each rotary embedding in the model: the common one, the local one, and none at all."""
    return [(c.rope_theta, c.rope_scaling), *[c.local_rope] * bool(c.local_rope), *[(0.0, ())] * bool(c.unrotated)]


def make_angles(positions: Int[Array, 'B T'], c: Any) -> tuple[Float[Array, '...'], Float[Array, '...']]:
    """attention.Angles of the positions; where layers differ, those of each rotary embedding, stacked."""
    size = c.rotary_dim or c.head_dim
    angles = [attention.rope_angles(positions, size, *rope) for rope in _ropes(c)]
    return angles[0] if len(angles) == 1 else jax.tree.map(lambda *kinds: jnp.stack(kinds), *angles)


def choose_angles(angles: Any, kind: LayerKind) -> Any:
    """A layer's own of what make_angles gave."""
    return angles if kind.rope is None else jax.tree.map(lambda kinds: kinds[kind.rope], angles)


def make_rule(c: Any, kind: LayerKind) -> attention.Rule:
    """What a layer's attention computes."""
    return attention.Rule(c.attention_scale, c.attention_cap, kind.window)
