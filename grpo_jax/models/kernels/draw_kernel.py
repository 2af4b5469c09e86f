"""Samples tokens from the last hidden states in one Pallas kernel for TPUs, without logits in main memory.

XLA's version (transformer.unembed, sampling.draw and sampling.logprob) is as fast where logits stay on the chip. On
chips with two cores XLA writes logits to main memory, copies them and reads them again. Here a grid step reads the
head's weights for a tile of the vocabulary. It carries two things on: the best noisy logit (Gumbel-max sampling) and
the sum of exponentials. The noise equals `jax.random.gumbel` with the row's key, bit for bit up to its logarithms.
"""

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, Key
import numpy as np

from grpo_jax.models.attention import MASKED
from grpo_jax.models.kernels import pallas
from grpo_jax.types import Array

CORES = 2  # of a chip; they share the vocabulary
# limits of a tile, the ids that a grid step reads
MAX_TILE_IDS = 1024
MAX_TILE_BYTES = 2**21  # of the head's weights
MAX_TILE_LOGITS = 2**16  # over all rows


class TileSizes(NamedTuple):
    """The constants that the kernel is compiled for."""

    vocabulary: int  # ids on this device
    tile: int  # ids in a grid step
    steps: int  # grid steps of each core
    transposed: bool  # weights are [D, V], not [V, D]
    temperature: float


def draw(
    hidden: Float[Array, 'B D'],
    head: Mapping[str, Any],
    keys: Key[Array, ' B'],
    given_tokens: Int[Array, ' B'],
    temperature: float,
) -> tuple[Int[Array, ' B'], Float[Array, ' B']]:
    """(tokens i32[B], their logprobs f32[B]), drawn from softmax(logits / temperature).

    head: transformer.head_weights. keys: a key for each row. given_tokens: tokens to return instead of drawing one; -1:
    draw.
    """
    ((name, weights),) = head.items()
    transposed, keys = name == 'lm_head', jax.random.key_data(keys)
    tensor = jax.sharding.get_abstract_mesh().shape.get('tensor')

    def draw_own(hidden, weights, keys, given_tokens):
        shard = jax.lax.axis_index('tensor') if tensor else 0
        return _draw(hidden, weights, keys, given_tokens, shard, transposed, temperature)

    by_vocabulary, replicated = PartitionSpec(*[None] * transposed, 'tensor'), PartitionSpec()
    in_specs = (replicated, by_vocabulary, replicated, replicated)
    draw_all = pallas.shard_map_free_axes(draw_own, in_specs, PartitionSpec('tensor'))
    best, token, logit, highest, total, given_logit = draw_all(hidden, weights, keys, given_tokens)
    core = jnp.argmax(best, 0)[None]
    top = jnp.max(highest, 0)
    total = jnp.log(jnp.sum(total * jnp.exp(highest - top), 0)) + top
    drawn, logit = (jnp.take_along_axis(x, core, 0)[0] for x in (token, logit))
    drawn = jnp.where(given_tokens >= 0, given_tokens, drawn)
    return drawn, jnp.where(given_tokens >= 0, jnp.sum(given_logit, 0), logit) - total


def _draw(hidden, weights, keys, given_tokens, shard, transposed, temperature):
    """Six arrays [CORES, B], one value for each row and core; a core reads its part of this device's vocabulary.

    They are the best noisy logit, its token (i32), its logit without noise, the highest logit, the sum of
    exp(logit - highest), and the given token's logit (0 where the core does not read it). Logits are divided by the
    temperature. All but the token are float32.

    weights: the head's, for shard number `shard` of the vocabulary. transposed: they are [D, V], not [V, D].
    """
    (b, d), vocabulary = hidden.shape, weights.shape[transposed]
    tile = min(MAX_TILE_IDS, MAX_TILE_BYTES // (d * weights.dtype.itemsize), MAX_TILE_LOGITS // b) // 128 * 128 or 128
    tiles = -(-vocabulary // tile)
    steps = -(-tiles // CORES)

    def at(core, step, _):
        place = jnp.minimum(core * steps + step, tiles - 1)
        return (0, place) if transposed else (place, 0)

    whole, column = pl.BlockSpec((b, d), lambda *_: (0, 0)), pl.BlockSpec((b, 1), lambda *_: (0, 0))
    kinds = [jnp.float32, jnp.int32, *[jnp.float32] * 4]
    sizes = TileSizes(vocabulary, tile, steps, transposed, temperature)
    results = pallas.call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(CORES, steps),
            in_specs=[whole, pl.BlockSpec((d, tile) if transposed else (tile, d), at), column, column, column],
            out_specs=[pl.BlockSpec((1, b, 1), lambda core, *_: (core, 0, 0))] * len(kinds),
        ),
        out_shape=[jax.ShapeDtypeStruct((CORES, b, 1), kind) for kind in kinds],
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
        cost_estimate=pl.CostEstimate(
            flops=2 * b * d * vocabulary,
            transcendentals=3 * b * vocabulary,
            bytes_accessed=weights.size * weights.dtype.itemsize + hidden.size * hidden.dtype.itemsize,
        ),
        name='draw',
    )(
        jnp.asarray(shard * vocabulary, jnp.int32)[None],
        hidden,
        weights,
        keys[:, :1],
        keys[:, 1:],
        given_tokens[:, None],
    )
    return [x[..., 0] for x in results]


def _kernel(*refs, sizes):
    """Does a grid step: adds a tile of the vocabulary to a core's six values, which its first step resets."""
    first_id, hidden, weights, key_0, key_1, given_token, *carried = refs
    best, token, logit, highest, total, given_logit = carried

    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref, value in ((best, MASKED), (token, 0), (logit, 0), (highest, MASKED), (total, 0), (given_logit, 0)):
            ref[...] = jnp.full(ref.shape, value, ref.dtype)

    contracted = (((1,), (0 if sizes.transposed else 1,)), ((), ()))
    scaled = jax.lax.dot_general(hidden[...], weights[...], contracted, preferred_element_type=jnp.float32)
    tile_start = (pl.program_id(0) * sizes.steps + pl.program_id(1)) * sizes.tile
    places = tile_start + jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    ids, real = first_id[0] + places, places < sizes.vocabulary
    scaled = jnp.where(real, scaled / sizes.temperature, MASKED)
    noisy = jnp.where(real, scaled + _gumbel(key_0[...], key_1[...], ids), MASKED)

    most = jnp.max(noisy, -1, keepdims=True)
    first = jnp.min(jnp.where(noisy == most, ids, np.iinfo(np.int32).max), -1, keepdims=True)
    better = most > best[0]
    token[0] = jnp.where(better, first, token[0])
    logit[0] = jnp.where(better, _logit_at(scaled, ids, first), logit[0])
    best[0] = jnp.maximum(most, best[0])
    given_logit[0] += _logit_at(jnp.where(real, scaled, 0.0), ids, given_token[...])
    top = jnp.maximum(highest[0], jnp.max(scaled, -1, keepdims=True))
    total[0] = total[0] * jnp.exp(highest[0] - top) + jnp.sum(
        jnp.where(real, jnp.exp(scaled - top), 0.0), -1, keepdims=True
    )
    highest[0] = top


def _logit_at(scaled, ids, token):
    """f32[B, 1]: each row's logit at its token i32[B, 1]; 0 where the tile does not have the token."""
    return jnp.sum(jnp.where(ids == token, scaled, 0.0), -1, keepdims=True)


def _gumbel(key_0, key_1, ids):
    """jax.random.gumbel's noise f32[B, T] for ids i32[B, T]; key_0 and key_1, u32[B, 1] each, are a row's key."""
    high, low = _threefry(key_0, key_1, ids.astype(jnp.uint32))
    bits = ((high ^ low) >> 9) | jnp.uint32(0x3F800000)
    tiny = np.finfo(np.float32).tiny
    uniform = jnp.maximum((jax.lax.bitcast_convert_type(bits, jnp.float32) - 1.0) * (1 - tiny) + tiny, tiny)
    return -jnp.log(-jnp.log(uniform))


def _threefry(key_0, key_1, low):
    """Threefry-2x32 (Salmon et al. 2011): two u32 arrays, from the counters (0, low) after 20 rounds."""
    keys = key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA)
    x, y = jnp.broadcast_to(keys[0], low.shape), low + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = x ^ ((y << turn) | (y >> (32 - turn)))
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y
