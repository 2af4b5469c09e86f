"""The sampler's programs on a mesh: each data shard decodes its own prompts, without a word to the others.

`shard_map` over the axes of rows makes the decode loops independent: they have no collectives but those of
the tensor axis, which is left to the partitioner, and each ends when its own rows do.
"""

import concurrent.futures
import functools
import math
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.models import cache as kv_cache
from grpo_jax.models import decode_kernel, linear, transformer
from grpo_jax.sampler import engine
from grpo_jax.sampler import wave as waves
from grpo_jax.sampler.generate import row_keys
from grpo_jax.sharding import batches, chips, compiled, specs
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import Prompts

ROWS, CHUNKS, SAME = PartitionSpec(ROW_AXES), PartitionSpec(None, None, ROW_AXES), PartitionSpec()
WAVE = waves.Wave(
    cache=kv_cache.KVCache(prompt=CHUNKS, prompt_start=ROWS, chunks=CHUNKS, start=ROWS, length=ROWS),
    rows=ROWS,
    last=ROWS,
    live=ROWS,
    thinking=ROWS,
    states=ROWS,
    seen=ROWS,
)
# by platform: steps between two looks of the host, columns that attention reads at once, and how far the rows of
# a wave are halved (a CPU pays for each row; an accelerator reads the weights, whatever the rows)
SEGMENT = {'cpu': 32, 'gpu': 64, 'tpu': 64}
BLOCK = {'cpu': 32, 'gpu': 128, 'tpu': 128}
HALVINGS = {'cpu': 10, 'gpu': 3, 'tpu': 3}


def make_sampler(c, mesh, shapes, sampling, tables, **options):
    """sampler.engine.Engine, (params, Prompts, key, step) -> Rollout; options are those of make_engine.

    BadInput when the mesh does not divide the prompts, or the cache's budget holds not even one group.
    """
    batches.check_divides(mesh, 'data.prompts_per_step', shapes.prompts)
    return make_engine(c, mesh, shapes, sampling, tables, **options)


def make_engine(
    c,
    mesh,
    shapes,
    sampling,
    tables,
    *,
    dtype,
    cache_dtype,
    weights_dtype,
    budget,
    kernels='auto',
    block=None,
    segment=None,
    ahead=True,
):
    """sampler.engine.Engine for `shapes` on the mesh, with every program that a rollout can reach compiled.

    sampling is a sampler.Sampling; tables are its automata (sampler.stops), perhaps abstract. dtype is that of
    computation, cache_dtype and weights_dtype may be int8 instead; budget is bytes of cache a device, 0: unlimited.
    kernels is rollout.kernels; block and segment replace the platform's. ahead=False compiles programs when they are
    first needed.
    """
    platform = mesh.devices.flat[0].platform
    blocks = 2 if platform == 'cpu' else 1  # at least: XLA on CPUs copies a chunk of one block when it is written
    block = min(block or BLOCK[platform], -(-shapes.tokens // (8 * blocks)) * 8)
    built = SamplerPrograms(
        c,
        mesh,
        shapes,
        sampling,
        tables,
        block=block,
        dtype=jnp.dtype(dtype),
        cache_dtype=jnp.dtype(cache_dtype),
        weights_dtype=jnp.dtype(weights_dtype),
        kernels=kernels,
    )
    plan = engine.plan(
        prompts=shapes.prompts // built.shards,
        group=shapes.group_size,
        max_tokens=shapes.tokens,
        block=block,
        segment=segment or SEGMENT[platform],
        halvings=HALVINGS[platform],
        budget=budget,
        bank_columns=waves.bank_columns(shapes.queries, block),
        column_bytes=built.column_bytes(),
    )
    made = engine.Engine(plan, built, built.shards)
    if ahead and not jax.config.jax_disable_jit:
        built.compile_all(made.visit_all)
    return made


class SamplerPrograms:
    """The compiled pieces that an Engine calls, one for each size of wave; `compile_all` builds them beforehand."""

    def __init__(self, c, mesh, shapes, sampling, tables, *, dtype, cache_dtype, weights_dtype, block, kernels):
        self.shards = int(np.prod([mesh.shape[axis] for axis in ROW_AXES]))
        self._c, self._mesh, self._shapes, self._sampling = c, mesh, shapes, sampling
        everywhere = specs.replicated(mesh)
        self._tables = {
            name: compiled.abstract(table.shape, table.dtype, everywhere)
            if isinstance(table, jax.ShapeDtypeStruct)
            else processes.put(table, everywhere)
            for name, table in tables.items()
        }
        self._dtype, self._weights_dtype = dtype, weights_dtype
        self._cut_heads = c.kv_heads % mesh.shape['tensor'] == 0
        self._cache = dict(block=block, dtype=cache_dtype, flat=self._in_kernels(kernels, block, cache_dtype))
        self._compiled, self._wanted = {}, None

    def _in_kernels(self, wanted, block, cache_dtype):
        """Whether Pallas kernels decode: as rollout.kernels wants, which is auto, on or off."""
        device, parts = self._mesh.devices.flat[0], self._mesh.shape['tensor']
        hindered = {
            'a device that is neither a TPU nor a CPU': device.platform not in ('tpu', 'cpu'),
            'an int8 cache': cache_dtype == jnp.int8,
            f'{self._c.kv_heads} heads of keys on mesh.tensor = {parts}': not self._cut_heads,
            f'blocks of {block} columns, which 16 does not divide': block % decode_kernel.LINES,
            'heads of keys on a device that do not fill 128 lanes': device.platform == 'tpu'
            and self._c.kv_heads // parts * self._c.head_dim % decode_kernel.LANES,
        }
        reasons = [reason for reason, found in hindered.items() if found]
        if wanted == 'on' and reasons:
            raise BadInput('rollout.kernels', wanted, f'cannot work with {reasons[0]}; choose auto')
        chip = chips.lookup(device.device_kind)
        return not reasons and (wanted == 'on' or (wanted == 'auto' and chip is not None and chip.cores > 1))

    @property
    def hash(self):
        """One hash of all programs."""
        return compiled.hashed(' '.join(f'{name} {p.hash}' for name, p in sorted(self._compiled.items())))

    @property
    def names(self):
        """The compiled programs' names."""
        return sorted(self._compiled)

    def column_bytes(self):
        """Bytes of the keys and values of one column of one row on one device."""
        c, item = self._c, self._cache['dtype'].itemsize
        heads = c.kv_heads // (self._mesh.shape['tensor'] if self._cut_heads else 1)
        return 2 * c.layers * heads * (c.head_dim * item + (4 if item == 1 else 0))

    @property
    def device_kind(self):
        """The devices' name."""
        return self._mesh.devices.flat[0].device_kind

    def weight_bytes(self):
        """Bytes of the weights that a decode step reads on one device: all but an embedding table that is no head."""
        sizes = transformer.map_table(lambda path, param: math.prod(param.shape), transformer.param_table(self._c))
        if not self._c.tie_embeddings:
            sizes.pop('embed')
        return sum(jax.tree.leaves(sizes)) * self._weights_dtype.itemsize // self._mesh.shape['tensor']

    def inputs(self):
        """Abstract (params, prompts, key) of a call."""
        rows = specs.over_rows(self._mesh)
        p, q = self._shapes.prompts, self._shapes.queries
        prompts = Prompts(
            *(
                compiled.abstract(shape, kind, rows)
                for shape, kind in (((p, q), jnp.int32), ((p, q), bool), ((p,), jnp.int32))
            )
        )
        key = compiled.abstract((), jax.random.key(0).dtype, specs.replicated(self._mesh))
        return compiled.abstract_params(transformer.param_table(self._c), self._mesh), prompts, key

    def weights(self, params):
        """The policy as the sampler reads it: cast, or quantized, and not cut along fsdp."""
        layout = specs.sampler_params(transformer.param_table(self._c), self._mesh)

        def whole(part, layout):
            part = jax.tree.map(lambda p: p.astype(self._dtype), part)
            part = jax.lax.with_sharding_constraint(part, layout)
            return linear.matrices_to_int8(part) if self._weights_dtype == jnp.int8 else part

        def weights(params):
            # a layer at a time, or what is gathered lies in memory twice
            layers = jax.tree.map(lambda p: p[:, None], params['layers'])
            layers = jax.lax.map(lambda layer: whole(layer, layout['layers']), layers)
            rest = {name: p for name, p in params.items() if name != 'layers'}
            return whole(rest, {name: layout[name] for name in rest}) | {
                'layers': jax.tree.map(lambda p: p[:, 0], layers)
            }

        result = layout
        if self._weights_dtype == jnp.int8:
            result = linear.int8_shardings(layout, transformer.param_table(self._c))
        return self._call('weights', weights, params, layout=result)

    def new_book(self, prompts, key, step, given, limit):
        """waves.new_book, with keys of ids and step."""
        size = (self._shapes.prompts * self._shapes.group_size, self._shapes.tokens)

        def new_book(prompts, key, step, limit, given=None):
            keys = row_keys(key, step, prompts.ids, self._shapes.group_size)
            given = jnp.full(size, -1, jnp.int32) if given is None else given
            return waves.new_book(prompts, keys, given, limit, tuple(self._tables))

        extra = () if given is None else (given,)
        return self._call(
            'book of given tokens' if extra else 'book',
            new_book,
            prompts,
            key,
            np.int32(step),
            self._limit(limit),
            *extra,
        )

    def book_of(self, rollout, prompts, key, limit):
        """waves.book_of, with keys of ids and of the step in which each row began."""

        def book_of(rollout, prompts, key, limit, tables):
            keys = row_keys(key, rollout.version[:, 0], prompts.ids, self._shapes.group_size)
            return waves.book_of(rollout, prompts, keys, limit, tables, self._sampling)

        return self._call('book of a rollout', book_of, rollout, prompts, key, self._limit(limit), self._tables)

    def _limit(self, limit):
        rows = self._shapes.prompts * self._shapes.group_size
        return np.broadcast_to(np.int32(self._shapes.tokens if limit is None else limit), (rows,))

    def outlook(self, book):
        """(unfinished rows of the fullest shard, their longest, tokens of all rows), each i32[]."""

        def outlook(book):
            return jax.tree.map(lambda x: x[None], waves.outlook(book))

        def over_shards(book):
            waiting, longest, tokens = self._per_shard(outlook, (ROWS,), ROWS)(book)
            return jnp.max(waiting), jnp.max(longest), jnp.sum(tokens)

        return self._call('outlook', over_shards, book)

    def open_groups(self, weights, book, index, prompts):
        """waves.open_groups of every shard's `index`-th `prompts` prompts, in one chunk."""

        def open_groups(weights, book, index):
            return _outward(
                waves.open_groups(
                    weights,
                    book,
                    index,
                    self._c,
                    self._sampling,
                    prompts=prompts,
                    columns=self.plan.chunks[0],
                    **self._cache,
                )
            )

        return self._call(
            f'open {prompts} prompts',
            self._per_shard(open_groups, (SAME, ROWS, SAME), WAVE),
            weights,
            book,
            np.int32(index),
        )

    def reopen(self, weights, book, length, rows, chunks):
        """waves.reopen of `rows` rows of every shard, in that many chunks."""

        def reopen(weights, book, length):
            return _outward(
                waves.reopen(
                    weights,
                    book,
                    length,
                    self._c,
                    self._sampling,
                    rows=rows,
                    columns=self.plan.chunks[:chunks],
                    **self._cache,
                )
            )

        return self._call(
            f'reopen {_size(rows, rows, self.plan.chunks[:chunks])}',
            self._per_shard(reopen, (SAME, ROWS, SAME), WAVE),
            weights,
            book,
            np.int32(length),
        )

    def segment(self, weights, wave, book, step):
        """waves.segment: (Wave, Book, Report), the report for the shard that has most, tokens for all of them."""

        def segment(weights, wave, book, tables, step):
            wave, book, report = waves.segment(
                weights, _inward(wave), book, tables, step, self._c, self._sampling, steps=self.plan.segment
            )
            return _outward(wave), book, jax.tree.map(lambda x: x[None], report)

        def over_shards(*arguments):
            shards = self._per_shard(segment, (SAME, WAVE, ROWS, SAME, SAME), (WAVE, ROWS, ROWS))
            wave, book, report = shards(*arguments)
            most = jax.tree.map(jnp.max, report)
            return wave, book, most._replace(tokens=jnp.sum(report.tokens))

        columns = [chunk.columns for chunk in wave.cache.chunks]
        banks, rows = (len(x) // self.shards for x in (wave.cache.prompt_start, wave.rows))
        return self._call(
            f'decode {_size(banks, rows, columns)}',
            over_shards,
            weights,
            wave,
            book,
            self._tables,
            np.int32(step),
            donate=(1, 2),
        )

    def grow(self, wave, chunks):
        """The Wave with chunk number `chunks` (from 0) added, empty."""
        rows, columns = wave.rows.shape[0], self.plan.chunks[chunks]

        def empty():
            return kv_cache.empty(self._c, rows, columns, **self._cache)

        new = self._call(f'add {rows // self.shards} x {columns}', empty)
        return _with_chunks(wave, wave.cache.prompt, (*wave.cache.chunks, new))

    def shrink(self, wave, size):
        """The Wave with `size` slots a shard, live ones first, each with its own copy of its prompt."""
        cache, rows = wave.cache, wave.rows.shape[0] // self.shards
        banks = cache.prompt_start.shape[0] // self.shards

        def choose(wave):
            wave, order = waves.choose_slots(_inward(wave), size)
            return _outward(wave), order

        bare, order = self._call(
            f'choose {size} of {rows} of {banks}',
            self._per_shard(choose, (WAVE,), (WAVE, ROWS)),
            _with_chunks(wave, None, ()),
        )
        taken = []
        for chunk, fold in [(cache.prompt, rows // banks), *((chunk, 1) for chunk in cache.chunks)]:
            take = self._per_shard(functools.partial(waves.take, fold=fold), (CHUNKS, ROWS), CHUNKS)
            name = f'take {size} of {chunk.k.shape[2] // self.shards} x {chunk.k.shape[1]}x{chunk.block} by {fold}'
            taken.append(self._call(name, take, chunk, order))
            if self._wanted is None:
                jax.tree.map(lambda x: x.delete(), chunk)  # never two whole caches at once
        return _with_chunks(bare, taken[0], tuple(taken[1:]))

    def finish(self, book):
        """The Rollout."""
        return self._call('rollout', functools.partial(waves.finish, pad_token=self._sampling.pad_token), book)

    def ended_rows(self, book):
        """(row numbers, tokens, count, ended, truncated) of this process's rows, on the host; each has one owner."""

        def local(array):
            # rows may lie on several devices, and processes, along the tensor axis
            pieces = {s.index[0].start or 0: np.asarray(s.data) for s in array.addressable_shards if not s.replica_id}
            return [pieces[start] for start in sorted(pieces)], sorted(pieces)

        (tokens, starts), *rest = (local(x) for x in (book.tokens, book.count, book.limit, book.done))
        if not starts:
            return (np.zeros(0, int),) * 5
        rows = np.concatenate([start + np.arange(len(part)) for start, part in zip(starts, tokens, strict=True)])
        count, limit, done = (np.concatenate(parts) for parts, _ in rest)
        return rows, np.concatenate(tokens), count, done | (count >= limit), ~done

    def traced(self, visit):
        """({name: jax.stages.Traced} of what `visit()` calls, its result); nothing is compiled."""
        self._wanted = {}
        result = visit()
        wanted, self._wanted = self._wanted, None
        return wanted, result

    def compile_all(self, visit):
        """Compiles what `visit()` calls, on all cores, and prints the list."""
        wanted, _ = self.traced(visit)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            self._compiled = dict(zip(wanted, pool.map(compiled.compile_traced, wanted.values()), strict=True))
        print(f'sampler: {len(wanted)} programs: {"; ".join(wanted)}', file=sys.stderr)

    def _per_shard(self, function, in_specs, out_specs):
        if self._mesh.size == 1:
            return function
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(ROW_AXES), check_vma=False
        )

    def _call(self, name, function, *arguments, donate=(), layout=None):
        """The program's result; while `traced` visits, only the result's shapes."""
        if jax.config.jax_disable_jit:
            return function(*arguments)
        if self._wanted is None and name in self._compiled:
            return self._compiled[name](*arguments)

        def laid_out(*arguments):
            result = function(*arguments)
            return jax.lax.with_sharding_constraint(result, layout or jax.tree.map(self._sharding, result))

        traced = jax.jit(laid_out, donate_argnums=donate).trace(*arguments)
        if self._wanted is None:
            self._compiled[name] = compiled.compile_traced(traced)
            return self._compiled[name](*arguments)
        self._wanted[name] = traced
        return jax.tree.map(
            lambda x, s: compiled.abstract(x.shape, x.dtype, s),
            traced.out_info,
            layout or jax.tree.map(self._sharding, traced.out_info),
        )

    def _sharding(self, array):
        """Chunks are cut by rows and, where it divides them, by heads; all else by rows, and scalars not at all."""
        if len(array.shape) >= 5:
            heads = 4 if self._cache['flat'] else 3
            cut = (None, None, ROW_AXES, None, None)[:heads] + (('tensor',) if self._cut_heads else ())
            return NamedSharding(self._mesh, PartitionSpec(*cut))
        return NamedSharding(self._mesh, ROWS if array.shape else SAME)


def _inward(wave):
    """A shard's Wave from the one that crosses the program's border, where each shard has its own length."""
    return wave.replace(cache=wave.cache.replace(length=wave.cache.length[0]))


def _outward(wave):
    return wave.replace(cache=wave.cache.replace(length=wave.cache.length[None]))


def _with_chunks(wave, prompt, chunks):
    return wave.replace(cache=wave.cache.replace(prompt=prompt, chunks=chunks))


def _size(banks, rows, columns):
    return f'{rows} rows of {banks} prompts x {"+".join(str(n) for n in columns)}'
