"""Attention of one new token over the cache in one Pallas kernel for TPUs, which also writes the token's column.

XLA's form of it (models.cache.attend) is as good where scores and running sums stay on the chip. On chips of two cores
its fusions are split over both, and what one passes to the next goes through main memory: more bytes than keys and
values of few heads have. Here a grid step has a block of columns of some rows on the chip, and only that is read.

Chunks are flat, [L, J, R, S, K * H]: a column of a row is one line of a tile, and writing it rewrites LINES lines.
Queries have zeros where other heads' keys lie, so that one product serves all heads.
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
    """What turns flat keys: f32[B, heads * H] factors of a lane, and of the one it pairs with (attention.rotate)."""
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
    by_chunk = [pl.BlockSpec((1, 1, prompts if i == 0 else rows, *chunk.k.shape[3:]),
                             of_prompts if i == 0 else functools.partial(of_own, i)) for i, chunk in enumerate(chunks)]
    new_lines = pl.BlockSpec((1, 1, rows, LINES, width), written)
    scalars = (jnp.stack([layer, cache.length, jnp.min(cache.prompt_start) // cache.prompt.block]).astype(jnp.int32),
               cache.start, cache.prompt_start)
    inputs = (_swapped(q, heads), *(x.reshape(b, 1, width) for x in (k, v, *turns_)),
              *(array for chunk in chunks for array in (chunk.k, chunk.v)))
    last = len(scalars) + len(inputs)
    call = functools.partial(
        pl.pallas_call,
        functools.partial(_kernel, scale=1 / math.sqrt(h), rows=rows, fold=fold, lines=lines, heads=heads, first=first,
                          begun=begun),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(b // rows, sum(blocks)),
            in_specs=[by_query, *[by_row] * 4, *(spec for spec in by_chunk for _ in 'kv')],
            out_specs=[by_query, new_lines, new_lines],
            scratch_shapes=[pltpu.VMEM((rows * size, columns), jnp.float32) for size, columns in (
                (1, width), (1, width), (heads * lines, width), (heads * lines, LANES), (heads * lines, LANES),
                (heads * lines, width))]),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs[0], *inputs[-2:])],
        input_output_aliases={last - 2: 1, last - 1: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
        cost_estimate=_cost(inputs[0], heads * lines, tiles, chunks),
        name='decode_attention')
    out, k, v = jax.lax.platform_dependent(*scalars, *inputs, tpu=call(), default=call(interpret=True))
    return out.reshape(b, n // heads, heads, h).swapaxes(1, 2).reshape(q.shape), cache.chunks[-1].replace(k=k, v=v)


def _rows_at_once(b, fold, chunks):
    """Rows of a grid step: the most that fit, of whole groups or of parts of one, with work for two cores."""
    prompt, *own = (2 * 2 * math.prod(chunk.k.shape[3:]) * chunk.k.dtype.itemsize for chunk in chunks)
    fitting = [n for n in range(1, max(b // 2, 1) + 1) if b % n == 0 and (n % fold == 0 or fold % n == 0)
               and -(-n // fold) * prompt + n * sum(own) <= MEMORY]
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
    return pl.CostEstimate(flops=4 * b * lines * width * columns, transcendentals=b * lines * columns,
                           bytes_accessed=tiles * prompt + sum(own) + padded + new)


def _kernel(sizes, start, prompt_start, q, k, v, cos, sin, *refs, scale, rows, fold, lines, heads, first, begun):
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
        queries[...] = jnp.zeros_like(queries)

        def begin(i, _):
            new_k[pl.ds(i, 1)] = turned(k[i].astype(jnp.float32), cos[i], sin[i], out_k.dtype)
            new_v[pl.ds(i, 1)] = v[i].astype(jnp.float32)
            x = turned(q[i].astype(jnp.float32), cos[i], sin[i], q.dtype)
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
        items, block = keys.shape[2], step - first[number]
        left = begun[number] + block * keys.shape[3]  # column
        wanted = (block >= 0) & (left < length) if number else step >= sizes[2]
        if number + 1 < len(chunks):
            wanted &= step < first[number + 1]

        @pl.when(wanted)
        def _(number=number, keys=keys, values=values, items=items, left=left):
            def of_prompt(i, _):
                low = prompt_start[tile * rows // fold + i]
                absorb(i, rows // items, keys, values, lambda at: left + at >= low)

            def own(i, _):
                low = start[tile * rows + i]
                absorb(i, 1, keys, values, lambda at: (left + at >= low) & (left + at < length))

            jax.lax.fori_loop(0, items, own if number else of_prompt, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        keys, values = chunks[-1]
        line = (length - begun[-1]) % keys.shape[3]
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
