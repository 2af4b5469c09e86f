"""Sparse flash attention: Pallas kernels for TPUs, with gradients; scores and weights never leave the chip.

FlashAttention-2 (arXiv 2307.08691), sparse by blocks like jax's own splash attention. Splash attention takes masks that
are known at tracing, and segments that do not see each other. Here each query attends to runs of columns, which are
arrays. They express padding, windows that differ from layer to layer, a device's share of the columns, and prompts that
several completions read. Blocks without an allowed pair are neither read nor multiplied, whatever the lengths.

Queries lie along the lanes of a register and keys along its sublanes. So a query's maximum and sum are elementwise, and
only keys and values are transposed. A grid step takes several query heads that share a key head, which is read once.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from grpo_jax.models.kernels import pallas
from grpo_jax.sharding.chips import LANES
from grpo_jax.types import Array

BLOCK = 512  # most columns of queries, and of keys, of a grid step
HEADS, WIDTH = 8, 1024  # most query heads in a grid step, and most numbers in their vectors together
MEMORY = 48 * 2**20  # bytes on the chip that a kernel may take
MASKED, LOWEST = -2e38, -1e30  # masked scores, and the maximum to begin with: exp(MASKED - LOWEST) is 0


class Tiling(NamedTuple):
    """The constants that the kernels are compiled for."""

    scale: float  # factor of products of queries with keys
    cap: float  # soft cap of the scaled products; 0: none
    heads: int  # query heads in a grid step
    shared: int  # query heads that share a key head
    queries: int  # columns in a block of queries
    keys: int  # columns in a block of keys
    steps: int  # most pairs of blocks that are read, for a row and a head

    @property
    def parts(self):
        """Number of grid steps for the query heads that share a key head."""
        return self.shared // self.heads


def attend_runs(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K H'],
    runs: Int[Array, 'B R T'],
    *,
    scale: float,
    cap: float = 0.0,
    max_columns: int = 0,
) -> Float[Array, 'B T N H']:
    """Attention output of each query over the keys in its runs of columns; 0 where all its runs are empty.

    runs: for each query the first column and the end of each run, thus R = 2 * number of runs; runs may not overlap.
    max_columns: most columns in a query's runs together, 0: any number; only the estimated cost depends on it, which
    also supposes that the queries are the last T columns. scale, cap: as in attention.Rule. Heads may be sharded over
    the mesh's tensor axis, unless an outer `shard_map` has made it manual.
    """
    heads, replicated = PartitionSpec(None, None, 'tensor'), PartitionSpec()
    attend_own = functools.partial(_attend_own_heads, scale=scale, cap=cap, max_columns=max_columns)
    return pallas.shard_map_free_axes(attend_own, (heads, heads, heads, replicated), heads)(q, k, v, runs)


def _attend_own_heads(q, k, v, runs, scale, cap, max_columns):
    """What attend_runs returns, for the heads on one device."""
    (_, t, n, h), (s, kv_heads) = q.shape, k.shape[1:3]
    padding, key_padding = -t % LANES, -s % LANES
    queries, keys = _block_size(t + padding), _block_size(s + key_padding)
    shared = n // kv_heads
    heads = max(i for i in range(1, HEADS + 1) if shared % i == 0 and (i == 1 or i * h <= WIDTH))
    steps = _count_steps(t + padding, s + key_padding, queries, keys, max_columns)
    tiling = Tiling(scale, cap, heads, shared, queries, keys, steps)
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))).transpose(0, 2, 3, 1)
    k, v = (jnp.pad(x, ((0, 0), (0, key_padding), (0, 0), (0, 0))).swapaxes(1, 2) for x in (k, v))
    runs = jnp.pad(runs, ((0, 0), (0, 0), (0, padding)))
    mixed: Any = _attend(q, k, v, runs, tiling)
    return mixed.transpose(0, 3, 1, 2)[:, :t]


def _block_size(columns):
    """The largest block size that divides `columns`: whole registers, at most BLOCK."""
    return max(size for size in range(LANES, BLOCK + 1, LANES) if columns % size == 0)


def _count_steps(columns, key_columns, queries, keys, max_columns):
    """Tiling.steps: for each block of queries, the key blocks up to its end, at most as many as its runs can reach.

    columns, key_columns: of all queries and all keys. queries, keys: columns in a block.
    """
    ends = range(key_columns - columns + queries, key_columns + 1, queries)
    most = -(-(max_columns + queries) // keys) + 2 if max_columns else key_columns // keys
    return sum(min(-(-end // keys), most) for end in ends)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, runs, tiling):
    """Attention output [B, N, H, T] of q (same shape) over k, v [B, K, S, H]; T and S are multiples of blocks."""
    return _forward(q, k, v, runs, tiling)[0]


def _attend_and_save(q, k, v, runs, tiling):
    """(the output of _attend, the arrays that _attend_backward reads)."""
    out, total = _forward(q, k, v, runs, tiling)
    return out, (q, k, v, runs, out, total)


def _attend_backward(tiling, saved, grad):
    """(gradients of q, k and v, None for runs) in _attend, from `grad`, the gradient of its output."""
    q, k, v, runs, out, total = saved
    mean = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), 2, keepdims=True)
    queries = q, grad, total, mean
    return _query_gradient(queries, k, v, runs, tiling), *_key_gradients(queries, k, v, runs, tiling), None


_attend.defvjp(_attend_and_save, _attend_backward)


class Operand(NamedTuple):
    """An input or output of a kernel, and how the grid cuts it into blocks."""

    array: Any
    spec: pl.BlockSpec
    moves: bool  # whether each step with work reads another block, which counts in the cost


class Pass(NamedTuple):
    """How a kernel's grid goes over rows, key heads and blocks; on its last axis, a table says which block to read."""

    grid: tuple[int, ...]
    summed_axes: int  # how many of the last axes have steps that add to one output
    by_query: Any  # (array [B, N, X, T] or [B, R, T]) -> Operand
    by_key: Any  # (array [B, K, S, H], or with transposed=True [B, K, H, S]) -> Operand


def _pass_over_keys(tiling, q, k):
    """The Pass in which each block of queries meets one block of keys after another."""
    (b, _, _, t), (kv_heads, s, h) = q.shape, k.shape[1:]
    blocks, steps = t // tiling.queries, s // tiling.keys

    def by_query(x):
        def place(row, head, part, block, *_):
            return row, head * tiling.parts + part, 0, block

        return _query_operand(x, place, tiling, moves=False)

    def by_key(x, transposed=False):
        def place(row, head, _, block, step, table):
            key_block = table[(row * blocks + block) * steps + step]
            return (row, head, 0, key_block) if transposed else (row, head, key_block, 0)

        return Operand(x, pl.BlockSpec((1, 1, h, tiling.keys) if transposed else (1, 1, tiling.keys, h), place), True)

    return Pass((b, kv_heads, tiling.parts, blocks, steps), 1, by_query, by_key)


def _pass_over_queries(tiling, q, k):
    """The Pass in which each block of keys meets one block of queries after another, for all heads that share it."""
    (b, _, _, t), (kv_heads, s, h) = q.shape, k.shape[1:]
    blocks, steps = s // tiling.keys, t // tiling.queries

    def by_query(x):
        def place(row, head, block, part, step, table):
            return row, head * tiling.parts + part, 0, table[(row * blocks + block) * steps + step]

        return _query_operand(x, place, tiling, moves=True)

    def by_key(x):
        return Operand(
            x, pl.BlockSpec((1, 1, tiling.keys, h), lambda row, head, block, *_: (row, head, block, 0)), False
        )

    return Pass((b, kv_heads, blocks, tiling.parts, steps), 2, by_query, by_key)


def _query_operand(x, place, tiling, moves):
    """Operand for x [B, N, X, T], with lines for each query head, or x [B, R, T], which all heads share.

    place: maps a grid step to the block (row, head, line, block of queries).
    """
    if x.ndim == 4:
        return Operand(x, pl.BlockSpec((1, tiling.heads, x.shape[2], tiling.queries), place), moves)

    def shared_place(*at):
        row, _, line, block = place(*at)
        return row, line, block

    return Operand(x, pl.BlockSpec((1, x.shape[1], tiling.queries), shared_place), moves)


def _forward(q, k, v, runs, tiling):
    """(attention output [B, N, H, T], log-sum-exp f32[B, N, 1, T] of each query's scores)."""
    (b, n, h, t), lines, over = q.shape, (tiling.heads, 1, tiling.queries), _pass_over_keys(tiling, q, k)
    total = jax.ShapeDtypeStruct((b, n, 1, t), jnp.float32)
    return _call(
        _forward_kernel,
        over,
        _blocks_to_read(_needed_blocks(runs, tiling, k.shape[2])),
        [over.by_query(runs), over.by_query(q), over.by_key(k), over.by_key(v.swapaxes(2, 3), transposed=True)],
        [over.by_query(q), over.by_query(total)],
        [lines, lines, (tiling.heads, h, tiling.queries)],
        tiling,
        products=2,
    )


def _query_gradient(queries, k, v, runs, tiling):
    """The gradient of q, where queries is the tuple (q, output's gradient, log-sum-exp, mean) of _attend_backward."""
    over = _pass_over_keys(tiling, queries[0], k)
    (gradient,) = _call(
        _query_gradient_kernel,
        over,
        _blocks_to_read(_needed_blocks(runs, tiling, k.shape[2])),
        [*map(over.by_query, (runs, *queries)), *map(over.by_key, (k, v)), over.by_key(k.swapaxes(2, 3), True)],
        [over.by_query(queries[0])],
        [(tiling.heads, k.shape[3], tiling.queries)],
        tiling,
        products=3,
    )
    return gradient


def _key_gradients(queries, k, v, runs, tiling):
    """The gradients of k and v; queries as in _query_gradient."""
    over = _pass_over_queries(tiling, queries[0], k)
    return _call(
        _key_gradients_kernel,
        over,
        _blocks_to_read(_needed_blocks(runs, tiling, k.shape[2]).swapaxes(1, 2)),
        [*map(over.by_query, (runs, *queries)), *map(over.by_key, (k, v))],
        [over.by_key(k), over.by_key(v)],
        [(tiling.keys, k.shape[3])] * 2,
        tiling,
        products=4,
    )


def _call(kernel, over, table, inputs, outputs, scratch, tiling, *, products):
    """Calls a kernel over a Pass and returns its outputs.

    table: _blocks_to_read. inputs, outputs: Operands. scratch: shapes of float32 scratch arrays. products: number of
    matrix products for each pair of blocks, for the cost.
    """
    return pallas.call(
        functools.partial(kernel, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=over.grid,
            in_specs=[x.spec for x in inputs],
            out_specs=[x.spec for x in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel',) * (5 - over.summed_axes) + ('arbitrary',) * over.summed_axes,
            vmem_limit_bytes=MEMORY,
        ),
        cost_estimate=_cost(over.grid, inputs, outputs, tiling, products),
        name=f'splash{kernel.__name__.removesuffix("_kernel")}',
    )(table.reshape(-1), *(x.array for x in inputs))


def _cost(grid, inputs, outputs, tiling, products):
    """CostEstimate of a kernel: tiling.steps pairs of blocks for each row and head, with `products` products each."""
    pairs = grid[0] * grid[1] * tiling.parts * tiling.steps
    scores = pairs * tiling.heads * tiling.queries * tiling.keys
    bytes_a_pair = sum(_padded_bytes(x.spec.block_shape, x.array.dtype) for x in inputs if x.moves)
    bytes_once = sum(_padded_bytes(x.array.shape, x.array.dtype) for x in (*inputs, *outputs) if not x.moves)
    return pl.CostEstimate(
        flops=2 * products * scores * inputs[1].array.shape[2],
        transcendentals=scores,
        bytes_accessed=pairs * bytes_a_pair + bytes_once,
    )


def _padded_bytes(shape, dtype):
    """Bytes of an array whose last axis is padded to whole registers."""
    *lines, lanes = shape
    return math.prod(lines) * (lanes + -lanes % LANES) * jnp.dtype(dtype).itemsize


def _needed_blocks(runs, tiling, columns):
    """bool[B, query blocks, key blocks]: whether a run of any query in the one block reaches into the other."""
    b, count, t = runs.shape
    first, end = jnp.moveaxis(runs.reshape(b, count // 2, 2, t // tiling.queries, tiling.queries), 2, 0)
    begin = jnp.min(jnp.where(first < end, first, columns), -1)[..., None]
    last = jnp.max(jnp.where(first < end, end, 0), -1)[..., None]
    block = jnp.arange(0, columns, tiling.keys)
    return jnp.any((begin < block + tiling.keys) & (last > block), 1)


def _blocks_to_read(needed):
    """Block index to read at each step, i32 with the shape of `needed`.

    A step that needs no block repeats the index before it, or the first needed one, so that nothing is loaded.
    """
    numbers = jnp.arange(needed.shape[-1])
    latest = jax.lax.cummax(jnp.where(needed, numbers, -1), axis=needed.ndim - 1)
    return jnp.where(latest < 0, jnp.argmax(needed, -1)[..., None], latest).astype(jnp.int32)


def _is_needed(table, axis):
    """Whether a grid step has work; table: _blocks_to_read, flattened; axis: the grid axis of the block that stays."""
    line, step = pl.program_id(0) * pl.num_programs(axis) + pl.program_id(axis), pl.program_id(4)
    return table[line * pl.num_programs(4) + step] == step


def _mark_allowed(runs, block, tiling):
    """bool[keys, queries]: whether a query attends to a key; block: the number of the key block."""
    columns = block * tiling.keys + jax.lax.broadcasted_iota(jnp.int32, (tiling.keys, tiling.queries), 0)
    lines = [runs[0, i : i + 1] for i in range(runs.shape[1])]
    inside = [(columns >= first) & (columns < end) for first, end in zip(lines[::2], lines[1::2], strict=True)]
    return functools.reduce(jnp.logical_or, inside)


def _scores(keys, queries, allowed, tiling):
    """(scores f32[keys, queries], MASKED where not allowed; the soft cap's derivative there, None without a cap)."""
    products, slope = _product(keys, queries, 0) * tiling.scale, None
    if tiling.cap:
        tanh = jnp.tanh(products / tiling.cap)
        products, slope = tiling.cap * tanh, 1 - tanh * tanh
    return jnp.where(allowed, products, MASKED), slope


def _product(a, b, axis):
    """The matrix product of a [M, X] and b, summed over b's axis `axis` in float32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _forward_kernel(*refs, tiling):
    """Adds a block of keys k [keys, H] and values v [H, keys] to the running softmax of a block of queries."""
    table, runs, q, k, v, out, total, highest, sums, mixed = refs
    step, last = pl.program_id(4), pl.num_programs(4) - 1

    @pl.when(step == 0)
    def _():
        highest[...] = jnp.full_like(highest, LOWEST)
        sums[...], mixed[...] = jnp.zeros_like(sums), jnp.zeros_like(mixed)

    @pl.when(_is_needed(table, 3))
    def _():
        allowed, keys, values = _mark_allowed(runs, step, tiling), k[0, 0], v[0, 0]
        for head in range(tiling.heads):
            scores, _ = _scores(keys, q[0, head], allowed, tiling)
            most = jnp.maximum(highest[head], jnp.max(scores, 0, keepdims=True))
            weights, decay = jnp.exp(scores - most), jnp.exp(highest[head] - most)
            highest[head] = most
            sums[head] = sums[head] * decay + jnp.sum(weights, 0, keepdims=True)
            mixed[head] = mixed[head] * decay + _product(values, weights.astype(values.dtype), 0)

    @pl.when(step == last)
    def _():
        divisor = jnp.where(sums[...] == 0, 1.0, sums[...])
        out[0] = (mixed[...] / divisor).astype(out.dtype)
        total[0] = highest[...] + jnp.log(divisor)


def _score_gradients(head, queries, keys, values, allowed, tiling):
    """(attention weights f32[keys, queries], gradients of the products of queries with keys) for one query head."""
    q, grad, total, mean = queries
    scores, slope = _scores(keys, q[0, head], allowed, tiling)
    weights = jnp.exp(scores - total[0, head])
    gradients = weights * (_product(values, grad[0, head], 0) - mean[0, head]) * tiling.scale
    return weights, gradients if slope is None else gradients * slope


def _query_gradient_kernel(*refs, tiling):
    """Adds what a block of keys contributes to the gradient of a block of queries."""
    table, runs, *queries, k, v, k_transposed, out, sums = refs
    step, last = pl.program_id(4), pl.num_programs(4) - 1

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    @pl.when(_is_needed(table, 3))
    def _():
        allowed, keys, values = _mark_allowed(runs, step, tiling), k[0, 0], v[0, 0]
        for head in range(tiling.heads):
            _, gradients = _score_gradients(head, queries, keys, values, allowed, tiling)
            sums[head] += _product(k_transposed[0, 0], gradients.astype(keys.dtype), 0)

    @pl.when(step == last)
    def _():
        out[0] = sums[...].astype(out.dtype)


def _key_gradients_kernel(*refs, tiling):
    """Adds what a block of queries contributes to the gradients of a block of keys and values."""
    table, runs, *queries, k, v, k_out, v_out, k_sums, v_sums = refs
    block, part, step = (pl.program_id(axis) for axis in (2, 3, 4))
    parts, steps = pl.num_programs(3), pl.num_programs(4)

    @pl.when((part == 0) & (step == 0))
    def _():
        k_sums[...], v_sums[...] = jnp.zeros_like(k_sums), jnp.zeros_like(v_sums)

    @pl.when(_is_needed(table, 2))
    def _():
        allowed, keys, values = _mark_allowed(runs, block, tiling), k[0, 0], v[0, 0]
        for head in range(tiling.heads):
            weights, gradients = _score_gradients(head, queries, keys, values, allowed, tiling)
            k_sums[...] += _product(gradients.astype(keys.dtype), queries[0][0, head], 1)
            v_sums[...] += _product(weights.astype(values.dtype), queries[1][0, head], 1)

    @pl.when((part == parts - 1) & (step == steps - 1))
    def _():
        k_out[0, 0], v_out[0, 0] = k_sums[...].astype(k_out.dtype), v_sums[...].astype(v_out.dtype)
