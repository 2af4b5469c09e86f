"""The definition of each of the sampler's programs: the function, its abstract arguments, and shardings.

`shard_map` over the axes of rows makes the decode loops independent: they have no collectives but those of
the tensor axis, which is left to the partitioner, and each ends when its own rows do.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from grpo_jax.models import cache as kv_cache
from grpo_jax.models import linear, lora, transformer
from grpo_jax.sampler import decode, schedule, state, stops
from grpo_jax.sampler.generate import row_keys
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.sampler.schedule import ProgramKey, Schedule
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import Prompts

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


class Definition(NamedTuple):
    """A function to compile; `Setup.inputs` has its abstract arguments."""

    function: Callable
    donated: tuple[int, ...] = ()  # arguments whose memory the results may take
    shardings: Any = None  # of the results; None: as Setup.sharding says


@dataclasses.dataclass(frozen=True)
class SamplerSetup:
    """What all programs of a sampler are functions of: `program` defines each of them, `inputs` its arguments."""

    model_config: transformer.ModelConfig
    mesh: jax.sharding.Mesh
    shapes: batches.Shapes
    sampling: Sampling
    schedule: Schedule
    cache_format: state.CacheFormat

    @property
    def shards(self) -> int:
        """Shards of the rows, each of which has the sizes of the schedule."""
        return batches.devices_along(self.mesh, ROW_AXES)

    @property
    def weights_dtype(self) -> np.dtype:
        """The dtype of the sampler's matrices."""
        return jnp.dtype(self.sampling.weights_dtype or self.sampling.dtype)

    @property
    def tables(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The abstract automata, which every device has."""
        automata = stops.abstract_automata(self.sampling, self.model_config.vocab_size)
        return self._laid_out(automata, dict.fromkeys(automata, specs.replicated(self.mesh)))

    @property
    def prefills_by(self) -> str:
        """attention.Rule.by of prefills: kernels on TPUs, where the mesh does not cut a head."""
        wanted = {'on': True, 'auto': self.mesh.devices.flat[0].platform == 'tpu', 'off': False}
        return 'splash' if wanted[self.sampling.kernels] and cuts_heads(self.model_config, self.mesh) else 'xla'

    def program(self, key: ProgramKey) -> Definition:
        """The program of a key."""
        return DEFINITIONS[key.kind](self, key)

    def inputs(self, key: ProgramKey) -> tuple:
        """Abstract arguments of the program of a key."""
        number, limit = np.int32(0), np.zeros(self.shapes.prompts * self.shapes.group_size, np.int32)
        rows = specs.over_rows(self.mesh)
        match key.kind:
            case 'weights':
                return (self._abstract_params(),)
            case 'inspect':
                return self.abstract_weights['layers'], self._abstract_params()['layers']
            case 'state':
                return *self._prompts_and_key(), number, limit
            case 'given state':
                given = compiled.abstract((*limit.shape, self.shapes.tokens), jnp.int32, rows)
                return *self._prompts_and_key(), number, limit, given
            case 'resumed state':
                rollout = batches.abstract_rollout(self.shapes, rows)
                return rollout, *self._prompts_and_key(), limit, self.tables
            case 'open' | 'resume':
                return self.abstract_weights, self.abstract_state, number
            case 'decode':
                return self.abstract_weights, self.abstract_batch(key), self.abstract_state, self.tables, number
            case 'add':
                return ()
            case 'choose':
                return (without_chunks(self.abstract_batch(key)),)
            case 'gather':
                batch = self.abstract_batch(key)
                chunk = batch.cache.prompt if key.prompts else batch.cache.chunks[0]
                return chunk, compiled.abstract((self.shards * key.survivors,), jnp.int32, rows)
            case _:  # remaining, finish
                return (self.abstract_state,)

    def _abstract_params(self):
        """Abstract parameters of the policy, with its adapters."""
        return lora.abstract_params(self.model_config, self.sampling.lora, self.sampling.dtype, self.mesh)

    def _prompts_and_key(self):
        """Abstract (Prompts, key) of a call."""
        rows, (p, q) = specs.over_rows(self.mesh), (self.shapes.prompts, self.shapes.queries)
        arrays = ((p, q), jnp.int32), ((p, q), bool), ((p,), jnp.int32)
        # the last comes from the host, as numbers of a call do
        prompts: Any = Prompts(*(compiled.abstract(shape, kind, rows) for shape, kind in arrays), np.zeros(p, np.int32))
        return prompts, compiled.abstract((), jax.random.key(0).dtype, specs.replicated(self.mesh))

    @functools.cached_property
    def abstract_weights(self) -> Any:
        """Abstract weights as the sampler reads them."""
        return self._results(schedule.WEIGHTS)

    @functools.cached_property
    def abstract_state(self) -> state.RolloutState:
        """An abstract RolloutState."""
        return self._results(schedule.STATE)

    def abstract_batch(self, key: ProgramKey) -> state.DecodeBatch:
        """The abstract DecodeBatch of a key's sizes."""
        sizes = (key.prompts or key.rows, key.rows, key.columns)

        def empty():
            sizes_of_all = (sizes[0] * self.shards, sizes[1] * self.shards, sizes[2])
            batch = state.empty_batch(
                self.model_config, self.shapes.queries, sizes_of_all, self.sampling, self.tables, self.cache_format
            )
            return batch.replace(cache=batch.cache.replace(length=jnp.zeros(self.shards, jnp.int32)))

        return self._laid_out(jax.eval_shape(empty))

    def _results(self, key):
        """Abstract results of a program."""
        program = self.program(key)
        return self._laid_out(jax.eval_shape(program.function, *self.inputs(key)), program.shardings)

    def _laid_out(self, shapes, shardings=None):
        """Abstract arrays of these shapes with shardings."""
        shardings = shardings or jax.tree.map(self.sharding, shapes)
        return jax.tree.map(lambda x, s: compiled.abstract(x.shape, x.dtype, s), shapes, shardings)

    def sharding(self, array: Any) -> NamedSharding:
        """Chunks are cut by rows and, where it divides them, by heads; all else by rows, and scalars not at all."""
        if len(array.shape) >= 5:
            heads = 4 if self.cache_format.flat else 3
            cut = ('tensor',) if cuts_heads(self.model_config, self.mesh) else ()
            return NamedSharding(self.mesh, PartitionSpec(*(None, None, ROW_AXES, None, None)[:heads], *cut))
        return NamedSharding(self.mesh, ROWS if array.shape else SAME)

    def per_shard(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """The function, which each shard of the rows runs on its own part."""
        if self.mesh.size == 1:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(ROW_AXES), check_vma=False
        )


def cuts_heads(model_config: transformer.ModelConfig, mesh: jax.sharding.Mesh) -> bool:
    """Whether heads of keys and values are cut along the tensor axis."""
    return model_config.kv_heads % mesh.shape['tensor'] == 0


def without_chunks(batch: state.DecodeBatch) -> state.DecodeBatch:
    """The batch without its keys and values."""
    return batch.replace(cache=batch.cache.replace(prompt=None, chunks=()))


def _with_scalar_length(batch):
    """A shard's batch from the one that crosses the program's border, where each shard has its own length."""
    return batch.replace(cache=batch.cache.replace(length=batch.cache.length[0]))


def _with_length_per_shard(batch):
    return batch.replace(cache=batch.cache.replace(length=batch.cache.length[None]))


def _weights(setup, key):
    """The policy as the sampler reads it: adapters merged, cast or quantized, and not cut along fsdp."""
    table = transformer.param_table(setup.model_config)
    shardings, in_int8 = specs.sampler_params(table, setup.mesh), setup.weights_dtype == jnp.int8

    def convert(part, shardings):
        part = jax.tree.map(lambda p: p.astype(setup.sampling.dtype), part)
        part = jax.lax.with_sharding_constraint(part, shardings)
        return linear.matrices_to_int8(part) if in_int8 else part

    def weights(params):
        # a layer at a time, or what is gathered is in memory twice
        layers = jax.tree.map(lambda p: p[:, None], params['layers'])
        layers = jax.lax.map(lambda layer: convert(lora.merge(layer), shardings['layers']), layers)
        if setup.cache_format.by_layer:
            layers = tuple(jax.tree.map(lambda p, i=i: p[i, 0], layers) for i in range(setup.model_config.layers))
        else:
            layers = jax.tree.map(lambda p: p[:, 0], layers)
        rest = {name: p for name, p in params.items() if name != 'layers'}
        return convert(rest, {name: shardings[name] for name in rest}) | {'layers': layers}

    results = linear.int8_shardings(shardings, table) if in_int8 else shardings
    if setup.cache_format.by_layer:
        one_layer = jax.tree.map(specs.unstacked, results['layers'])
        results = results | {'layers': (one_layer,) * setup.model_config.layers}
    return Definition(weights, shardings=results)


def _inspect(setup, key):
    """lora.inspect of the layers' weights as the sampler has them, and of the parameters that they were made of."""

    def as_sampled(layers):
        layers = jax.tree.map(lambda p: p.astype(setup.sampling.dtype), layers)
        return linear.matrices_to_int8(layers) if setup.weights_dtype == jnp.int8 else layers

    everywhere = specs.replicated(setup.mesh)
    return Definition(
        lambda weights, params: lora.inspect(weights, params, as_sampled),
        shardings=lora.Inspection(everywhere, everywhere, everywhere),
    )


def _state(setup, key):
    """state.new_state, with keys of ids and step."""
    size = (setup.shapes.prompts * setup.shapes.group_size, setup.shapes.tokens)

    def new_state(prompts, key, step, limit, given=None):
        keys = row_keys(key, step, prompts.ids, setup.shapes.group_size, prompts.first)
        given = jnp.full(size, -1, jnp.int32) if given is None else given
        return state.new_state(prompts, keys, given, limit, tuple(setup.tables))

    return Definition(new_state)


def _resumed_state(setup, key):
    """state.resume_state, with keys of ids and of the step in which each row began."""

    def resume_state(rollout, prompts, key, limit, tables):
        keys = row_keys(key, rollout.version[:, 0], prompts.ids, setup.shapes.group_size, prompts.first)
        return state.resume_state(rollout, prompts, keys, limit, tables, setup.sampling)

    return Definition(resume_state)


def _remaining(setup, key):
    """state.count_remaining: of the shard that has most, and the tokens of all."""

    def count_remaining(rollout_state):
        return jax.tree.map(lambda x: x[None], tuple(state.count_remaining(rollout_state)))

    def over_shards(rollout_state):
        unfinished, longest, tokens = setup.per_shard(count_remaining, (ROWS,), ROWS)(rollout_state)
        return jnp.max(unfinished), jnp.max(longest), jnp.sum(tokens)

    return Definition(over_shards)


def _open(setup, key):
    """state.open_batch of every shard's `index`-th prompts, in one chunk."""

    def open_batch(weights, rollout_state, index):
        sizes, by = (key.prompts, key.columns[0]), setup.prefills_by
        batch = state.open_batch(
            weights, rollout_state, index, setup.model_config, setup.sampling, setup.cache_format, sizes, by
        )
        return _with_length_per_shard(batch)

    return Definition(setup.per_shard(open_batch, (SAME, ROWS, SAME), BATCH))


def _resume(setup, key):
    """state.resume_rows of every shard."""

    def resume_rows(weights, rollout_state, length):
        sizes, by = (key.rows, key.columns), setup.prefills_by
        batch = state.resume_rows(
            weights, rollout_state, length, setup.model_config, setup.sampling, setup.cache_format, sizes, by
        )
        return _with_length_per_shard(batch)

    return Definition(setup.per_shard(resume_rows, (SAME, ROWS, SAME), BATCH))


def _decode(setup, key):
    """decode.decode_segment, with the Report of the shard that has most, and the tokens of all."""

    def decode_segment(weights, batch, rollout_state, tables, step):
        steps = setup.schedule.segment
        batch, rollout_state, report = decode.decode_segment(
            weights, _with_scalar_length(batch), rollout_state, tables, step, setup.model_config, setup.sampling, steps
        )
        return _with_length_per_shard(batch), rollout_state, jax.tree.map(lambda x: x[None], report)

    def over_shards(*arguments):
        shards = setup.per_shard(decode_segment, (SAME, BATCH, ROWS, SAME, SAME), (BATCH, ROWS, ROWS))
        batch, rollout_state, report = shards(*arguments)
        most = jax.tree.map(jnp.max, report)
        return batch, rollout_state, most._replace(tokens=jnp.sum(report.tokens))

    return Definition(over_shards, donated=(1, 2))


def _add(setup, key):
    """An empty chunk."""

    def empty():
        rows, (columns,) = setup.shards * key.rows, key.columns
        return kv_cache.empty(setup.model_config, rows, columns, **setup.cache_format._asdict())

    return Definition(empty)


def _choose(setup, key):
    """state.choose_rows of every shard."""

    def choose_rows(batch):
        batch, order = state.choose_rows(_with_scalar_length(batch), key.survivors)
        return _with_length_per_shard(batch), order

    return Definition(setup.per_shard(choose_rows, (BATCH,), (BATCH, ROWS)))


def _gather(setup, key):
    """state.gather_rows of the prompt cache, or of a chunk."""
    rows_per_prompt = key.rows // key.prompts if key.prompts else 1
    gather = functools.partial(state.gather_rows, rows_per_prompt=rows_per_prompt)
    return Definition(setup.per_shard(gather, (CHUNKS, ROWS), CHUNKS))


def _finish(setup, key):
    """The Rollout."""
    return Definition(functools.partial(state.finish, pad_token=setup.sampling.pad_token))


DEFINITIONS = {
    'weights': _weights,
    'inspect': _inspect,
    'state': _state,
    'given state': _state,
    'resumed state': _resumed_state,
    'remaining': _remaining,
    'open': _open,
    'resume': _resume,
    'decode': _decode,
    'add': _add,
    'choose': _choose,
    'gather': _gather,
    'finish': _finish,
}
