"""Attention of one new token over the cache in one Pallas kernel for TPUs, which also writes the token's column.

XLA's form (models.cache.attend_cached) is as good where scores and running sums stay on the chip. On chips of two
cores XLA splits its fusions over both, and what one fusion passes to the next goes through main memory: more bytes
than keys and values of few heads have. Here a grid step has a block of columns of some rows on the chip, and reads
only that.

The grid has a row for each tile of rows, which the cores share, and a step for each block of columns. Every tile begins
(B), absorbs the blocks that hold a valid column (a), and finishes (F):

    step      first[0] = 0       first[1]         first[2]
               |  prompt          | own chunk      | last own chunk
    tile 0     | B  |    | a  | a | a | a | a | a  | a | a |   | F |
    tile 1     | B  |    | a  | a | a | a | a | a  | a | a |   | F |

B rotates q and k and attends to the new column; F writes the output and the new column.

Chunks are flat, [L, J, R, S, K * H]: a column of a row is one line of a tile, and writing it rewrites LINES lines.
Queries have zeros at the lanes of other heads' keys, so that one product serves all heads.
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

MEMORY = 8 * 2**20  # bytes of blocks on the chip, with those that are on their way
LAYER, LENGTH, FIRST_BLOCK = range(3)  # places in sizes: layer, own columns written, first prompt block to read


def attend(
    q: Float[Array, 'B N H'],
    k: Float[Array, 'B K H'],
    v: Float[Array, 'B K H'],
    factors: Sequence[Float[Array, 'B W']],
    cache: Any,
    layer: int | Int[Array, ''],
) -> tuple[Float[Array, 'B N H'], Any]:
    """(attention output, the last Chunk with the new column) of the newest token over a KVCache; factors: rope_factors.

    The same as attention.rotate, cache.write and cache.attend_cached together, of flat chunks. Heads may be cut over
    axes of the mesh that `shard_map` has left to the partitioner, which cannot cut a kernel.
    """
    heads, columns = PartitionSpec(None, 'tensor'), PartitionSpec(None, None, None, None, 'tensor')
    rest = PartitionSpec()
    specs = cache.replace(prompt=columns, prompt_start=rest, chunks=columns, start=rest, length=rest)
    return pallas.on_devices(_attend, (heads, heads, heads, heads, specs, rest), (heads, columns))(
        q, k, v, factors, cache, layer
    )


class _Tiling(NamedTuple):
    """How the grid cuts rows and columns, fixed when the kernel is compiled."""

    rows: int  # of a tile
    fold: int  # rows that share a prompt
    heads: int  # of keys
    lines: int  # of the queries of a row and a head, in whole register tiles
    blocks: list[int]  # of each chunk, the prompt's first
    first: list[int]  # grid step in which a chunk's blocks begin
    offsets: list[int]  # own column where a chunk begins

    @property
    def prompts(self):
        """Prompts of a tile."""
        return max(self.rows // self.fold, 1)

    @property
    def tiles(self):
        """Tiles that share a prompt."""
        return max(self.fold // self.rows, 1)


class _Scratch(NamedTuple):
    """What stays on the chip from one grid step to the next: the new column, and the running sums of each query."""

    k: Any  # f32[rows, K * H], rotated
    v: Any  # f32[rows, K * H]
    queries: Any  # f32[rows * lines, K * H], rotated; this and the others by row, head and query
    highest: Any  # f32[rows * lines, LANES], score
    total: Any  # f32[rows * lines, LANES], of the scores' exponentials
    mixed: Any  # f32[rows * lines, K * H], values times those


class _Step(NamedTuple):
    """The variables of a grid step: numbers, and the Refs of inputs, outputs and scratch on the chip."""

    tiling: _Tiling
    scale: float  # of scores
    tile: jax.Array  # i32[] which of the grid
    position: jax.Array  # i32[] of the step within its tile
    length: jax.Array  # i32[] own columns written
    sizes: Any  # i32[3]
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
        """The lines of queries of item i, of `count` rows."""
        size = self.tiling.heads * self.tiling.lines
        return pl.ds(pl.multiple_of(i * count * size, 8), count * size)

    def head_lines(self, i, head):
        """The lines of row i's queries of a head."""
        size = self.tiling.heads * self.tiling.lines
        return pl.ds(pl.multiple_of(i * size + head * self.tiling.lines, 8), self.q.shape[1])


def _attend(q, k, v, factors, cache, layer):
    """attend on one device."""
    (b, n, h), heads, chunks = q.shape, k.shape[1], (cache.prompt, *cache.chunks)
    width, tiling = heads * h, _cut(q, heads, cache)
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


def _cut(q, heads, cache):
    """_Tiling of queries [B, N, H] over a KVCache."""
    chunks, fold = (cache.prompt, *cache.chunks), q.shape[0] // cache.prompt_start.shape[0]
    blocks, rows = [chunk.k.shape[1] for chunk in chunks], q.shape[0]
    # rows of a tile: the most that fit, of whole groups or of parts of one, with work for two cores
    prompt, *own = (2 * 2 * math.prod(chunk.k.shape[3:]) * chunk.k.dtype.itemsize for chunk in chunks)
    fitting = [
        n
        for n in range(1, max(rows // 2, 1) + 1)
        if rows % n == 0 and (n % fold == 0 or fold % n == 0) and -(-n // fold) * prompt + n * sum(own) <= MEMORY
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
    """(specs of the inputs, specs of the outputs): the blocks of a grid step, for that many queries of a head."""
    width, last = chunks[0].k.shape[4], len(chunks) - 1

    def new_column(sizes):
        """(block, line) of the new column in the last chunk."""
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
    """What a full cache costs: a prompt is read for each of the tiles of rows that share it, all else once."""
    (b, _, width), columns = q.shape, sum(chunk.columns for chunk in chunks)
    item = chunks[0].k.dtype.itemsize
    prompt, *own = (2 * math.prod(chunk.k.shape[1:]) * item for chunk in chunks)
    padded = 2 * b * -(-q.shape[1] // 8) * 8 * width * q.dtype.itemsize  # q and output, in whole register tiles
    new = 2 * b * width * ((1 + LINES) * item + 4)
    return pl.CostEstimate(
        flops=4 * b * lines * width * columns,
        transcendentals=b * lines * columns,
        bytes_accessed=tiles * prompt + sum(own) + padded + new,
    )


def _kernel(*refs, tiling, scale):
    """A grid step: begin in a tile's first, absorb the blocks that are on the chip, finish in the tile's last."""
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
    """Rotates the queries and the new key of each row, and begins attention with the new column."""
    tiling, scratch = step.tiling, step.scratch
    scratch.queries[...] = jnp.zeros_like(scratch.queries)

    def begin_row(i, _):
        row = pl.ds(i, 1)
        scratch.k[row] = _rotated(step.k[i], step.cos[i], step.sin[i], tiling.heads, step.out_k.dtype)
        scratch.v[row] = step.v[i].astype(jnp.float32)
        x = _rotated(step.q[i], step.cos[i], step.sin[i], tiling.heads, step.q.dtype)
        for head in range(tiling.heads):
            scratch.queries[step.head_lines(i, head)] = jnp.where(_lanes(head, tiling.heads, x.shape), x, 0.0)
        lines = step.item_lines(i)
        score = jnp.sum(scratch.queries[lines] * scratch.k[row], -1, keepdims=True) * step.scale
        scratch.highest[lines] = jnp.broadcast_to(score, scratch.highest[lines].shape)
        scratch.total[lines] = jnp.ones_like(scratch.total[lines])
        scratch.mixed[lines] = jnp.broadcast_to(scratch.v[row], scratch.mixed[lines].shape)

    jax.lax.fori_loop(0, tiling.rows, begin_row, None)


def _absorb(step, number, column):
    """Absorbs a block of a chunk, whose first column is `column`, into running maximum, sum and output."""
    tiling, (keys, values) = step.tiling, step.chunks[number]
    items = keys.shape[2]

    def absorb_prompt(i, _):
        low = step.prompt_start[step.tile * tiling.rows // tiling.fold + i]
        lines = step.item_lines(i, tiling.rows // items)
        _absorb_item(step, lines, keys[0, 0, i], values[0, 0, i], lambda at: column + at >= low)

    def absorb_row(i, _):
        low = step.start[step.tile * tiling.rows + i]
        lines = step.item_lines(i)

        def is_valid(at):
            return (column + at >= low) & (column + at < step.length)

        _absorb_item(step, lines, keys[0, 0, i], values[0, 0, i], is_valid)

    jax.lax.fori_loop(0, items, absorb_row if number else absorb_prompt, None)


def _absorb_item(step, lines, keys, values, is_valid):
    """Absorbs keys and values [S, K * H] for those lines of queries; is_valid maps places i32[., S] in the block."""
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
    """Writes each row's output, and the new column in the lines around it."""
    tiling, scratch, out_k = step.tiling, step.scratch, step.out_k
    keys, values = step.chunks[-1]
    line = (step.length - tiling.offsets[-1]) % keys.shape[3]
    around = pl.ds(pl.multiple_of(line // LINES * LINES, LINES), LINES)
    is_new = jax.lax.broadcasted_iota(jnp.int32, out_k.shape[3:], 0) == line % LINES

    def finish_row(i, _):
        def head_output(head):
            lines, lanes = step.head_lines(i, head), _lanes(head, tiling.heads, step.q.shape[1:])
            return jnp.where(lanes, scratch.mixed[lines] / scratch.total[lines][:, :1], 0.0)

        outputs = [head_output(head) for head in range(tiling.heads)]
        mixed: Any = sum(outputs)
        step.out[i] = mixed.astype(step.out.dtype)
        for source, new, target in ((keys, scratch.k, out_k), (values, scratch.v, step.out_v)):
            target[0, 0, i] = jnp.where(is_new, new[pl.ds(i, 1)].astype(target.dtype), source[0, 0, i, around])

    jax.lax.fori_loop(0, tiling.rows, finish_row, None)


def _lanes(head, heads, shape):
    """Whether a lane is one of the head's, bool of the shape [..., K * H]."""
    lane, width = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1), shape[-1] // heads
    return (lane >= head * width) & (lane < (head + 1) * width)


def _rotated(x, cos, sin, heads, dtype):
    """f32: x [M, K * H] rotated by its rope_factors, as rounded to dtype."""
    width, half = x.shape[-1], x.shape[-1] // heads // 2
    x, lane = x.astype(jnp.float32), jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    other = jnp.where(lane % (2 * half) < half, pltpu.roll(x, width - half, 1), pltpu.roll(x, half, 1))
    return (x * cos + other * sin).astype(dtype).astype(jnp.float32)


def _product(a, b, axis):
    """a [M, X] times b, whose axis has size X, summed in float32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
