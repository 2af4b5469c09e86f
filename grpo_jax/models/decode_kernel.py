"""Attention of one new token over the cache in one Pallas kernel for TPUs, which also writes the token's column.

XLA's form of it (models.cache.attend) is as good where scores and running sums stay on the chip. On chips of two cores
its fusions are split over both, and what one passes to the next goes through main memory: more bytes than keys and
values of few heads have. Here a grid step has a block of columns of some rows on the chip, and only that is read.

Chunks are flat, [L, J, R, S, K * H]: a column of a row is one line of a tile, and writing it rewrites LINES lines.
Queries have zeros where other heads' keys lie, so that one product serves all heads.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.models import pallas
from grpo_jax.models.attention import MASKED

LANES = 128  # of a vector register
LINES = 16  # that are written at once: of a bfloat16 tile
MEMORY = 8 * 2**20  # bytes of blocks on the chip, with those that are on their way


def turns(angles, heads):
    """What turns flat keys: f32[B, heads * H] factors of a lane, and of the one it pairs with (attention.rotate)."""
    cos, sin = (angle[:, 0, 0] for angle in angles)
    factors = [jnp.tile(jnp.concatenate(halves, -1), heads) for halves in ((cos, cos), (-sin, sin))]
    return jax.lax.optimization_barrier(factors)  # or XLA repeats them in every layer


class _Scratch(NamedTuple):
    """What stays on the chip from one grid step to the next: the new column, and what each line of queries found."""

    k: jax.Array  # f32[rows, K * H], turned
    v: jax.Array  # f32[rows, K * H]
    queries: jax.Array  # f32[rows * lines, K * H], turned; this and the others by row, head and query
    highest: jax.Array  # f32[rows * lines, LANES], score
    total: jax.Array  # f32[rows * lines, LANES], of the scores' exponentials
    mixed: jax.Array  # f32[rows * lines, K * H], values times those


def attend(q, k, v, turns_, cache, layer):
    """(attention output [B, N, H], the last Chunk) of the newest token's q [B, N, H], k and v [B, K, H].

    As attention.rotate, cache.write and cache.attend together, of flat chunks. Heads may be cut over axes of the mesh
    that `shard_map` has left to the partitioner, which cannot cut a kernel.
    """
    heads, columns = PartitionSpec(None, 'tensor'), PartitionSpec(None, None, None, None, 'tensor')
    rest = PartitionSpec()
    specs = cache.replace(prompt=columns, prompt_start=rest, chunks=columns, start=rest, length=rest)
    return pallas.on_devices(_attend, (heads, heads, heads, heads, specs, rest), (heads, columns))(
        q, k, v, turns_, cache, layer
    )


def _attend(q, k, v, turns_, cache, layer):
    (b, n, h), heads, fold = q.shape, k.shape[1], q.shape[0] // cache.prompt_start.shape[0]
    chunks, width, lines = (cache.prompt, *cache.chunks), heads * h, -(-n // heads // 8) * 8
    blocks = [chunk.k.shape[1] for chunk in chunks]
    first = [sum(blocks[:i]) for i in range(len(chunks))]  # grid step in which a chunk's blocks begin
    begun = [sum(chunk.columns for chunk in chunks[1:i]) for i in range(len(chunks))]  # own column where it begins
    rows = _rows_at_once(b, fold, chunks)
    prompts, tiles = max(rows // fold, 1), max(fold // rows, 1)  # of a tile of rows, that share a prompt

    def place(sizes):
        """(block, line) of the new column in the last chunk."""
        return jnp.divmod(sizes[1] - begun[-1], chunks[-1].block)

    def of_prompts(tile, step, sizes, *_):
        return sizes[0], jnp.clip(step, sizes[2], blocks[0] - 1), tile // tiles, 0, 0

    def of_own(i, tile, step, sizes, *_):  # a block that stays where it is is not read again
        most = place(sizes)[0] if i == len(chunks) - 1 else blocks[i] - 1
        return sizes[0], jnp.clip(step - first[i], 0, most), tile, 0, 0

    def written(tile, step, sizes, *_):
        block, line = place(sizes)
        return sizes[0], block, tile, line // LINES, 0

    by_query, by_row = (pl.BlockSpec((rows, count, width), lambda tile, *_: (tile, 0, 0)) for count in (n // heads, 1))
    by_chunk = [
        pl.BlockSpec(
            (1, 1, prompts if i == 0 else rows, *chunk.k.shape[3:]),
            of_prompts if i == 0 else functools.partial(of_own, i),
        )
        for i, chunk in enumerate(chunks)
    ]
    new_lines = pl.BlockSpec((1, 1, rows, LINES, width), written)
    scalars = (
        jnp.stack([layer, cache.length, jnp.min(cache.prompt_start) // cache.prompt.block]).astype(jnp.int32),
        cache.start,
        cache.prompt_start,
    )
    inputs = (
        _swapped(q, heads),
        *(x.reshape(b, 1, width) for x in (k, v, *turns_)),
        *(array for chunk in chunks for array in (chunk.k, chunk.v)),
    )
    last = len(scalars) + len(inputs)
    out, k, v = pallas.call(
        functools.partial(
            _kernel, scale=1 / math.sqrt(h), rows=rows, fold=fold, lines=lines, heads=heads, first=first, begun=begun
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(b // rows, sum(blocks)),
            in_specs=[by_query, *[by_row] * 4, *(spec for spec in by_chunk for _ in 'kv')],
            out_specs=[by_query, new_lines, new_lines],
            scratch_shapes=_Scratch(
                *[pltpu.VMEM((rows, width), jnp.float32)] * 2,
                *[pltpu.VMEM((rows * heads * lines, size), jnp.float32) for size in (width, LANES, LANES, width)],
            ),
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs[0], *inputs[-2:])],
        input_output_aliases={last - 2: 1, last - 1: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
        cost_estimate=_cost(inputs[0], heads * lines, tiles, chunks),
        name='decode_attention',
    )(*scalars, *inputs)
    return out.reshape(b, n // heads, heads, h).swapaxes(1, 2).reshape(q.shape), cache.chunks[-1].replace(k=k, v=v)


def _rows_at_once(b, fold, chunks):
    """Rows of a grid step: the most that fit, of whole groups or of parts of one, with work for two cores."""
    prompt, *own = (2 * 2 * math.prod(chunk.k.shape[3:]) * chunk.k.dtype.itemsize for chunk in chunks)
    fitting = [
        n
        for n in range(1, max(b // 2, 1) + 1)
        if b % n == 0 and (n % fold == 0 or fold % n == 0) and -(-n // fold) * prompt + n * sum(own) <= MEMORY
    ]
    return max(fitting, default=1)


def _swapped(q, heads):
    """[B, N / K, K * H]: the i-th query of every head of keys side by side."""
    b, n, h = q.shape
    return q.reshape(b, heads, n // heads, h).swapaxes(1, 2).reshape(b, n // heads, heads * h)


def _cost(q, lines, tiles, chunks):
    """What a full cache costs: a prompt is read for each of the tiles of rows that share it, all else once."""
    (b, _, width), columns = q.shape, sum(chunk.columns for chunk in chunks)
    item = chunks[0].k.dtype.itemsize
    prompt, *own = (2 * math.prod(chunk.k.shape[1:]) * item for chunk in chunks)
    padded = 2 * b * -(-q.shape[1] // 8) * 8 * width * q.dtype.itemsize  # q and output, in whole tiles
    new = 2 * b * width * ((1 + LINES) * item + 4)
    return pl.CostEstimate(
        flops=4 * b * lines * width * columns,
        transcendentals=b * lines * columns,
        bytes_accessed=tiles * prompt + sum(own) + padded + new,
    )


def _kernel(sizes, start, prompt_start, q, k, v, cos, sin, *refs, scale, rows, fold, lines, heads, first, begun):
    """A grid step: the blocks of some rows that are on the chip are absorbed into running maximum, sum and output."""
    *held, out, out_k, out_v = refs[: -len(_Scratch._fields)]
    scratch = _Scratch(*refs[-len(_Scratch._fields) :])
    tile, step = pl.program_id(0), pl.program_id(1)
    chunks = list(zip(held[::2], held[1::2], strict=True))
    length, size = sizes[1], heads * lines

    def some(i, count=1):
        """The lines of queries of item i, of `count` rows."""
        return pl.ds(pl.multiple_of(i * count * size, 8), count * size)

    def of_head(i, head):
        """The lines of row i's queries of a head."""
        return pl.ds(pl.multiple_of(i * size + head * lines, 8), q.shape[1])

    @pl.when(step == 0)
    def _():
        scratch.queries[...] = jnp.zeros_like(scratch.queries)

        def begin(i, _):
            scratch.k[pl.ds(i, 1)] = _turned(k[i], cos[i], sin[i], heads, out_k.dtype)
            scratch.v[pl.ds(i, 1)] = v[i].astype(jnp.float32)
            x = _turned(q[i], cos[i], sin[i], heads, q.dtype)
            for head in range(heads):
                scratch.queries[of_head(i, head)] = jnp.where(_lanes(head, heads, x.shape), x, 0.0)
            _open(some(i), pl.ds(i, 1), scratch, scale)

        jax.lax.fori_loop(0, rows, begin, None)

    for number, (keys, values) in enumerate(chunks):
        items, block = keys.shape[2], step - first[number]
        left = begun[number] + block * keys.shape[3]  # column
        wanted = (block >= 0) & (left < length) if number else step >= sizes[2]
        if number + 1 < len(chunks):
            wanted &= step < first[number + 1]

        @pl.when(wanted)
        def _(number=number, keys=keys, values=values, items=items, left=left):
            absorb = functools.partial(_absorb, scratch=scratch, scale=scale, dtype=q.dtype)

            def of_prompt(i, _):
                low = prompt_start[tile * rows // fold + i]
                absorb(some(i, rows // items), keys[0, 0, i], values[0, 0, i], lambda at: left + at >= low)

            def own(i, _):
                low = start[tile * rows + i]
                absorb(some(i), keys[0, 0, i], values[0, 0, i], lambda at: (left + at >= low) & (left + at < length))

            jax.lax.fori_loop(0, items, own if number else of_prompt, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        keys, values = chunks[-1]
        line = (length - begun[-1]) % keys.shape[3]
        around = pl.ds(pl.multiple_of(line // LINES * LINES, LINES), LINES)
        here = jax.lax.broadcasted_iota(jnp.int32, out_k.shape[3:], 0) == line % LINES

        def end(i, _):
            found = [
                jnp.where(_lanes(head, heads, q.shape[1:]), scratch.mixed[mine] / scratch.total[mine][:, :1], 0.0)
                for head in range(heads)
                for mine in [of_head(i, head)]
            ]
            out[i] = sum(found).astype(out.dtype)
            for source, new, target in ((keys, scratch.k, out_k), (values, scratch.v, out_v)):
                target[0, 0, i] = jnp.where(here, new[pl.ds(i, 1)].astype(target.dtype), source[0, 0, i, around])

        jax.lax.fori_loop(0, rows, end, None)


def _open(mine, row, scratch, scale):
    """Attention of some lines of queries begins with the new column of their row."""
    score = jnp.sum(scratch.queries[mine] * scratch.k[row], -1, keepdims=True) * scale
    scratch.highest[mine] = jnp.broadcast_to(score, scratch.highest[mine].shape)
    scratch.total[mine] = jnp.ones_like(scratch.total[mine])
    scratch.mixed[mine] = jnp.broadcast_to(scratch.v[row], scratch.mixed[mine].shape)


def _absorb(mine, keys, values, seen, scratch, scale, dtype):
    """A block of keys and values, [S, K * H], joins what some lines have found; seen(columns) are valid."""
    scores = _product(scratch.queries[mine].astype(dtype), keys, 1) * scale
    scores = jnp.where(seen(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)), scores, MASKED)
    highest = scratch.highest[mine]
    most = jnp.maximum(highest, jnp.max(scores, -1, keepdims=True))
    weights, decay = jnp.exp(scores - most[:, :1]), jnp.exp(highest - most)
    scratch.highest[mine] = most
    scratch.total[mine] = scratch.total[mine] * decay + jnp.sum(weights, -1, keepdims=True)
    scratch.mixed[mine] = scratch.mixed[mine] * decay[:, :1] + _product(weights.astype(dtype), values, 0)


def _lanes(head, heads, shape):
    """Whether a lane is one of the head's, bool of the shape [..., K * H]."""
    lane, width = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1), shape[-1] // heads
    return (lane >= head * width) & (lane < (head + 1) * width)


def _turned(x, cos, sin, heads, dtype):
    """f32: x [M, K * H] turned by its angles, as rounded to dtype."""
    width, half = x.shape[-1], x.shape[-1] // heads // 2
    x, lane = x.astype(jnp.float32), jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    other = jnp.where(lane % (2 * half) < half, pltpu.roll(x, width - half, 1), pltpu.roll(x, half, 1))
    return (x * cos + other * sin).astype(dtype).astype(jnp.float32)


def _product(a, b, axis):
    """a [M, X] times b, whose axis has size X, summed in float32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
