"""Attention from one new token to the cache in one Pallas kernel for TPUs, which also writes the token's column.

XLA's version (models.cache.attend_cached) is as fast where scores and running sums stay on the chip. On chips with two
cores XLA splits its fusions over both, and results pass from fusion to fusion through main memory: more bytes than keys
and values have in models with few heads. Here a grid step reads a block of columns for some rows, and nothing else.

The grid has a line for each tile of rows, and a step for each block of columns; the cores share the tiles. A tile
begins (B), absorbs the blocks that hold a valid column (a), and finishes (F):

    step      first[0] = 0       first[1]         first[2]
               |  prompt          | own chunk      | last own chunk
    tile 0     | B  |    | a  | a | a | a | a | a  | a | a |   | F |
    tile 1     | B  |    | a  | a | a | a | a | a  | a | a |   | F |

B rotates q and k and attends to the new column; F writes the output and the new column.

Chunks are flat, [L, J, R, S, K * H]: a row's column is one line of a register tile, and writing it rewrites LINES
lines. Queries have zeros in the lanes that hold other heads' keys, so that one product serves all heads.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from grpo_jax.models.attention import MASKED
from grpo_jax.models.kernels import pallas
from grpo_jax.sharding.chips import LANES, LINES
from grpo_jax.types import Array

MEMORY = 8 * 2**20  # bytes of blocks on the chip, together with the blocks that are being loaded
LAYER, LENGTH, FIRST_BLOCK = range(3)  # places in sizes: layer, own columns written, first prompt block to read


def attend(
    q: Float[Array, 'B N H'],
    k: Float[Array, 'B K H'],
    v: Float[Array, 'B K H'],
    factors: Sequence[Float[Array, 'B W']],
    cache: Any,
    layer: int | Int[Array, ''],
) -> tuple[Float[Array, 'B N H'], Any]:
    """(attention output of the newest token, the last Chunk with the new column); factors: rope_factors of cache.py.

    Does what attention.rotate, cache.write and cache.attend_cached do together, for a KVCache of flat chunks. Heads may
    be sharded over the mesh's tensor axis, unless an outer `shard_map` has made it manual.
    """
    heads, columns = PartitionSpec(None, 'tensor'), PartitionSpec(None, None, None, None, 'tensor')
    replicated = PartitionSpec()
    specs = cache.replace(prompt=columns, prompt_start=replicated, chunks=columns, start=replicated, length=replicated)
    in_specs = heads, heads, heads, heads, specs, replicated
    return pallas.shard_map_free_axes(_attend, in_specs, (heads, columns))(q, k, v, factors, cache, layer)


class _Tiling(NamedTuple):
    """How the grid splits rows and columns, fixed when the kernel is compiled."""

    rows: int  # in a tile
    fold: int  # rows that share a prompt
    heads: int  # key heads
    lines: int  # for the queries of one row and key head, in whole register tiles
    blocks: list[int]  # in each chunk; the first chunk is the prompt
    first: list[int]  # grid step at which each chunk's blocks begin
    offsets: list[int]  # own column at which each chunk begins

    @property
    def prompts(self):
        """Number of prompts that a tile reads."""
        return max(self.rows // self.fold, 1)

    @property
    def tiles(self):
        """Number of tiles that read the same prompt."""
        return max(self.fold // self.rows, 1)


class _Scratch(NamedTuple):
    """Arrays that stay on the chip from one grid step to the next: the new column, and the sums of each query."""

    k: Any  # f32[rows, K * H], rotated
    v: Any  # f32[rows, K * H]
    # lines are ordered by row, key head and query
    queries: Any  # f32[rows * lines, K * H], rotated
    highest: Any  # f32[rows * lines, LANES], maximum of the scores
    total: Any  # f32[rows * lines, LANES], sum of the scores' exponentials
    mixed: Any  # f32[rows * lines, K * H], sum of the exponentials times the values


class _Step(NamedTuple):
    """The variables of a grid step: numbers, and the Refs of inputs, outputs and scratch on the chip."""

    tiling: _Tiling
    scale: float  # of scores
    tile: jax.Array  # i32[], the tile's number
    position: jax.Array  # i32[], the step's number within its tile
    length: jax.Array  # i32[], own columns that are written
    sizes: Any  # i32[3], see LAYER
    start: Any  # i32[B]
    prompt_start: Any  # i32[P]
    q: Any  # [rows, N / K, K * H]
    k: Any  # [rows, 1, K * H]; as v, cos and sin
    v: Any
    cos: Any
    sin: Any
    chunks: list[tuple[Any, Any]]  # keys and values [1, 1, rows or prompts, S, K * H]
    out: Any  # as q
    out_k: Any  # [1, 1, rows, LINES, K * H]; as out_v
    out_v: Any
    scratch: _Scratch

    def item_lines(self, i, count=1):
        """The scratch lines for the queries of item i, where an item is `count` rows."""
        size = self.tiling.heads * self.tiling.lines
        return pl.ds(pl.multiple_of(i * count * size, 8), count * size)

    def head_lines(self, i, head):
        """The scratch lines for row i's queries of one key head."""
        size = self.tiling.heads * self.tiling.lines
        return pl.ds(pl.multiple_of(i * size + head * self.tiling.lines, 8), self.q.shape[1])


def _attend(q, k, v, factors, cache, layer):
    """What `attend` returns, for the rows and heads on one device."""
    (b, n, h), heads, chunks = q.shape, k.shape[1], (cache.prompt, *cache.chunks)
    width, tiling = heads * h, _make_tiling(q, heads, cache)
    scalars = (
        jnp.stack([layer, cache.length, jnp.min(cache.prompt_start) // cache.prompt.block]).astype(jnp.int32),
        cache.start,
        cache.prompt_start,
    )
    inputs = (
        # [B, N / K, K * H]: the i-th query of every head of keys side by side
        q.reshape(b, heads, n // heads, h).swapaxes(1, 2).reshape(b, n // heads, width),
        *(x.reshape(b, 1, width) for x in (k, v, *factors)),
        *(array for chunk in chunks for array in (chunk.k, chunk.v)),
    )
    in_specs, out_specs = _block_specs(tiling, chunks, n // heads)
    last = len(scalars) + len(inputs)
    lines = heads * tiling.lines
    out, k, v = pallas.call(
        functools.partial(_kernel, tiling=tiling, scale=1 / math.sqrt(h)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(b // tiling.rows, sum(tiling.blocks)),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=_Scratch(
                *[pltpu.VMEM((tiling.rows, width), jnp.float32)] * 2,
                *[pltpu.VMEM((tiling.rows * lines, size), jnp.float32) for size in (width, LANES, LANES, width)],
            ),
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs[0], *inputs[-2:])],
        input_output_aliases={last - 2: 1, last - 1: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
        cost_estimate=_cost(inputs[0], lines, tiling.tiles, chunks),
        name='decode_attention',
    )(*scalars, *inputs)
    return out.reshape(b, n // heads, heads, h).swapaxes(1, 2).reshape(q.shape), cache.chunks[-1].replace(k=k, v=v)


def _make_tiling(q, heads, cache):
    """The _Tiling for queries [B, N, H] over a KVCache; heads: number of key heads."""
    chunks, fold = (cache.prompt, *cache.chunks), q.shape[0] // cache.prompt_start.shape[0]
    blocks, rows = [chunk.k.shape[1] for chunk in chunks], q.shape[0]
    # rows of a tile: the most that fit, several whole groups or a fraction of one, and at least two tiles for two cores
    prompt_bytes, *own_bytes = (2 * 2 * math.prod(chunk.k.shape[3:]) * chunk.k.dtype.itemsize for chunk in chunks)
    fitting = [
        n
        for n in range(1, max(rows // 2, 1) + 1)
        if rows % n == 0
        and (n % fold == 0 or fold % n == 0)
        and -(-n // fold) * prompt_bytes + n * sum(own_bytes) <= MEMORY
    ]
    return _Tiling(
        rows=max(fitting, default=1),
        fold=fold,
        heads=heads,
        lines=-(-q.shape[1] // heads // 8) * 8,
        blocks=blocks,
        first=[sum(blocks[:i]) for i in range(len(chunks))],
        offsets=[sum(chunk.columns for chunk in chunks[1:i]) for i in range(len(chunks))],
    )


def _block_specs(tiling, chunks, queries):
    """(BlockSpecs of inputs, BlockSpecs of outputs), which say what a grid step reads and writes; queries: N / K."""
    width, last = chunks[0].k.shape[4], len(chunks) - 1

    def new_column(sizes):
        """(block, line) in the last chunk for the new column."""
        return jnp.divmod(sizes[LENGTH] - tiling.offsets[-1], chunks[-1].block)

    def prompt_index(tile, step, sizes, *_):
        return sizes[LAYER], jnp.clip(step, sizes[FIRST_BLOCK], tiling.blocks[0] - 1), tile // tiling.tiles, 0, 0

    def own_index(i, tile, step, sizes, *_):  # a block that stays in its place is not read again
        most = new_column(sizes)[0] if i == last else tiling.blocks[i] - 1
        return sizes[LAYER], jnp.clip(step - tiling.first[i], 0, most), tile, 0, 0

    def new_index(tile, step, sizes, *_):
        block, line = new_column(sizes)
        return sizes[LAYER], block, tile, line // LINES, 0

    by_query, by_row = (
        pl.BlockSpec((tiling.rows, count, width), lambda tile, *_: (tile, 0, 0)) for count in (queries, 1)
    )
    by_chunk = [
        pl.BlockSpec(
            (1, 1, tiling.prompts if i == 0 else tiling.rows, *chunk.k.shape[3:]),
            prompt_index if i == 0 else functools.partial(own_index, i),
        )
        for i, chunk in enumerate(chunks)
    ]
    new_lines = pl.BlockSpec((1, 1, tiling.rows, LINES, width), new_index)
    in_specs = [by_query, *[by_row] * 4, *(spec for spec in by_chunk for _ in 'kv')]
    return in_specs, [by_query, new_lines, new_lines]


def _cost(q, lines, tiles, chunks):
    """CostEstimate for a full cache: each of the `tiles` tiles that share a prompt reads it, the rest is read once."""
    (b, _, width), columns = q.shape, sum(chunk.columns for chunk in chunks)
    item = chunks[0].k.dtype.itemsize
    prompt_bytes, *own_bytes = (2 * math.prod(chunk.k.shape[1:]) * item for chunk in chunks)
    padded = 2 * b * -(-q.shape[1] // 8) * 8 * width * q.dtype.itemsize  # q and output, in whole register tiles
    new = 2 * b * width * ((1 + LINES) * item + 4)
    return pl.CostEstimate(
        flops=4 * b * lines * width * columns,
        transcendentals=b * lines * columns,
        bytes_accessed=tiles * prompt_bytes + sum(own_bytes) + padded + new,
    )


def _kernel(*refs, tiling, scale):
    """Does a grid step: begins a tile if it is the first, absorbs the block on the chip, finishes if it is the last."""
    scalars, inputs = refs[:3], refs[3:8]
    *blocks, out, out_k, out_v = refs[8 : -len(_Scratch._fields)]
    tile, position = pl.program_id(0), pl.program_id(1)
    chunks = list(zip(blocks[::2], blocks[1::2], strict=True))
    scratch, length = _Scratch(*refs[-len(_Scratch._fields) :]), scalars[0][LENGTH]
    bound = tiling, scale, tile, position, length, *scalars, *inputs, chunks, out, out_k, out_v, scratch
    step = _Step._make(bound)

    pl.when(position == 0)(functools.partial(_begin, step))

    for number, (keys, _) in enumerate(chunks):
        block = position - tiling.first[number]
        column = tiling.offsets[number] + block * keys.shape[3]  # the block's first
        valid = (block >= 0) & (column < length) if number else position >= step.sizes[FIRST_BLOCK]
        if number + 1 < len(chunks):
            valid &= position < tiling.first[number + 1]
        pl.when(valid)(functools.partial(_absorb, step, number, column))

    pl.when(position == pl.num_programs(1) - 1)(functools.partial(_finish, step))


def _begin(step):
    """Rotates each row's queries and new key, and starts the running softmax with the new column."""
    tiling, scratch = step.tiling, step.scratch
    scratch.queries[...] = jnp.zeros_like(scratch.queries)

    def begin_row(i, _):
        row = pl.ds(i, 1)
        scratch.k[row] = _rotate(step.k[i], step.cos[i], step.sin[i], tiling.heads, step.out_k.dtype)
        scratch.v[row] = step.v[i].astype(jnp.float32)
        x = _rotate(step.q[i], step.cos[i], step.sin[i], tiling.heads, step.q.dtype)
        for head in range(tiling.heads):
            scratch.queries[step.head_lines(i, head)] = jnp.where(_is_lane_of(head, tiling.heads, x.shape), x, 0.0)
        lines = step.item_lines(i)
        score = jnp.sum(scratch.queries[lines] * scratch.k[row], -1, keepdims=True) * step.scale
        scratch.highest[lines] = jnp.broadcast_to(score, scratch.highest[lines].shape)
        scratch.total[lines] = jnp.ones_like(scratch.total[lines])
        scratch.mixed[lines] = jnp.broadcast_to(scratch.v[row], scratch.mixed[lines].shape)

    jax.lax.fori_loop(0, tiling.rows, begin_row, None)


def _absorb(step, number, column):
    """Adds a block of chunk `number` to the running softmax of all its rows; column: the block's first one."""
    tiling, (keys, values) = step.tiling, step.chunks[number]
    items = keys.shape[2]

    def absorb_prompt(i, _):
        """Adds prompt i's keys and values in this block to the running softmax of the queries that share the prompt."""
        first_valid = step.prompt_start[step.tile * tiling.rows // tiling.fold + i]
        lines = step.item_lines(i, tiling.rows // items)
        _absorb_item(step, lines, keys[0, 0, i], values[0, 0, i], lambda offsets: column + offsets >= first_valid)

    def absorb_row(i, _):
        """Adds row i's own keys and values in this block to the running softmax of that row's queries.

        Columns before the row's first token do not count, nor do columns that are not written yet.
        """
        first_valid = step.start[step.tile * tiling.rows + i]
        lines = step.item_lines(i)

        def is_valid(offsets):
            return (column + offsets >= first_valid) & (column + offsets < step.length)

        _absorb_item(step, lines, keys[0, 0, i], values[0, 0, i], is_valid)

    jax.lax.fori_loop(0, items, absorb_row if number else absorb_prompt, None)


def _absorb_item(step, lines, keys, values, is_valid):
    """Adds keys and values [S, K * H] to the running softmax of the queries in `lines`.

    is_valid: maps column numbers i32[., S] within the block to bool.
    """
    scratch, dtype = step.scratch, step.q.dtype
    scores = _product(scratch.queries[lines].astype(dtype), keys, 1) * step.scale
    scores = jnp.where(is_valid(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)), scores, MASKED)
    highest = scratch.highest[lines]
    most = jnp.maximum(highest, jnp.max(scores, -1, keepdims=True))
    weights, decay = jnp.exp(scores - most[:, :1]), jnp.exp(highest - most)
    scratch.highest[lines] = most
    scratch.total[lines] = scratch.total[lines] * decay + jnp.sum(weights, -1, keepdims=True)
    scratch.mixed[lines] = scratch.mixed[lines] * decay[:, :1] + _product(weights.astype(dtype), values, 0)


def _finish(step):
    """Writes each row's output, and its new column by rewriting LINES lines of the cache."""
    tiling, scratch, out_k = step.tiling, step.scratch, step.out_k
    keys, values = step.chunks[-1]
    line = (step.length - tiling.offsets[-1]) % keys.shape[3]
    around = pl.ds(pl.multiple_of(line // LINES * LINES, LINES), LINES)
    is_new = jax.lax.broadcasted_iota(jnp.int32, out_k.shape[3:], 0) == line % LINES

    def finish_row(i, _):
        def head_output(head):
            lines, lanes = step.head_lines(i, head), _is_lane_of(head, tiling.heads, step.q.shape[1:])
            return jnp.where(lanes, scratch.mixed[lines] / scratch.total[lines][:, :1], 0.0)

        outputs = [head_output(head) for head in range(tiling.heads)]
        mixed: Any = sum(outputs)
        step.out[i] = mixed.astype(step.out.dtype)
        for source, new, target in ((keys, scratch.k, out_k), (values, scratch.v, step.out_v)):
            target[0, 0, i] = jnp.where(is_new, new[pl.ds(i, 1)].astype(target.dtype), source[0, 0, i, around])

    jax.lax.fori_loop(0, tiling.rows, finish_row, None)


def _is_lane_of(head, heads, shape):
    """bool of `shape` [..., K * H]: whether a lane belongs to the key head."""
    lane, width = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1), shape[-1] // heads
    return (lane >= head * width) & (lane < (head + 1) * width)


def _rotate(x, cos, sin, heads, dtype):
    """x [M, K * H] rotated by rope_factors cos and sin, rounded to dtype and returned as float32."""
    width, half = x.shape[-1], x.shape[-1] // heads // 2
    x, lane = x.astype(jnp.float32), jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    partner = jnp.where(lane % (2 * half) < half, pltpu.roll(x, width - half, 1), pltpu.roll(x, half, 1))
    return (x * cos + partner * sin).astype(dtype).astype(jnp.float32)


def _product(a, b, axis):
    """The matrix product of a [M, X] and b, summed over b's axis `axis` in float32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
