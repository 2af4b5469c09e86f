"""The sampler's programs: one for each size that a rollout can reach, and the sizes that are chosen for a platform."""

from collections.abc import Mapping
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.models import lora, transformer
from grpo_jax.sampler import schedule, state
from grpo_jax.sampler.definitions import SamplerSetup, cuts_heads, without_chunks
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.sampler.schedule import BatchSize, ProgramKey
from grpo_jax.sharding import batches, chips, compiled, specs
from grpo_jax.sharding.chips import LANES, LINES
from grpo_jax.sharding.mesh import ROW_AXES

# by platform: steps between two visits of the host, columns that attention reads at once, and how far the rows of
# a batch are halved (a CPU pays for each row; an accelerator reads the weights, whatever the rows)
SEGMENT = {'cpu': 32, 'gpu': 64, 'tpu': 64}
BLOCK = {'cpu': 32, 'gpu': 128, 'tpu': 128}
HALVINGS = {'cpu': 10, 'gpu': 3, 'tpu': 3}
# whether programs have no loop over layers, each of which then has arrays of its own: a GPU waits for the host in every
# round of a loop, and copies what a layer reads out of the arrays of all
BY_LAYER = {'cpu': False, 'gpu': True, 'tpu': False}


def cache_bytes(
    model_config: transformer.ModelConfig, mesh: jax.sharding.Mesh, shapes: batches.Shapes, sampling: Sampling
) -> int:
    """Bytes on a device of the keys and values of all rows at full length, with the copy that shrinking makes."""
    sizes, _ = choose_sizes(model_config, mesh, shapes, sampling)
    return sizes.peak(*sizes.whole)


def choose_sizes(
    model_config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
    shapes: batches.Shapes,
    sampling: Sampling,
    block: int | None = None,
    segment: int | None = None,
) -> tuple[schedule.Schedule, state.CacheFormat]:
    """(Schedule, CacheFormat) of a sampler; arguments as in make_sampler."""
    platform, shards = mesh.devices.flat[0].platform, batches.devices_along(mesh, ROW_AXES)
    blocks = 2 if platform == 'cpu' else 1  # at least: XLA on CPUs copies a chunk of one block when it is written
    block = min(block or BLOCK[platform], -(-shapes.tokens // (8 * blocks)) * 8)
    cache_dtype = jnp.dtype(sampling.cache_dtype or sampling.dtype)
    flat = _decodes_in_kernels(model_config, mesh, sampling.kernels, block, cache_dtype)
    sizes = schedule.make_schedule(
        (shapes.prompts // shards, shapes.group_size, shapes.tokens),
        block=block,
        segment=segment or SEGMENT[platform],
        halvings=HALVINGS[platform],
        budget=sampling.cache_bytes,
        prompt_columns=state.prompt_columns(shapes.queries, block),
        column_bytes=_column_bytes(model_config, mesh, cache_dtype),
    )
    return sizes, state.CacheFormat(block, cache_dtype, flat, BY_LAYER[platform] and not flat)


def _column_bytes(model_config, mesh, cache_dtype):
    """Bytes of the keys and values of one column of one row on one device."""
    heads = model_config.kv_heads // (mesh.shape['tensor'] if cuts_heads(model_config, mesh) else 1)
    scale_bytes = 4 if cache_dtype.itemsize == 1 else 0
    return 2 * model_config.layers * heads * (model_config.head_dim * cache_dtype.itemsize + scale_bytes)


def _decodes_in_kernels(model_config, mesh, choice, block, cache_dtype):
    """Whether Pallas kernels decode: as rollout.kernels says, which is auto, on or off."""
    device, tensor = mesh.devices.flat[0], mesh.shape['tensor']
    hindered = {
        'a device that is neither a TPU nor a CPU': device.platform not in ('tpu', 'cpu'),
        "windows, soft caps, or scales and rotary positions that are not Llama's": not model_config.is_plain,
        'an int8 cache': cache_dtype == jnp.int8,
        f'{model_config.kv_heads} heads of keys on mesh.tensor = {tensor}': not cuts_heads(model_config, mesh),
        f'blocks of {block} columns, which 16 does not divide': block % LINES,
        'heads of keys on a device that do not fill 128 lanes': device.platform == 'tpu'
        and model_config.kv_heads // tensor * model_config.head_dim % LANES,
    }
    reasons = [reason for reason, hinders in hindered.items() if hinders]
    if choice == 'on' and reasons:
        raise BadInput('rollout.kernels', choice, f'cannot work with {reasons[0]}; choose auto')
    chip = chips.lookup(device.device_kind)
    return not reasons and (choice == 'on' or (choice == 'auto' and chip is not None and chip.cores > 1))


class SamplerPrograms:
    """A table ProgramKey -> Executable of what a rollout can reach, and the calls that an Engine makes of it.

    Numbers that the host reads are those of the shard that has most, tokens those of all shards.
    """

    def __init__(self, setup: SamplerSetup, automata: Mapping[str, Any]):
        self.setup, self._automata = setup, automata
        self.mesh, self.device_kind = setup.mesh, setup.mesh.devices.flat[0].device_kind
        self.weight_bytes = _weight_bytes(setup)  # that a decode step reads
        keys = schedule.reachable(setup.schedule) + [schedule.INSPECT] * bool(setup.sampling.lora.rank)
        self._executables = {} if _without_jit() else {key: self._make(key) for key in keys}

    @functools.cached_property
    def tables(self) -> dict[str, Any]:
        """The automata on every device."""
        everywhere = specs.replicated(self.mesh)
        return {name: processes.put(table, everywhere) for name, table in self._automata.items()}

    @property
    def executables(self) -> list[compiled.Executable]:
        """The Executables of all programs that a rollout can reach; none without jit."""
        return list(self._executables.values())

    @property
    def hash(self) -> str:
        """One hash of all programs."""
        executables = sorted((str(key), executable.hash) for key, executable in self._executables.items())
        return compiled.hashed(' '.join(f'{name} {digest}' for name, digest in executables))

    def trace(self, key: ProgramKey) -> Any:
        """The jax.stages.Traced of a key's program; nothing is compiled."""
        return _jitted(self.setup, key).trace(*self.setup.inputs(key))

    def _make(self, key):
        return compiled.Executable(functools.partial(self.trace, key), name=f"the sampler's program {key}")

    def _call(self, key, *arguments):
        if _without_jit():
            return self.setup.program(key).function(*arguments)
        if key not in self._executables:
            self._executables[key] = self._make(key)
        return self._executables[key](*arguments)

    def weights(self, params: Any) -> Any:
        """The policy as the sampler reads it."""
        return self._call(schedule.WEIGHTS, params)

    def inspect(self, weights: Any, params: Any) -> lora.Inspection | None:
        """What became of adapters in the sampler's weights; None where the policy has none."""
        if not self.setup.sampling.lora.rank:
            return None
        return self._call(schedule.INSPECT, weights['layers'], params['layers'])

    def new_state(self, prompts: Any, key: Any, step: Any, given: Any, limit: Any) -> state.RolloutState:
        """The state of rows without tokens."""
        inputs = (self._numbered(prompts), key, np.int32(step), self._limits(limit))
        if given is None:
            return self._call(schedule.STATE, *inputs)
        return self._call(schedule.GIVEN_STATE, *inputs, given)

    def resume_state(self, rollout: Any, prompts: Any, key: Any, limit: Any) -> state.RolloutState:
        """The state that goes on where a Rollout paused."""
        inputs = (rollout, self._numbered(prompts), key, self._limits(limit), self.tables)
        return self._call(schedule.RESUMED_STATE, *inputs)

    def _limits(self, limit):
        shapes = self.setup.shapes
        limit = np.int32(shapes.tokens if limit is None else limit)
        return np.broadcast_to(limit, (shapes.prompts * shapes.group_size,))

    def _numbered(self, prompts):
        return prompts if prompts.first is not None else prompts.replace(first=np.zeros(len(prompts.ids), np.int32))

    def count_remaining(self, rollout_state: state.RolloutState) -> Any:
        """(unfinished rows of the fullest shard, their longest, tokens of all rows), each i32[]."""
        return self._call(schedule.REMAINING, rollout_state)

    def open_batch(self, weights: Any, rollout_state: Any, index: int, size: BatchSize) -> state.DecodeBatch:
        """Every shard's `index`-th prompts, prefilled."""
        return self._call(self.setup.schedule.open_key(size), weights, rollout_state, np.int32(index))

    def resume_rows(self, weights: Any, rollout_state: Any, length: int, size: BatchSize) -> state.DecodeBatch:
        """Every shard's longest unfinished rows, prefilled before own column `length`."""
        return self._call(self.setup.schedule.resume_key(size), weights, rollout_state, np.int32(length))

    def decode(self, weights: Any, batch: Any, rollout_state: Any, step: Any, size: BatchSize) -> Any:
        """(DecodeBatch, RolloutState, Report) after a segment; step is the version of the weights."""
        key = self.setup.schedule.decode_key(size)
        return self._call(key, weights, batch, rollout_state, self.tables, np.int32(step))

    def add_chunk(self, batch: state.DecodeBatch, size: BatchSize) -> state.DecodeBatch:
        """The batch with another chunk, empty, which gives it that size."""
        chunk = self._call(self.setup.schedule.add_key(size))
        return batch.replace(cache=batch.cache.replace(chunks=(*batch.cache.chunks, chunk)))

    def shrink(self, batch: state.DecodeBatch, size: BatchSize, smaller: BatchSize) -> state.DecodeBatch:
        """The batch in the smaller size, live rows first, each with its own copy of its prompt."""
        sizes, gathered = self.setup.schedule, []
        bare, order = self._call(sizes.choose_key(size, smaller), without_chunks(batch))
        chunks = (batch.cache.prompt, *batch.cache.chunks)
        for key, chunk in zip(sizes.gather_keys(size, smaller), chunks, strict=True):
            gathered.append(self._call(key, chunk, order))
            jax.tree.map(lambda x: x.delete(), chunk)  # never two whole caches at once
        return bare.replace(cache=bare.cache.replace(prompt=gathered[0], chunks=tuple(gathered[1:])))

    def finish(self, rollout_state: state.RolloutState) -> Any:
        """The Rollout."""
        return self._call(schedule.FINISH, rollout_state)

    def ended_rows(self, rollout_state: state.RolloutState) -> tuple[np.ndarray, ...]:
        """(row numbers, tokens, count, ended, truncated) of this process's rows, on the host; each has one owner."""

        def read_own(array):
            # rows may lie on several devices, and processes, along the tensor axis
            pieces = {s.index[0].start or 0: np.asarray(s.data) for s in array.addressable_shards if not s.replica_id}
            return [pieces[start] for start in sorted(pieces)], sorted(pieces)

        arrays = (rollout_state.tokens, rollout_state.count, rollout_state.limit, rollout_state.done)
        (tokens, starts), *rest = (read_own(x) for x in arrays)
        if not starts:
            return (np.zeros(0, int),) * 5
        rows = np.concatenate([start + np.arange(len(part)) for start, part in zip(starts, tokens, strict=True)])
        count, limit, done = (np.concatenate(pieces) for pieces, _ in rest)
        return rows, np.concatenate(tokens), count, done | (count >= limit), ~done


def _without_jit():
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue] (made at run time)


@functools.lru_cache(maxsize=256)  # programs of some ten samplers; what jax has compiled of others is freed
def _jitted(setup, key):
    """The jitted function of a program: one object for all equal samplers, so that jax traces and compiles it once."""
    program = setup.program(key)

    def laid_out(*arguments):
        result = program.function(*arguments)
        return jax.lax.with_sharding_constraint(result, program.shardings or jax.tree.map(setup.sharding, result))

    options = compiled.repeatable_on(setup.mesh.devices.flat[0])
    return jax.jit(laid_out, donate_argnums=program.donated, compiler_options=options)


def _weight_bytes(setup):
    """Bytes of the weights that a decode step reads on one device: all but an embedding table that is no head."""
    table = transformer.param_table(setup.model_config)
    sizes = transformer.map_table(lambda path, param: math.prod(param.shape), table)
    if not setup.model_config.tie_embeddings:
        sizes.pop('embed')
    return sum(jax.tree.leaves(sizes)) * setup.weights_dtype.itemsize // setup.mesh.shape['tensor']
