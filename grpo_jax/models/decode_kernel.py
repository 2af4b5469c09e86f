"""Attention of one new token over the cache in one Pallas kernel for TPUs, which also writes the token's column.

XLA's form of it (models.cache.attend) is as good where scores and running sums stay on the chip. On chips of two cores
its fusions are split over both, and what one passes to the next goes through main memory: more bytes than keys and
values of few heads have. Here a grid step has a block of columns of some rows on the chip, and only that is read.

Chunks are flat, [L, J, R, S, K * H]: a column of a row is one line of a tile, and writing it rewrites LINES lines. Queries
have zeros where other heads' keys lie, so that one product serves all heads.
"""
import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.models.attention import MASKED

LANES = 128          # of a vector register
LINES = 16           # that are written at once: of a bfloat16 tile
MEMORY = 8 * 2 ** 20  # bytes of blocks on the chip, with those that are on their way


def turns(angles, heads):
    """What turns flat keys: f32[B, heads * H] factors of a lane, and of the one it is paired with (attention.rotate)."""
    cos, sin = (angle[:, 0, 0] for angle in angles)
    factors = [jnp.tile(jnp.concatenate(halves, -1), heads) for halves in ((cos, cos), (-sin, sin))]
    return jax.lax.optimization_barrier(factors)  # or XLA repeats them in every layer


def attend(q, k, v, turns_, cache, layer):
    """(attention output [B, N, H], the last Chunk) of the newest token's q [B, N, H], k and v [B, K, H].

    As attention.rotate, cache.write and cache.attend together, of flat chunks. Heads may be cut over axes of the mesh
    that `shard_map` has left to the partitioner, which cannot cut a kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    if not free:
        return _attend(q, k, v, turns_, cache, layer)
    heads, columns = PartitionSpec(None, 'tensor'), PartitionSpec(None, None, None, None, 'tensor')
    rest = PartitionSpec()
    specs = cache.replace(prompt=columns, prompt_start=rest, chunks=columns, start=rest, length=rest)
    return jax.shard_map(_attend, in_specs=(heads, heads, heads, heads, specs, rest), out_specs=(heads, columns),
                         axis_names=free, check_vma=False)(q, k, v, turns_, cache, layer)


def _attend(q, k, v, turns_, cache, layer):
    (b, n, h), heads = q.shape, k.shape[1]
    chunks = (cache.prompt, *cache.chunks)
    dtype, last = cache.chunks[-1].k.dtype, len(chunks) - 1
    fold, width, lines = b // cache.prompt_start.shape[0], heads * h, -(-n // heads // 8) * 8
    blocks = [chunk.k.shape[1] for chunk in chunks]
    rows = _rows_at_once(b, fold, sum(2 * 2 * chunk.k[0, 0, 0].size * dtype.itemsize for chunk in chunks))
    first = [sum(blocks[:i]) for i in range(last + 1)]           # grid step in which a chunk's blocks begin
    column = [sum(chunk.columns for chunk in chunks[1:i]) for i in range(last + 1)]  # own column in which it begins
    size = chunks[-1].k.shape[3]

    def place(sizes):
        """(block, line) of the new column in the last chunk."""
        return (sizes[1] - column[last]) // size, (sizes[1] - column[last]) % size

    def block_of(i):
        def index(tile, step, sizes, *_):
            if i == 0:
                return sizes[0], jnp.clip(step, sizes[2], blocks[0] - 1), tile * rows // fold // (-(-rows // fold)), 0, 0
            most = place(sizes)[0] if i == last else blocks[i] - 1
            return sizes[0], jnp.clip(step - first[i], 0, most), tile, 0, 0
        return index

    def written(tile, step, sizes, *_):
        block, line = place(sizes)
        return sizes[0], block, tile, line // LINES, 0

    by_row = pl.BlockSpec((rows, width), lambda tile, *_: (tile, 0))
    by_query = pl.BlockSpec((rows, n // heads, width), lambda tile, *_: (tile, 0, 0))

    def of_chunk(i):
        items = rows if i else -(-rows // fold)
        return pl.BlockSpec((1, 1, items, *chunks[i].k.shape[3:]), block_of(i))

    new_lines = pl.BlockSpec((1, 1, rows, LINES, width), written)
    held = [array for chunk in chunks for array in (chunk.k, chunk.v)]
    sizes = jnp.stack([layer, cache.length, jnp.min(cache.prompt_start) // cache.prompt.k.shape[3]]).astype(jnp.int32)
    new = [*(x.astype(dtype).reshape(b, width) for x in (k, v)), *turns_]
    body = functools.partial(_kernel, scale=1 / math.sqrt(h), rows=rows, fold=fold, lines=lines, heads=heads,
                             first=first, column=column)
    call = functools.partial(
        pl.pallas_call, body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(b // rows, sum(blocks)),
            in_specs=[by_query, *[by_row] * 4, *(of_chunk(i // 2) for i in range(2 * len(chunks)))],
            out_specs=[by_query, new_lines, new_lines],
            scratch_shapes=[pltpu.VMEM((rows * size, columns), jnp.float32) for size, columns in (
                (1, width), (1, width), (heads * lines, width), (heads * lines, LANES), (heads * lines, LANES),
                (heads * lines, width))]),
        out_shape=[jax.ShapeDtypeStruct((b, n // heads, width), q.dtype), *(
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in held[-2:])],
        input_output_aliases={3 + 5 + len(held) - 2: 1, 3 + 5 + len(held) - 1: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
        cost_estimate=_cost(b, rows, fold, lines, heads, width, chunks, q.dtype),
        name='decode_attention')
    out, k, v = jax.lax.platform_dependent(
        sizes, cache.start, cache.prompt_start, _swapped(q, heads), *new, *held,
        tpu=call(), default=call(interpret=True))
    out = out.reshape(b, n // heads, heads, h).swapaxes(1, 2).reshape(q.shape)
    return out, cache.chunks[-1].replace(k=k, v=v)


def _rows_at_once(b, fold, row_bytes):
    """Rows of a grid step: the most that fit, of whole groups or of parts of one, with work for two cores."""
    fitting = [n for n in range(1, b + 1) if b % n == 0 and (n % fold == 0 or fold % n == 0)
               and n * row_bytes <= MEMORY and (n < b or b == 1)]
    return max(fitting, default=1)


def _swapped(q, heads):
    """[B, N / K, K * H]: the i-th query of every head of keys side by side."""
    b, n, h = q.shape
    return q.reshape(b, heads, n // heads, h).swapaxes(1, 2).reshape(b, n // heads, heads * h)


def _cost(b, rows, fold, lines, heads, width, chunks, dtype):
    """What a full cache costs: each block is read once for a tile of rows, all else once."""
    reads = max(fold // rows, 1)  # tiles that share a prompt
    cache_bytes = [math.prod(array.shape[1:]) * array.dtype.itemsize for chunk in chunks for array in (chunk.k, chunk.v)]
    queries = 2 * b * lines * width * dtype.itemsize
    new = 2 * b * width * (2 * 4 + LINES * chunks[-1].k.dtype.itemsize)
    columns = chunks[0].columns + sum(chunk.columns for chunk in chunks[1:])
    return pl.CostEstimate(flops=4 * b * heads * lines * width * columns, transcendentals=b * heads * lines * columns,
                           bytes_accessed=sum(cache_bytes[:2]) * reads + sum(cache_bytes[2:]) + queries + new)


def _kernel(sizes, start, prompt_start, q, k, v, cos, sin, *refs, scale, rows, fold, lines, heads, first, column):
    """A grid step: the blocks of some rows that are on the chip are absorbed into running maximum, sum and output."""
    *held, out, out_k, out_v, new_k, new_v, queries, highest, total, mixed = refs
    tile, step = pl.program_id(0), pl.program_id(1)
    chunks = list(zip(held[::2], held[1::2], strict=True))
    length, (_, each, width), size = sizes[1], q.shape, heads * lines

    def of_head(i):
        """Whether a lane is one of head i, bool[N / K, K * H]."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (each, width), 1)
        return (lane >= i * (width // heads)) & (lane < (i + 1) * (width // heads))

    def some(i, count=1):
        """The lines of queries of item i, of `count` rows."""
        return pl.ds(pl.multiple_of(i * count * size, 8), count * size)

    def of_query(i, head):
        """Where the lines of a row's queries of a head begin."""
        return pl.multiple_of(i * size + head * lines, 8)

    def turned(x, cos, sin, dtype):
        """x [M, K * H] turned by its angles, as rounded to dtype."""
        half = width // heads // 2
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        other = jnp.where(lane % (2 * half) < half, pltpu.roll(x, width - half, 1), pltpu.roll(x, half, 1))
        return (x * cos + other * sin).astype(dtype).astype(jnp.float32)

    @pl.when(step == 0)
    def _():  # the new column itself
        new_k[...] = turned(k[...].astype(jnp.float32), cos[...], sin[...], out_k.dtype)
        new_v[...] = v[...].astype(jnp.float32)
        queries[...] = jnp.zeros_like(queries)

        def begin(i, _):
            x = turned(q[i].astype(jnp.float32), cos[pl.ds(i, 1)], sin[pl.ds(i, 1)], q.dtype)
            for head in range(heads):
                queries[pl.ds(of_query(i, head), each)] = jnp.where(of_head(head), x, 0.0)
            mine = some(i)
            score = jnp.sum(queries[mine] * new_k[pl.ds(i, 1)], -1, keepdims=True) * scale
            highest[mine] = jnp.broadcast_to(score, (size, LANES))
            total[mine] = jnp.ones((size, LANES), jnp.float32)
            mixed[mine] = jnp.broadcast_to(new_v[pl.ds(i, 1)], (size, width))
        jax.lax.fori_loop(0, rows, begin, None)

    def absorb(i, count, keys, values, seen):
        """Item i of a block, which `count` rows read; seen(columns of the block) are valid."""
        mine = some(i, count)
        scores = _product(queries[mine].astype(q.dtype), keys[0, 0, i], 1) * scale
        scores = jnp.where(seen(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)), scores, MASKED)
        most = jnp.maximum(highest[mine], jnp.max(scores, -1, keepdims=True))
        weights, decay = jnp.exp(scores - most[:, :1]), jnp.exp(highest[mine] - most)
        highest[mine] = most
        total[mine] = total[mine] * decay + jnp.sum(weights, -1, keepdims=True)
        mixed[mine] = mixed[mine] * decay[:, :1] + _product(weights.astype(q.dtype), values[0, 0, i], 0)

    for number, (keys, values) in enumerate(chunks):
        items, columns = keys.shape[2], keys.shape[3]
        block = step - first[number]
        begun = column[number] + block * columns
        wanted = (block >= 0) & (begun < length) if number else step >= sizes[2]
        if number + 1 < len(chunks):
            wanted &= step < first[number + 1]

        @pl.when(wanted)
        def _(number=number, keys=keys, values=values, items=items, begun=begun):
            def of_prompt(i, _):
                low = prompt_start[tile * rows // fold + i]
                absorb(i, rows // items, keys, values, lambda at: begun + at >= low)

            def own(i, _):
                low = start[tile * rows + i]
                absorb(i, 1, keys, values, lambda at: (begun + at >= low) & (begun + at < length))

            jax.lax.fori_loop(0, items, own if number else of_prompt, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        keys, values = chunks[-1]
        line = (length - column[-1]) % keys.shape[3]
        around = pl.ds(pl.multiple_of(line // LINES * LINES, LINES), LINES)
        here = jax.lax.broadcasted_iota(jnp.int32, out_k.shape[3:], 0) == line % LINES

        def end(i, _):
            found = 0.0
            for head in range(heads):
                mine = pl.ds(of_query(i, head), each)
                found += jnp.where(of_head(head), mixed[mine] / total[mine][:, :1], 0.0)
            out[i] = found.astype(out.dtype)
            for source, new, target in ((keys, new_k, out_k), (values, new_v, out_v)):
                target[0, 0, i] = jnp.where(here, new[pl.ds(i, 1)].astype(target.dtype), source[0, 0, i, around])
        jax.lax.fori_loop(0, rows, end, None)


def _product(a, b, axis):
    """a [M, X] times b, whose axis has size X, summed in float32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
