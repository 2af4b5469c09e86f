"""The sampler's programs: a table of their kinds, and a program for each size that a rollout can reach.

For each kind, `PROGRAMS` has the function that is compiled, its inputs (of `INPUTS`), the inputs that it may
overwrite, and how its results lie on the mesh. Each shard of the rows decodes on its own (`_per_shard`) until its own
rows have ended, so the decode loops have only the collectives that the partitioner adds along the tensor axis.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.models import cache as kv_cache
from grpo_jax.models import linear, lora, transformer
from grpo_jax.models.abstract import abstract_policy
from grpo_jax.sampler import decode, schedule, state, stops
from grpo_jax.sampler.generate import row_keys
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.sampler.schedule import BatchSize, ProgramKey, Schedule
from grpo_jax.sharding import batches, chips, compiled, specs
from grpo_jax.sharding.chips import LANES, LINES
from grpo_jax.sharding.mesh import ROW_AXES, is_here
from grpo_jax.sharding.sides import Sides
from grpo_jax.types import Prompts

# by platform: steps between two visits of the host, columns that attention reads at once, and how often the rows of
# a batch are halved (a CPU pays for each row; an accelerator reads the weights, whatever the rows)
SEGMENT = {'cpu': 32, 'gpu': 64, 'tpu': 64}
BLOCK = {'cpu': 32, 'gpu': 128, 'tpu': 128}
HALVINGS = {'cpu': 10, 'gpu': 3, 'tpu': 3}
# whether programs have no loop over layers, so that each layer has arrays of its own: in a loop, a GPU waits for the
# host in every round, and copies what a layer reads out of the arrays of all layers
BY_LAYER = {'cpu': False, 'gpu': True, 'tpu': False}

# how arrays are cut: along their first axis, along the rows of a chunk, not at all
ROWS, CHUNKS, SAME = PartitionSpec(ROW_AXES), PartitionSpec(None, None, ROW_AXES), PartitionSpec()
BATCH = state.DecodeBatch(
    cache=kv_cache.KVCache(prompt=CHUNKS, prompt_start=ROWS, chunks=CHUNKS, start=ROWS, length=ROWS),
    rows=ROWS,
    last=ROWS,
    live=ROWS,
    thinking=ROWS,
    states=ROWS,
    seen=ROWS,
)


def cache_bytes(
    model_config: transformer.ModelConfig, mesh: jax.sharding.Mesh, shapes: batches.Shapes, sampling: Sampling
) -> int:
    """Bytes on a device for keys and values of all rows at full length, with the copy that shrinking makes."""
    sizes, _ = choose_sizes(model_config, mesh, shapes, sampling)
    return sizes.peak_bytes(*sizes.whole_batch)


def choose_sizes(
    model_config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
    shapes: batches.Shapes,
    sampling: Sampling,
    block: int | None = None,
    segment: int | None = None,
) -> tuple[Schedule, state.CacheFormat]:
    """Chooses (Schedule, CacheFormat) for a sampler; arguments as in make_sampler.

    Raises BadInput where rollout.kernels is 'on' and kernels cannot decode.
    """
    platform, shards = mesh.devices.flat[0].platform, batches.devices_along(mesh, ROW_AXES)
    blocks = 2 if platform == 'cpu' else 1  # at least: XLA on CPUs copies a chunk of one block when it is written
    block = min(block or BLOCK[platform], -(-shapes.tokens // (8 * blocks)) * 8)
    cache_dtype = jnp.dtype(sampling.cache_dtype or sampling.dtype)
    flat = _decodes_in_kernels(model_config, mesh, sampling.kernels, block, cache_dtype)
    heads = model_config.kv_heads // (mesh.shape['tensor'] if _cuts_heads(model_config, mesh) else 1)
    scale_bytes = 4 if cache_dtype.itemsize == 1 else 0
    sizes = schedule.make_schedule(
        (shapes.prompts // shards, shapes.group_size, shapes.tokens),
        block=block,
        segment=segment or SEGMENT[platform],
        halvings=HALVINGS[platform],
        budget=sampling.cache_bytes,
        prompt_columns=state.prompt_columns(shapes.queries, block),
        column_bytes=2 * model_config.layers * heads * (model_config.head_dim * cache_dtype.itemsize + scale_bytes),
    )
    return sizes, state.CacheFormat(block, cache_dtype, flat, BY_LAYER[platform] and not flat)


def _decodes_in_kernels(model_config, mesh, choice, block, cache_dtype):
    """Whether Pallas kernels decode. choice: rollout.kernels.

    'on': they do; raises BadInput where they cannot. 'auto': where they can, and a chip has two cores. 'off': no.
    """
    device, tensor = mesh.devices.flat[0], mesh.shape['tensor']
    hindered = {
        'a device that is neither a TPU nor a CPU': device.platform not in ('tpu', 'cpu'),
        "windows, soft caps, or scales and rotary positions that are not Llama's": not model_config.is_plain,
        'an int8 cache': cache_dtype == jnp.int8,
        f'{model_config.kv_heads} heads of keys on mesh.tensor = {tensor}': not _cuts_heads(model_config, mesh),
        f'blocks of {block} columns, which 16 does not divide': block % LINES,
        'heads of keys on a device that do not fill 128 lanes': device.platform == 'tpu'
        and model_config.kv_heads // tensor * model_config.head_dim % LANES,
    }
    reasons = [reason for reason, hinders in hindered.items() if hinders]
    if choice == 'on' and reasons:
        raise BadInput('rollout.kernels', choice, f'cannot work with {reasons[0]}; choose auto')
    chip = chips.lookup(device.device_kind)
    return not reasons and (choice == 'on' or (choice == 'auto' and chip is not None and chip.cores > 1))


def _cuts_heads(model_config, mesh):
    """Whether heads of keys and values are cut over the tensor axis, as they are where it divides their number."""
    return model_config.kv_heads % mesh.shape['tensor'] == 0


@dataclasses.dataclass(frozen=True)
class SamplerSpec:
    """The static values that all programs of a sampler depend on; abstract inputs and shardings follow from them."""

    model_config: transformer.ModelConfig
    mesh: jax.sharding.Mesh
    shapes: batches.Shapes
    sampling: Sampling
    schedule: Schedule
    cache_format: state.CacheFormat

    @property
    def shards(self) -> int:
        """The number of row shards; each has the sizes of the schedule."""
        return batches.devices_along(self.mesh, ROW_AXES)

    @property
    def rows(self) -> int:
        """B: the number of rows in all shards."""
        return self.shapes.prompts * self.shapes.group_size

    @property
    def weights_dtype(self) -> np.dtype:
        """The dtype of the sampler's matrices."""
        return jnp.dtype(self.sampling.weights_dtype or self.sampling.dtype)

    @property
    def attend_by(self) -> str:
        """attention.Rule.by of prefills: splash if kernels are on (auto: on TPUs) and heads can be cut; else xla."""
        on_tpu = self.mesh.devices.flat[0].platform == 'tpu'
        in_kernels = {'on': True, 'auto': on_tpu, 'off': False}[self.sampling.kernels]
        return 'splash' if in_kernels and _cuts_heads(self.model_config, self.mesh) else 'xla'

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads on one device: all but an embedding table that is no head."""
        table = transformer.param_table(self.model_config)
        sizes = transformer.map_table(lambda path, param: math.prod(param.shape), table)
        if not self.model_config.tie_embeddings:
            sizes.pop('embed')
        return sum(jax.tree.leaves(sizes)) * self.weights_dtype.itemsize // self.mesh.shape['tensor']

    @property
    def abstract_params(self) -> Any:
        """The policy's parameters and adapters as abstract arrays: shapes, dtypes and shardings."""
        return abstract_policy(self.model_config, self.sampling.lora, self.sampling.dtype, self.mesh)

    @functools.cached_property
    def abstract_weights(self) -> Any:
        """The sampler's weights as abstract arrays."""
        return self._abstract_results(schedule.WEIGHTS)

    @functools.cached_property
    def abstract_state(self) -> state.RolloutState:
        """A RolloutState of abstract arrays."""
        return self._abstract_results(schedule.STATE)

    def abstract_batch(self, key: ProgramKey) -> state.DecodeBatch:
        """An abstract DecodeBatch for all shards; each shard has the sizes of the key."""
        prompts, rows = self.shards * (key.prompts or key.rows), self.shards * key.rows
        vocab_size = self.model_config.vocab_size

        def make_empty():
            numbers, flags = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)
            cache = kv_cache.KVCache(
                prompt=self.cache_format.empty_prompts(self.model_config, prompts, self.shapes.queries),
                prompt_start=jnp.zeros(prompts, jnp.int32),
                chunks=tuple(self.cache_format.empty(self.model_config, rows, columns) for columns in key.columns),
                start=numbers,
                length=jnp.zeros(self.shards, jnp.int32),
            )
            return state.DecodeBatch(
                cache=cache,
                rows=numbers,
                last=numbers,
                live=flags,
                thinking=flags,
                states=dict.fromkeys(self.sampling.read_strings, numbers),
                seen=jnp.zeros((rows, vocab_size), bool) if self.sampling.repetition_penalty != 1 else None,
            )

        batch = jax.eval_shape(make_empty)
        return compiled.with_shardings(batch, jax.tree.map(self.sharding, batch))

    def _abstract_results(self, key):
        """The results of a key's program as abstract arrays with shardings."""
        kind = PROGRAMS[key.kind]
        results = jax.eval_shape(functools.partial(kind.function, self, key), *kind.abstract_inputs(self, key))
        return compiled.with_shardings(results, self.shardings(key, results))

    def shardings(self, key: ProgramKey, results: Any) -> Any:
        """A NamedSharding for each result of a key's program."""
        shardings = PROGRAMS[key.kind].shardings
        return shardings(self) if shardings else jax.tree.map(self.sharding, results)

    def sharding(self, array: Any) -> NamedSharding:
        """An array's NamedSharding: by rows, a chunk (5 axes) also by heads if tensor divides them; a scalar whole."""
        if len(array.shape) >= 5:  # a chunk
            heads = 4 if self.cache_format.flat else 3
            cut = ('tensor',) if _cuts_heads(self.model_config, self.mesh) else ()
            return NamedSharding(self.mesh, PartitionSpec(*(None, None, ROW_AXES, None, None)[:heads], *cut))
        return NamedSharding(self.mesh, ROWS if array.shape else SAME)


def _abstract_prompts(spec, key):
    """The abstract Prompts of a step; `first` is a host's array."""
    rows, (p, q) = specs.over_rows(spec.mesh), (spec.shapes.prompts, spec.shapes.queries)
    abstract_type: Any = Prompts  # with abstract arrays in the places of arrays
    return abstract_type(
        tokens=compiled.abstract((p, q), jnp.int32, rows),
        mask=compiled.abstract((p, q), bool, rows),
        ids=compiled.abstract((p,), jnp.int32, rows),
        first=np.zeros(p, np.int32),
        thinking=compiled.abstract((p,), bool, rows) if spec.sampling.thinking_tokens else None,
    )


def _abstract_tables(spec, key):
    """The abstract automata, which every device has."""
    automata = stops.abstract_automata(spec.sampling, spec.model_config.vocab_size)
    return compiled.with_shardings(automata, dict.fromkeys(automata, specs.replicated(spec.mesh)))


def _abstract_chunk(spec, key):
    """The abstract prompt cache in a key's sizes, if the key has prompts; else the key's abstract chunk."""
    cache = spec.abstract_batch(key).cache
    return cache.prompt if key.prompts else cache.chunks[0]


def _abstract_rows(spec, shape):
    """An abstract i32 array that is cut by rows."""
    return compiled.abstract(shape, jnp.int32, specs.over_rows(spec.mesh))


# what programs take: name -> the abstract input, of a SamplerSpec and a ProgramKey; numbers and limits are the host's
INPUTS = {
    'params': lambda spec, key: spec.abstract_params,
    'adapters': lambda spec, key: lora.split(spec.abstract_params)[0],
    'params of layers': lambda spec, key: spec.abstract_params['layers'],
    'weights': lambda spec, key: spec.abstract_weights,
    'weights of layers': lambda spec, key: spec.abstract_weights['layers'],
    'prompts': _abstract_prompts,
    'seed': lambda spec, key: compiled.abstract((), jax.random.key(0).dtype, specs.replicated(spec.mesh)),
    'number': lambda spec, key: np.int32(0),
    'limits': lambda spec, key: np.zeros(spec.rows, np.int32),
    'given tokens': lambda spec, key: _abstract_rows(spec, (spec.rows, spec.shapes.tokens)),
    'rollout': lambda spec, key: batches.abstract_rollout(spec.shapes, specs.over_rows(spec.mesh)),
    'tables': _abstract_tables,
    'state': lambda spec, key: spec.abstract_state,
    'batch': lambda spec, key: spec.abstract_batch(key),
    'batch without chunks': lambda spec, key: _without_chunks(spec.abstract_batch(key)),
    'chunk': _abstract_chunk,
    'order': lambda spec, key: _abstract_rows(spec, (spec.shards * key.survivors,)),
}


def _per_shard(in_specs, out_specs):
    """A decorator of function(spec, key, *inputs): each shard of the rows runs it on its own part of the inputs.

    A scalar that the function returns comes back as an array with one number for each shard.
    """

    def decorate(function):
        def over_shards(spec, key, *inputs):
            def run(*inputs):
                return jax.tree.map(lambda x: x if x.shape else x[None], function(spec, key, *inputs))

            if spec.mesh.size > 1:
                options: Any = dict(axis_names=set(ROW_AXES), check_vma=False)
                run = jax.shard_map(run, mesh=spec.mesh, in_specs=in_specs, out_specs=out_specs, **options)
            return run(*inputs)

        return over_shards

    return decorate


def _cast_weights(spec, weights, shardings=None):
    """Casts weights to the sampler's dtype, applies shardings, if there are any, and quantizes matrices for int8."""
    weights = jax.tree.map(lambda x: x.astype(spec.sampling.dtype), weights)
    if shardings is not None:
        weights = jax.lax.with_sharding_constraint(weights, shardings)
    return linear.matrices_to_int8(weights) if spec.weights_dtype == jnp.int8 else weights


def _convert_weights(spec, key, params):
    """Copies the policy's weights for the sampler: adapters merged, cast or quantized, and not cut along fsdp."""
    shardings = specs.sampler_params(transformer.param_table(spec.model_config), spec.mesh)
    # a layer at a time, or what is gathered is in memory twice
    layers = jax.tree.map(lambda x: x[:, None], params['layers'])
    layers = jax.lax.map(lambda layer: _cast_weights(spec, lora.merge(layer), shardings['layers']), layers)
    if spec.cache_format.by_layer:
        layers = tuple(jax.tree.map(lambda x, i=i: x[i, 0], layers) for i in range(spec.model_config.layers))
    else:
        layers = jax.tree.map(lambda x: x[:, 0], layers)
    others = {name: x for name, x in params.items() if name != 'layers'}
    return _cast_weights(spec, others, {name: shardings[name] for name in others}) | {'layers': layers}


def _adapters_shardings(spec):
    """The shardings of adapters on the sampler's mesh: not cut along fsdp."""
    trained, _ = lora.split(lora.policy_table(spec.model_config, spec.sampling.lora))
    return specs.sampler_params(trained, spec.mesh)


def _weights_shardings(spec):
    """The shardings of the sampler's weights, for matrices in int8 and layers one by one where the spec has them."""
    table = transformer.param_table(spec.model_config)
    shardings = specs.sampler_params(table, spec.mesh)
    if spec.weights_dtype == jnp.int8:
        shardings = linear.int8_shardings(shardings, table)
    if spec.cache_format.by_layer:
        one_layer = jax.tree.map(specs.layer_sharding, shardings['layers'])
        shardings = shardings | {'layers': (one_layer,) * spec.model_config.layers}
    return shardings


def _inspect_layers(spec, key, layers, params):
    """Compares the sampler's layers with the parameters that they were made of; returns a lora.Inspection."""
    return lora.inspect(layers, params, functools.partial(_cast_weights, spec))


def _new_state(spec, key, prompts, seed, step, limit, given_tokens=None):
    """The RolloutState of rows without tokens; ids and step choose the noise."""
    keys = row_keys(seed, step, prompts.ids, spec.shapes.group_size, prompts.first)
    if given_tokens is None:
        given_tokens = jnp.full((spec.rows, spec.shapes.tokens), -1, jnp.int32)
    return state.new_state(prompts, keys, given_tokens, limit, spec.sampling.read_strings)


def _resume_state(spec, key, rollout, prompts, seed, limit, tables):
    """The RolloutState that continues a paused Rollout; ids and the step in which a row began choose the noise."""
    keys = row_keys(seed, rollout.version[:, 0], prompts.ids, spec.shapes.group_size, prompts.first)
    return state.resume_state(rollout, prompts, keys, limit, tables, spec.sampling)


@_per_shard((ROWS,), ROWS)
def _count_in_shard(spec, key, rollout_state):
    """state.count_remaining of a shard's rows."""
    return tuple(state.count_remaining(rollout_state))


def _count_remaining(spec, key, rollout_state):
    """(unfinished rows, tokens of the longest, tokens of all rows); the first two are the largest of any shard."""
    unfinished, longest, tokens = _count_in_shard(spec, key, rollout_state)
    return jnp.max(unfinished), jnp.max(longest), jnp.sum(tokens)


def _opening(function, sizes):
    """Makes the function of a program that opens a DecodeBatch on each shard.

    function: one of state.py that opens a batch. sizes(spec, key): the argument `sizes` of that function.
    """

    @_per_shard((SAME, ROWS, SAME), BATCH)
    def open_batch(spec, key, weights, rollout_state, number):
        config, options, cache_format = spec.model_config, spec.sampling, spec.cache_format
        batch_sizes = sizes(spec, key)
        return function(weights, rollout_state, number, config, options, cache_format, batch_sizes, spec.attend_by)

    return open_batch


def _merging_reports(function):
    """Decorates a program whose last result is a Report of each shard, and merges these Reports.

    The merged Report has the sum of `tokens`, and the largest of each other number.
    """

    def run(spec, key, *inputs):
        batch, rollout_state, reports = function(spec, key, *inputs)
        return batch, rollout_state, jax.tree.map(jnp.max, reports)._replace(tokens=jnp.sum(reports.tokens))

    return run


@_merging_reports
@_per_shard((BATCH, ROWS, SAME), (BATCH, ROWS, ROWS))
def _wake_rows(spec, key, batch, rollout_state, tokens):
    """state.wake_rows of each shard, with a Report as after a segment: (DecodeBatch, RolloutState, Report)."""
    batch, rollout_state = state.wake_rows(_take_shard(batch), rollout_state, tokens)
    live = jnp.sum(batch.live, dtype=jnp.int32)
    return batch, rollout_state, decode.Report(live, jnp.int32(0), *state.count_remaining(rollout_state))


@_merging_reports
@_per_shard((SAME, BATCH, ROWS, SAME, SAME), (BATCH, ROWS, ROWS))
def _decode_segment(spec, key, weights, batch, rollout_state, tables, step):
    """Decodes a segment on each shard (decode.decode_segment); returns (DecodeBatch, RolloutState, Report)."""
    steps, batch = spec.schedule.segment, _take_shard(batch)
    return decode.decode_segment(weights, batch, rollout_state, tables, step, spec.model_config, spec.sampling, steps)


def _empty_chunk(spec, key):
    """An empty chunk for the rows of all shards."""
    (columns,) = key.columns
    return spec.cache_format.empty(spec.model_config, spec.shards * key.rows, columns)


@_per_shard((BATCH,), (BATCH, ROWS))
def _choose_rows(spec, key, batch):
    """(DecodeBatch without chunks, order i32[M]) of rows that a shard keeps when the batch shrinks."""
    return state.choose_rows(_take_shard(batch), key.survivors)


@_per_shard((CHUNKS, ROWS), CHUNKS)
def _gather_rows(spec, key, chunk, order):
    """A copy of a chunk, or of the prompt cache, with the rows that each shard keeps."""
    return state.gather_rows(chunk, order, key.rows // key.prompts if key.prompts else 1)


def _finish(spec, key, rollout_state):
    """The Rollout that a RolloutState has come to, by state.finish."""
    return state.finish(rollout_state, spec.sampling.pad_token)


def _take_shard(batch):
    """A shard's DecodeBatch with cache.length as i32[]; in a program's inputs cache.length is i32[shards]."""
    return batch.replace(cache=batch.cache.replace(length=batch.cache.length[0]))


def _without_chunks(batch):
    """A DecodeBatch without its keys and values."""
    return batch.replace(cache=batch.cache.replace(prompt=None, chunks=()))


class ProgramKind(NamedTuple):
    """What is compiled for the programs of a kind: `function(spec, key, *inputs)`."""

    function: Callable
    inputs: tuple[str, ...]  # of INPUTS
    donated: tuple[str, ...] = ()  # inputs whose memory the results may take
    shardings: Callable | None = None  # SamplerSpec -> shardings of the results; None: by SamplerSpec.sharding

    def abstract_inputs(self, spec: SamplerSpec, key: ProgramKey) -> list:
        """The inputs of a key's program as abstract arrays."""
        return [INPUTS[name](spec, key) for name in self.inputs]


PROGRAMS = {
    # the adapters as they are, in shardings that are not cut along fsdp
    'adapters': ProgramKind(lambda spec, key, adapters: adapters, ('adapters',), shardings=_adapters_shardings),
    'weights': ProgramKind(_convert_weights, ('params',), shardings=_weights_shardings),
    'inspect': ProgramKind(_inspect_layers, ('weights of layers', 'params of layers')),
    'state': ProgramKind(_new_state, ('prompts', 'seed', 'number', 'limits')),
    'given state': ProgramKind(_new_state, ('prompts', 'seed', 'number', 'limits', 'given tokens')),
    'resumed state': ProgramKind(_resume_state, ('rollout', 'prompts', 'seed', 'limits', 'tables')),
    'remaining': ProgramKind(_count_remaining, ('state',)),
    'open': ProgramKind(
        _opening(state.open_batch, lambda spec, key: (key.prompts, key.columns[0])), ('weights', 'state', 'number')
    ),
    'resume': ProgramKind(
        _opening(state.resume_rows, lambda spec, key: (key.rows, key.columns)), ('weights', 'state', 'number')
    ),
    'carry': ProgramKind(
        _opening(state.open_carried, lambda spec, key: (key.prompts, spec.schedule.carried, key.columns[0])),
        ('weights', 'state', 'number'),
    ),
    'wake': ProgramKind(_wake_rows, ('batch without chunks', 'state', 'number'), donated=('state',)),
    'decode': ProgramKind(
        _decode_segment, ('weights', 'batch', 'state', 'tables', 'number'), donated=('batch', 'state')
    ),
    'add': ProgramKind(_empty_chunk, ()),
    'choose': ProgramKind(_choose_rows, ('batch without chunks',)),
    'gather': ProgramKind(_gather_rows, ('chunk', 'order')),
    'finish': ProgramKind(_finish, ('state',)),
}


@functools.lru_cache(maxsize=256)  # programs of some ten samplers; jax frees the programs of older samplers
def _jit_program(spec, key):
    """The jitted function of a program: one object for all equal samplers, so that jax traces and compiles it once."""
    kind = PROGRAMS[key.kind]

    def laid_out(*inputs):
        results = kind.function(spec, key, *inputs)
        return jax.lax.with_sharding_constraint(results, spec.shardings(key, results))

    donated = [kind.inputs.index(name) for name in kind.donated]
    options = compiled.repeatable_on(spec.mesh.devices.flat[0])
    return jax.jit(laid_out, donate_argnums=donated, compiler_options=options)


class SamplerPrograms:
    """The programs of a sampler: an Executable for each ProgramKey that a rollout can reach, and methods to call them.

    Other programs, to replay or to go on after a pause, are added when they are first called. sides: given if learner
    and sampler have devices of their own; then the program that prepares the weights runs on the learner's devices.
    """

    def __init__(self, spec: SamplerSpec, automata: Mapping[str, Any], sides: Sides | None = None):
        self.spec, self._automata, self.sides = spec, automata, sides
        self.weight_bytes = spec.weight_bytes  # that a decode step reads on one device
        adapted = bool(spec.sampling.lora.rank)
        self._sender = schedule.ADAPTERS if adapted else schedule.WEIGHTS  # the program of the learner's side
        keys = schedule.reachable_programs(spec.schedule) + [schedule.INSPECT] * adapted
        keys += [schedule.ADAPTERS] * (adapted and sides is not None)
        self._executables = {key: self._make(key) for key in keys}

    @functools.cached_property
    def tables(self) -> dict[str, Any]:
        """The automata's tables by name, a copy on every device."""
        everywhere = specs.replicated(self.spec.mesh)
        return {name: processes.put(table, everywhere) for name, table in self._automata.items()}

    @property
    def executables(self) -> list[compiled.Executable]:
        """The Executables that a rollout can reach and that run on devices of this process."""
        return [made for key, made in self._executables.items() if is_here(self._spec_of(key).mesh)]

    @property
    def hash(self) -> str:
        """One hash of all programs, equal for samplers with equal programs."""
        executables = sorted((str(key), executable.hash) for key, executable in self._executables.items())
        return compiled.short_hash(' '.join(f'{name} {digest}' for name, digest in executables))

    def trace(self, key: ProgramKey) -> Any:
        """Traces a program, and returns the jax.stages.Traced; nothing is compiled."""
        spec = self._spec_of(key)
        return _jit_program(spec, key).trace(*PROGRAMS[key.kind].abstract_inputs(spec, key))

    def _spec_of(self, key):
        """A program's SamplerSpec: on the learner's mesh for the program whose results go to the sampler's mesh."""
        if self.sides is None or key != self._sender:
            return self.spec
        return dataclasses.replace(self.spec, mesh=self.sides.learner)

    def _make(self, key):
        """The Executable of a program; under `jax.disable_jit()` it calls the function as it is."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
            return compiled.Executable(None, functools.partial(PROGRAMS[key.kind].function, self._spec_of(key), key))
        return compiled.Executable(functools.partial(self.trace, key), name=f"the sampler's program {key}")

    def _call(self, key, *inputs):
        """Calls the program of a key, whose Executable is made at the first call."""
        if key not in self._executables:
            self._executables[key] = self._make(key)
        return self._executables[key](*inputs)

    def send(self, params: Any) -> Any:
        """Sends a policy to the sampler's mesh, and returns it there, as an argument for `weights`.

        Weights are gathered, cast and cut on the learner's side before they are sent. With adapters, parameters are
        sent as they are: the adapters each time, the frozen parameters once. On one mesh, params are returned.
        """
        if self.sides is None:
            return params
        trained, frozen = lora.split(params)
        if frozen is None:
            return self.sides.move(self._call(schedule.WEIGHTS, params), self.spec.abstract_weights)
        adapters, base = lora.split(self.spec.abstract_params)
        moved = self.sides.move(self._call(schedule.ADAPTERS, trained), adapters)
        return lora.join(moved, self.sides.move_once(frozen, base))

    def weights(self, sent: Any) -> Any:
        """The policy's weights as the sampler reads them; sent: what `send` has returned."""
        is_sent = self.sides is not None and self._sender == schedule.WEIGHTS
        return sent if is_sent else self._call(schedule.WEIGHTS, sent)

    def inspect(self, weights: Any, params: Any) -> lora.Inspection | None:
        """The lora.Inspection of the sampler's weights, made of params; None where the policy has no adapters."""
        if not self.spec.sampling.lora.rank:
            return None
        return self._call(schedule.INSPECT, weights['layers'], params['layers'])

    def new_state(self, prompts: Any, seed: Any, step: Any, given: Any, limit: Any) -> state.RolloutState:
        """The RolloutState of rows without tokens; arguments as in Engine.sample."""
        prompts, limits = self._complete(prompts, limit)
        if given is None:
            return self._call(schedule.STATE, prompts, seed, np.int32(step), limits)
        return self._call(schedule.GIVEN_STATE, prompts, seed, np.int32(step), limits, given)

    def resume_state(self, rollout: Any, prompts: Any, seed: Any, limit: Any) -> state.RolloutState:
        """The RolloutState that goes on where a Rollout paused.

        seed: the key of the sampling noise; limit: an int or i32[B], the most new tokens of a row; None: to the end.
        """
        prompts, limits = self._complete(prompts, limit)
        return self._call(schedule.RESUMED_STATE, rollout, prompts, seed, limits, self.tables)

    def _complete(self, prompts, limit):
        """Fills in what a caller may leave out; returns (Prompts with `first` and `thinking`, limits i32[B])."""
        if prompts.first is None:
            prompts = prompts.replace(first=np.zeros(len(prompts.ids), np.int32))
        if not self.spec.sampling.thinking_tokens:
            prompts = prompts.replace(thinking=None)  # which no program reads
        elif prompts.thinking is None:
            prompts = prompts.replace(thinking=np.full(len(prompts.ids), not self.spec.sampling.thinking_start))
        limit = np.int32(self.spec.shapes.tokens if limit is None else limit)
        return prompts, np.broadcast_to(limit, (self.spec.rows,))

    def count_remaining(self, rollout_state: state.RolloutState) -> Any:
        """(unfinished rows, tokens of the longest, tokens of all rows), each i32[]; see `_count_remaining`."""
        return self._call(schedule.REMAINING, rollout_state)

    def open_batch(
        self, kind: str, weights: Any, rollout_state: Any, number: int, size: BatchSize
    ) -> state.DecodeBatch:
        """The DecodeBatch of some rows of every shard, prefilled; kind says which rows, and what `number` is.

        'open': the rows of the number-th set of size.prompts prompts. 'resume': the longest unfinished rows, prefilled
        before own column `number`. 'carry': all rows, the carried ones prefilled before own column `number`.
        """
        return self._call(self.spec.schedule.key(kind, size), weights, rollout_state, np.int32(number))

    def wake(self, batch: Any, rollout_state: Any, tokens: int, size: BatchSize) -> Any:
        """Lets rows paused at their limit get `tokens` tokens more; returns (DecodeBatch, RolloutState, Report)."""
        key, cache = self.spec.schedule.wake_key(size), batch.cache
        bare, rollout_state, report = self._call(key, _without_chunks(batch), rollout_state, np.int32(tokens))
        whole = bare.cache.replace(prompt=cache.prompt, chunks=cache.chunks)
        return bare.replace(cache=whole), rollout_state, report

    def decode_segment(self, weights: Any, batch: Any, rollout_state: Any, step: Any, size: BatchSize) -> Any:
        """Decodes a segment; returns (DecodeBatch, RolloutState, Report). step: the version of the weights."""
        key = self.spec.schedule.key('decode', size)
        return self._call(key, weights, batch, rollout_state, self.tables, np.int32(step))

    def add_chunk(self, batch: state.DecodeBatch, size: BatchSize) -> state.DecodeBatch:
        """The batch with another, empty chunk; size: the batch's size with that chunk."""
        chunk = self._call(self.spec.schedule.add_key(size))
        return batch.replace(cache=batch.cache.replace(chunks=(*batch.cache.chunks, chunk)))

    def shrink(self, batch: state.DecodeBatch, size: BatchSize, smaller: BatchSize) -> state.DecodeBatch:
        """The batch in the smaller size, live rows first, each with a copy of its prompt; deletes the batch's cache."""
        choose, *gathers = self.spec.schedule.shrink_keys(size, smaller)
        bare, order = self._call(choose, _without_chunks(batch))
        gathered = []
        for key, chunk in zip(gathers, (batch.cache.prompt, *batch.cache.chunks), strict=True):
            gathered.append(self._call(key, chunk, order))
            jax.tree.map(lambda x: x.delete(), chunk)  # never two whole caches at once
        return bare.replace(cache=bare.cache.replace(prompt=gathered[0], chunks=tuple(gathered[1:])))

    def finish(self, rollout_state: state.RolloutState) -> Any:
        """The Rollout that a RolloutState has come to, by state.finish."""
        return self._call(schedule.FINISH, rollout_state)

    def fetch_ended(self, rollout_state: state.RolloutState) -> np.ndarray:
        """bool[B]: which rows, of all processes, have met a stop or have C tokens."""
        done, count = processes.fetch((rollout_state.done, rollout_state.count))
        return done | (count >= self.spec.shapes.tokens)

    def read_rows(self, rollout_state: state.RolloutState, pauses: bool = False) -> tuple[np.ndarray, ...]:
        """(row numbers, tokens [R, C], count, ended, truncated) of the R rows that this process owns, as host arrays.

        count: a row's tokens so far. ended: whether the row has met a stop or its limit; with `pauses`, where rows go
        on after their limit, whether it has met a stop or has C tokens. truncated: whether it has met no stop.
        """

        def read_own(array):
            # rows may lie on several devices, and processes, along the tensor axis; one of them owns a row
            pieces = {s.index[0].start or 0: np.asarray(s.data) for s in array.addressable_shards if not s.replica_id}
            return dict(sorted(pieces.items()))

        arrays = (rollout_state.tokens, rollout_state.count, rollout_state.limit, rollout_state.done)
        pieces = [read_own(array) for array in arrays]  # each {first row: array}
        if not pieces[0]:
            return (np.zeros(0, int),) * 5
        rows = np.concatenate([first + np.arange(len(piece)) for first, piece in pieces[0].items()])
        tokens, count, limit, done = (np.concatenate([*piece_at.values()]) for piece_at in pieces)
        return rows, tokens, count, done | (count >= (tokens.shape[1] if pauses else limit)), ~done
