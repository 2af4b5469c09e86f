"""The key-value cache of decoding, and attention of one new token over it.

Columns lie in blocks: keys [L, J, R, K, H, S] and values [L, J, R, K, S, H] hold J blocks of S columns
for R rows, so that a block of a layer is one contiguous piece, and a dynamic number of blocks is read.
The cache is [prompts, stored once per group | own chunks]; a chunk that is full is never written or
copied again. All rows write the same column, since XLA turns writes at a column per row into copies
of the cache; each row has a first valid column (`start`) instead. Flat chunks are for models.kernels.decode_kernel.
"""

import dataclasses
import importlib
import math
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from grpo_jax.models import attention
from grpo_jax.models.attention import MASKED
from grpo_jax.models.linear import to_int8
from grpo_jax.types import Array, Pytree, pytree


@pytree
class Chunk(Pytree):
    """Keys and values of R rows in J blocks of S columns, in the dtype of computation or as int8 with scales.

    int8 has one scale for each column and head.
    """

    k: jax.Array  # [L, J, R, K, H, S]; flat: [L, J, R, S, K * H]
    v: jax.Array  # [L, J, R, K, S, H]; flat: as k
    k_scale: Float[Array, 'L J R K S'] | None = None  # only with int8
    v_scale: Float[Array, 'L J R K S'] | None = None

    @property
    def columns(self) -> int:
        """Columns of all blocks, J * S."""
        return self.k.shape[1] * self.block

    @property
    def block(self) -> int:
        """Columns of a block, S."""
        return self.k.shape[3 if self.flat else 5]

    @property
    def flat(self) -> bool:
        """Whether the arrays have the shape that models.kernels.decode_kernel reads."""
        return self.k.ndim == 5


@pytree
class ByLayer(Pytree):
    """A chunk with separate arrays for each layer: XLA on GPUs copies a layer out of an array that holds all layers."""

    layers: tuple[Chunk, ...]  # each with L = 1, and not flat

    columns = property(lambda self: self.layers[0].columns)
    block = property(lambda self: self.layers[0].block)
    flat = False

    def with_layer(self, number: int, chunk: Any) -> 'ByLayer':
        """The ByLayer with `chunk` as layer `number`."""
        return ByLayer((*self.layers[:number], chunk, *self.layers[number + 1 :]))


AnyChunk = Chunk | ByLayer


@pytree
class KVCache(Pytree):
    """Keys and values of all tokens but the newest, for B rows.

    A row reads a prompt's columns and its own columns, which hold the tokens of its completion. Chunks of own columns
    are filled in order; only the last one is written. Either all chunks are Chunks, or all are ByLayers.
    """

    prompt: Any  # AnyChunk of P prompts, each read by B / P consecutive rows; left-padded
    prompt_start: Int[Array, ' P']  # first valid column of each prompt
    chunks: tuple[Any, ...]  # AnyChunks with the own columns
    start: Int[Array, ' B']  # first valid own column of each row
    length: Int[Array, '']  # own columns that are written
    at_once: bool = struct.field(pytree_node=False, default=False)  # attention reads all blocks of a chunk together

    def with_last_chunk(self, chunk: AnyChunk) -> 'KVCache':
        """The cache with `chunk` in place of its last chunk."""
        return self.replace(chunks=self.chunks[:-1] + (chunk,))

    def one_layer(self, number: int) -> 'KVCache':
        """The cache of one layer, where all chunks are ByLayer.

        Attention then reads all blocks at once: to count them, GPUs would wait for the host in every layer.
        """
        prompt, *chunks = (chunk.layers[number] for chunk in (self.prompt, *self.chunks))
        return self.replace(prompt=prompt, chunks=tuple(chunks), at_once=True)


def empty_chunk(
    c: Any, rows: int, columns: int, *, block: int, dtype: Any, flat: bool = False, by_layer: bool = False
) -> AnyChunk:
    """A chunk of zeros for a ModelConfig, with at least `columns` columns in blocks of `block`.

    dtype: int8 also, if the chunk is not flat. flat: for models.kernels.decode_kernel. by_layer: a ByLayer, not flat.
    """
    if by_layer:
        one_layer = dataclasses.replace(c, layers=1)
        return ByLayer(tuple(empty_chunk(one_layer, rows, columns, block=block, dtype=dtype) for _ in range(c.layers)))
    blocks = -(-columns // block)
    if flat:
        shape = (c.layers, blocks, rows, block, c.kv_heads * c.head_dim)
        return Chunk(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    shape = (c.layers, blocks, rows, c.kv_heads)
    k, v = jnp.zeros((*shape, c.head_dim, block), dtype), jnp.zeros((*shape, block, c.head_dim), dtype)
    if dtype != jnp.int8:
        return Chunk(k, v)
    return Chunk(k, v, jnp.zeros((*shape, block)), jnp.zeros((*shape, block)))


def prompt_chunk(k: Float[Array, 'L R K T H'], v: Float[Array, 'L R K T H'], like: AnyChunk) -> AnyChunk:
    """A chunk with k and v in its last T columns, and the kind, columns, block and dtype of the chunk `like`."""
    if isinstance(like, ByLayer):
        layers = zip(jnp.split(k, len(k)), jnp.split(v, len(v)), like.layers, strict=True)
        return ByLayer(tuple(prompt_chunk(*layer) for layer in layers))
    layers, rows, heads, t, h = k.shape
    pad = ((0, 0), (0, 0), (0, 0), (like.columns - t, 0), (0, 0))
    k, v = (jnp.pad(x, pad).reshape(layers, rows, heads, -1, like.block, h) for x in (k, v))
    if like.flat:
        shape = (layers, -1, rows, like.block, heads * h)
        return Chunk(*(x.transpose(0, 3, 1, 4, 2, 5).reshape(shape).astype(like.k.dtype) for x in (k, v)))
    if like.k_scale is None:
        k, v = k.transpose(0, 3, 1, 2, 5, 4), v.transpose(0, 3, 1, 2, 4, 5)
        return Chunk(k.astype(like.k.dtype), v.astype(like.v.dtype))
    (k, k_scale), (v, v_scale) = _quantize(k), _quantize(v)
    return Chunk(
        k.transpose(0, 3, 1, 2, 5, 4),
        v.transpose(0, 3, 1, 2, 4, 5),
        k_scale.transpose(0, 3, 1, 2, 4),
        v_scale.transpose(0, 3, 1, 2, 4),
    )


def _quantize(x):
    """(int8 values, f32 scales) of x, with one scale for the numbers of the last axis."""
    values, scale = to_int8(x, (-1,))
    return values, scale[..., 0]


def rope_factors(angles: attention.Angles, heads: int) -> list[Float[Array, 'B W']]:
    """[cos, sin] factors for a row of flat keys, W = K * H: rotated x = x * cos + partner * sin.

    `partner` holds, in each lane, the other number of the lane's pair (attention.rotate).
    """
    cos, sin = (angle[:, 0, 0] for angle in angles)
    factors = [jnp.tile(jnp.concatenate(halves, -1), heads) for halves in ((cos, cos), (-sin, sin))]
    return jax.lax.optimization_barrier(factors)  # or XLA repeats them in every layer


def append_and_attend(
    q: Float[Array, 'B 1 N H'],
    k: Float[Array, 'B 1 K H'],
    v: Float[Array, 'B 1 K H'],
    angles: Any,
    cache: KVCache,
    layer: int | Int[Array, ''],
    rule: attention.Rule = attention.LLAMA,
) -> tuple[Float[Array, 'B 1 N H'], AnyChunk]:
    """(attention output, the last chunk with the new column): writes the newest token's k and v, then attends with q.

    q and k are not rotated yet. angles: attention.rope_angles, or rope_factors for flat chunks. The kernel for flat
    chunks ignores rule.
    """
    if isinstance(cache.prompt, ByLayer):
        out, chunk = append_and_attend(q, k, v, angles, cache.one_layer(int(layer)), 0, rule)
        return out, cache.chunks[-1].with_layer(int(layer), chunk)
    if cache.prompt.flat:
        decode_kernel = importlib.import_module('grpo_jax.models.kernels.decode_kernel')  # where it is chosen
        out, chunk = decode_kernel.attend(q[:, 0], k[:, 0], v[:, 0], angles, cache, layer)
        return out[:, None], chunk
    q, k = attention.rotate(q, angles), attention.rotate(k, angles)
    cache = write(cache, layer, k[:, 0], v[:, 0])
    return attend_cached(q[:, 0], cache, layer, rule)[:, None], cache.chunks[-1]


def write(cache: KVCache, layer: int | Int[Array, ''], k: Float[Array, 'B K H'], v: Float[Array, 'B K H']) -> KVCache:
    """The cache with k and v written to the next own column in a layer."""
    chunk = cache.chunks[-1]
    column = cache.length - sum(full.columns for full in cache.chunks[:-1])
    block, column = jnp.divmod(column, chunk.block)

    def put(array, new, axis):
        at = [0] * array.ndim
        at[0], at[1], at[axis] = layer, block, column
        return jax.lax.dynamic_update_slice(array, jnp.expand_dims(new, (0, 1, axis)).astype(array.dtype), at)

    if chunk.k_scale is None:
        return cache.with_last_chunk(Chunk(put(chunk.k, k, 5), put(chunk.v, v, 4)))
    (k, k_scale), (v, v_scale) = _quantize(k), _quantize(v)
    scales = put(chunk.k_scale, k_scale, 4), put(chunk.v_scale, v_scale, 4)
    return cache.with_last_chunk(Chunk(put(chunk.k, k, 5), put(chunk.v, v, 4), *scales))


def attend_cached(
    q: Float[Array, 'B N H'], cache: KVCache, layer: int | Int[Array, ''], rule: attention.Rule = attention.LLAMA
) -> Float[Array, 'B N H']:
    """Attention output of the newest token's queries over prompt and own columns, in one layer. Call it after `write`.

    The softmax keeps a running maximum and sum in float32, over blocks (arXiv 2205.14135, alg. 1) or, with
    cache.at_once, over chunks. Over blocks, only blocks with a valid column are read. A prompt's blocks are read once
    for all rows that share it.
    """
    b, n, h = q.shape
    heads = cache.chunks[-1].k.shape[3]
    grouped = q.reshape(b, heads, n // heads, h)
    shape = grouped.shape[:3]
    running = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(grouped.shape, jnp.float32))
    # the first columns that the newest tokens attend to, in the prompt and of their own
    prompt_start, own_start, first_own = cache.prompt_start, cache.start, 0
    if rule.window is not None:
        own_start = jnp.maximum(cache.start, cache.length + 1 - rule.window)
        # i32[P, B / P], since the window ends at another column for each row: a row's own column `start` follows the
        # last column of its prompt
        prompt_start = cache.prompt.columns + cache.length - cache.start + 1 - rule.window
        prompt_start = jnp.maximum(prompt_start.reshape(len(cache.prompt_start), -1), cache.prompt_start[:, None])
        first_own = jnp.min(own_start)
    prompt_columns = _Columns(0, prompt_start, cache.prompt.columns - 1, jnp.min(prompt_start) // cache.prompt.block)
    running = _absorb(running, grouped, cache.prompt, layer, prompt_columns, rule, cache.at_once)
    offset = 0
    for chunk in cache.chunks:
        first_block = 0 if rule.window is None else jnp.maximum(first_own - offset, 0) // chunk.block
        columns = _Columns(offset, own_start, cache.length, first_block)
        running = _absorb(running, grouped, chunk, layer, columns, rule, cache.at_once)
        offset += chunk.columns
    _, total, out = running
    return (out / total[..., None]).reshape(b, n, h).astype(q.dtype)


class _Columns(NamedTuple):
    """The columns of a chunk that are attended to."""

    offset: int  # the chunk's first column
    start: jax.Array  # first valid column: i32[R] of each row, or i32[R, B / R] of each row of queries
    last: int | jax.Array  # last valid column
    first_block: int | jax.Array  # blocks of the chunk before this one hold no valid column


def _absorb(running, q, chunk, layer, valid_columns, rule, at_once):
    """The running (maximum, sum, output) of queries [B, K, N / K, H], updated with the valid _Columns of a chunk."""
    offset, start, last, first_block = valid_columns
    rows, block = chunk.k.shape[2], chunk.block
    b, heads, group, h = q.shape
    fold = b // rows  # rows of queries that share a row of the chunk
    scale = 1.0 / math.sqrt(h) if rule.scale is None else rule.scale

    def folded(x):
        """x [B, K, g, ...] as [R, K, fold * g, ...]: queries that share keys become rows of one matrix product."""
        tail = x.shape[3:]
        x = x.reshape(rows, fold, heads, group, *tail)
        return jnp.moveaxis(x, 1, 2).reshape(rows, heads, fold * group, *tail)

    def unfolded(x):
        """The inverse of folded."""
        tail = x.shape[3:]
        x = x.reshape(rows, heads, fold, group, *tail)
        return jnp.moveaxis(x, 2, 1).reshape(b, heads, group, *tail)

    if fold > 1:
        q, running = folded(q), jax.tree.map(folded, running)

    def absorb(running, q, columns, read):
        """`running`, updated with some columns of the chunk, which read(array) takes out of each of its arrays.

        columns: their numbers. Of one block, i32[S], with q [R, K, M, H]. Of J blocks, with q [J, R, K, M, H],
        i32[J, 1, S], or i32[J, 1, 1, S] where starts differ by query.
        """
        highest, total, out = running
        over = tuple(range(q.ndim - 4))  # the axis of blocks, if there is one
        valid = (columns >= start[..., None]) & (columns <= last)
        # [R, M, S] or, where it is the same for all queries of a row, [R, 1, S]
        valid = jnp.repeat(valid, group, -2) if start.ndim > 1 else valid[..., None, :]
        # int8 goes into the products as the dtype of q; XLA fuses the conversion into the read
        keys, values = read(chunk.k).astype(q.dtype), read(chunk.v).astype(q.dtype)
        scores = jnp.einsum('...rkmh,...rkhs->...rkms', q, keys, preferred_element_type=jnp.float32) * scale
        if chunk.k_scale is not None:
            scores = scores * read(chunk.k_scale)[..., None, :]
        scores = jnp.where(valid[..., None, :, :], attention.soft_cap(scores, rule.cap), MASKED)
        new_highest = jnp.maximum(highest, jnp.max(scores, (*over, -1)))
        decay, weights = jnp.exp(highest - new_highest), jnp.exp(scores - new_highest[..., None])
        total = total * decay + jnp.sum(weights, (*over, -1))
        if chunk.v_scale is not None:
            weights = weights * read(chunk.v_scale)[..., None, :]
        weights = weights.astype(q.dtype)
        mixed = jnp.einsum('...rkms,...rksh->...rkmh', weights, values, preferred_element_type=jnp.float32)
        return new_highest, total, out * decay[..., None] + (jnp.sum(mixed, over) if over else mixed)

    def absorb_block(j, running):
        def read(array):
            sizes = (1, 1, *array.shape[2:])
            return jax.lax.dynamic_slice(array, (layer, j) + (0,) * (array.ndim - 2), sizes)[0, 0]

        return absorb(running, q, offset + j * block + jnp.arange(block), read)

    if at_once:
        columns = offset + jnp.arange(chunk.columns).reshape(-1, *[1] * start.ndim, block)
        q = jnp.broadcast_to(q, (len(columns), *q.shape))  # blocks are a batch of products, and no cache is transposed
        running = absorb(running, q, columns, lambda array: array[layer])
    else:
        blocks = jnp.clip((last - offset) // block + 1, 0, chunk.k.shape[1])
        running = jax.lax.fori_loop(first_block, blocks, absorb_block, running)
    return jax.tree.map(unfolded, running) if fold > 1 else running
