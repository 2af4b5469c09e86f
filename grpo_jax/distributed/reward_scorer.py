"""Scoring by a reward model on one device, beside the policy's programs and apart from their mesh."""
import functools

import jax

from grpo_jax.errors import BadInput
from grpo_jax.models import heads


def device(index):
    """The device of this process that has an index; BadInput when there are fewer."""
    there = jax.local_devices()
    if not 0 <= index < len(there):
        raise BadInput('device of a reward model', index, f'{len(there)} devices are here, counted from 0')
    return there[index]


def make_scorer(c, dtype):
    """(params, tokens i32[B, T], mask bool[B, T]) -> f32[B, T] on the arguments' device; compiled once a shape."""
    return jax.jit(functools.partial(heads.scores, c=c, remat='none', dtype=dtype))
