"""The host side of a rollout: which rows decode together, in which shapes, and when.

All rows of a decode batch begin together in few columns. The batch gets another chunk of columns when its last chunk is
full, and half its rows leave when at most half are live, so memory and work follow the survivors. Where the cache would
outgrow its budget, rows are preempted: their tokens stay in the RolloutState, and a later batch prefills them. Prompts
that wait for memory form further batches. The host decides once a segment. It reads numbers that all shards share, so
all processes decide alike.

Each call of `sample` or `go_on` makes its own copy of the weights (in the sampler's dtype and shardings, quantized,
adapters merged) and frees the copy when it returns.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import importlib
import time
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.hosts import processes
from grpo_jax.models import lora, transformer
from grpo_jax.sampler.programs import SamplerPrograms, SamplerSpec, choose_sizes
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.sampler.schedule import Schedule, let_carry
from grpo_jax.sharding import batches, compiled
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.sharding.sides import Sides
from grpo_jax.types import Prompts, Rollout

CUT = 64  # tokens between two moments at which a step with carried rows may end, on every platform


class Sent(NamedTuple):
    """A policy that `Engine.send` has sent to the sampler's devices."""

    policy: Any  # see SamplerPrograms.send


Finished = Callable[[int, np.ndarray, bool], Any]  # (row, its tokens, whether it was truncated)
Progress = Callable[[int, int, int], Any]  # (tokens so far, live rows of the batch, rows of the batch)


class Enough(NamedTuple):
    """Decides when unfinished rows pause: as soon as `groups` groups are complete, with all groups in waited_for."""

    groups: int
    waited_for: np.ndarray  # bool[P], groups that must be complete

    def __call__(self, ended: np.ndarray) -> bool:
        """Whether the unfinished rows pause; ended: bool[B], which rows of all processes have ended."""
        complete = np.all(ended.reshape(len(self.waited_for), -1), axis=1)
        return bool(complete.sum() >= self.groups and np.all(complete[self.waited_for]))


@dataclasses.dataclass
class Stats:
    """What a rollout cost: numbers of decode steps, rows, tokens and bytes, and seconds."""

    steps: int = 0  # decode steps, one after another
    slot_steps: int = 0  # sum over steps of the rows decoded, live or not (of one shard, times shards)
    tokens: int = 0
    peak_bytes: int = 0  # of cache, the most at any time, per shard
    decode_batches: int = 0
    preempted: int = 0  # times that a row left a batch unfinished
    bytes_read: int = 0  # weights and live cache over all steps, per device: the least that decoding must read
    seconds: float = 0.0
    inspection: lora.Inspection | None = None  # of the weights, for run/measure.py to judge; None without adapters

    @property
    def utilisation(self) -> float:
        """The share of slots (rows of decode steps, live or not) that yielded a token: tokens / slot_steps."""
        return self.tokens / max(self.slot_steps, 1)


@dataclasses.dataclass
class _Ongoing:
    """A rollout that is being decoded; each segment changes its state, its Stats and the numbers below them."""

    weights: Any
    state: Any
    step: Any  # int, or i32[]
    finished: Finished | None
    progress: Progress | None
    # asked whenever each row has ended or stands at its limit (`unfinished` is 0); None: no row goes on from there
    enough: Callable[[np.ndarray], bool] | None = None
    stats: Stats = dataclasses.field(default_factory=Stats)
    unfinished: int = 0  # rows, in a batch or not
    longest: int = 0  # tokens of the longest one
    reported: Any = False  # bool[B], rows that `finished` was called for

    def must_wake(self, programs):
        """Whether all unfinished rows have paused at their limit, and `enough` says that the rows must go on."""
        if self.enough is None or self.unfinished:
            return False
        return not self.enough(programs.fetch_ended(self.state))

    def report(self, programs, live, rows):
        """Calls `finished` for each row that has ended since the last call, then `progress` once."""
        if self.finished:
            numbers, tokens, count, ended, truncated = programs.read_rows(self.state, pauses=self.enough is not None)
            for i in np.flatnonzero(ended & ~self.reported):
                self.finished(int(numbers[i]), tokens[i, : count[i]], bool(truncated[i]))
            self.reported = self.reported | ended
        if self.progress:
            self.progress(self.stats.tokens, live, rows)


@runtime_checkable
class Sampler(Protocol):
    """What samples a run's rollouts: an Engine, or a serve.RemoteEngine where other processes sample; see Engine."""

    mesh: Any
    schedule: Schedule
    programs: SamplerPrograms

    def compile(self) -> 'Sampler': ...

    def send(self, params: Any) -> Sent: ...

    def put(self, tree: Any) -> Any: ...

    def __call__(self, params: Any, prompts: Prompts, key: Any, step: Any, *, given: Any = None) -> Rollout: ...

    def sample(
        self, params: Any, prompts: Prompts, key: Any, step: Any, *, given: Any = None, limit: Any = None,
        finished: Finished | None = None, progress: Progress | None = None,
    ) -> tuple[Rollout, Stats]: ...  # fmt: skip

    def go_on(
        self, params: Any, rollout: Rollout, prompts: Prompts, key: Any, step: Any, until: Any = None, *,
        finished: Finished | None = None, progress: Progress | None = None,
    ) -> tuple[Rollout, Stats]: ...  # fmt: skip


class Engine:
    """Samples rollouts in decode batches, with the programs that its schedule can reach, on `shards` shards."""

    def __init__(self, schedule: Schedule, programs: SamplerPrograms, shards: int):
        self.schedule, self.programs, self._shards = schedule, programs, shards
        self._turn = programs.sides.sampling if programs.sides else contextlib.nullcontext

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh on which rollouts are sampled."""
        return self.programs.spec.mesh

    @property
    def hash(self) -> str:
        """One hash of all programs; it differs between runs that sample with different programs."""
        return self.programs.hash

    def compile(self) -> 'Engine':
        """Compiles all programs that a rollout can reach, and returns the engine."""
        shapes, executables = self.programs.spec.shapes, self.programs.executables
        name = f'{len(executables)} programs that sample {shapes.prompts} x {shapes.group_size} rows'
        compiled.compile_all(executables, name)
        return self

    def send(self, params: Any) -> Sent:
        """Sends a policy to the sampler's devices, and returns at once; `sample` takes a Sent in place of params.

        With mesh.sampler the Sent is a copy, so that an update may then take the memory of params.
        """
        return params if isinstance(params, Sent) else Sent(self.programs.send(params))

    def put(self, tree: Any) -> Any:
        """Puts host arrays over rows where `sample` needs them: on the engine's mesh, but Prompts.first on the host."""
        if isinstance(tree, Prompts):
            return batches.put_rows(tree.replace(first=None), self.mesh).replace(first=tree.first)
        return batches.put_rows(tree, self.mesh)

    def __call__(self, params: Any, prompts: Prompts, key: Any, step: Any, **options: Any) -> Rollout:
        """Samples as `sample` does, and returns the Rollout alone."""
        return self.sample(params, prompts, key, step, **options)[0]

    def sample(
        self,
        params: Any,
        prompts: Prompts,
        key: Any,
        step: Any,
        *,
        given: Any = None,
        limit: Any = None,
        finished: Finished | None = None,
        progress: Progress | None = None,
    ) -> tuple[Rollout, Stats]:
        """Samples group_size completions of each prompt; returns (Rollout, Stats).

        params: the policy on its mesh, or a Sent. prompts: the Prompts, on the engine's mesh.
        key, step: choose the noise (see generate.row_keys); new tokens carry version `step`.
        given: i32[B, C], tokens to write instead of sampled ones; -1: sample.
        limit: an int or i32[B], the number of tokens after which a row pauses; `go_on` continues it.
        finished: called as finished(row, tokens, truncated) once for every row of this process, after the segment in
            which the row has ended, while other rows still decode.
        progress: called as progress(tokens, live rows, rows of the batch) after every segment.
        """
        sent = self.send(params).policy
        with self._turn():
            state = self.programs.new_state(prompts, key, step, given, limit)
            return self._finish_rows(sent, _Ongoing(self.programs.weights(sent), state, step, finished, progress), 0)

    def go_on(
        self,
        params: Any,
        rollout: Rollout,
        prompts: Prompts,
        key: Any,
        step: Any,
        until: Any = None,
        *,
        finished: Finished | None = None,
        progress: Progress | None = None,
    ) -> tuple[Rollout, Stats]:
        """Continues the unfinished rows of a Rollout; returns (Rollout, Stats of the new tokens alone).

        A row keeps the noise of the step in which it began (version[:, 0]): with the same weights it gets the tokens
        that it would have got without the pause. New tokens carry version `step`. Other arguments are as in `sample`,
        but `finished` is called for rows that had ended before too, and not for rows that pause.

        until: an int or i32[B], the most new tokens of a row; None: to the end. Or a function enough(ended bool[B]),
            for a schedule with carried rows (only each shard's first prompts may have tokens): all unfinished rows get
            CUT more tokens at a time, until enough returns True.
        """
        sent, earlier = self.send(params).policy, int(processes.fetch(rollout.completion_mask).sum())
        enough: Any = until if callable(until) else None
        with self._turn():
            state = self.programs.resume_state(rollout, prompts, key, CUT if enough else until)
            ongoing = _Ongoing(self.programs.weights(sent), state, step, finished, progress, enough)
            rollout, stats = self._finish_rows(sent, ongoing, self.schedule.prompts)
            stats.tokens -= earlier
            return rollout, stats

    def replay(self, params: Any, rollout: Rollout, prompts: Prompts, key: Any) -> Rollout:
        """Decodes the tokens of a Rollout again, and returns the Rollout with the logprobs of these decode steps.

        With the same weights the logprobs are bit-equal, since the same programs run on the same shapes: this checks
        the sampler.
        """
        tokens = rollout.tokens[:, rollout.prompt_mask.shape[1] :]
        given = jnp.where(rollout.completion_mask, tokens, -1)
        return self(params, prompts, key, rollout.version[0, 0], given=given)

    def _finish_rows(self, sent, ongoing, opened):
        """Decodes until all rows have ended or paused; returns (Rollout, Stats). opened: prompts begun before."""
        stats, programs, fresh = ongoing.stats, self.programs, self.schedule.fresh_batch()
        stats.inspection = programs.inspect(ongoing.weights, sent)
        began = time.monotonic()
        ongoing.unfinished, ongoing.longest, stats.tokens = _fetch_ints(programs.count_remaining(ongoing.state))
        while ongoing.unfinished:
            kind, size, length = 'carry', fresh, ongoing.longest
            if self.schedule.carried:
                stats.peak_bytes = self.schedule.opening_bytes
            elif opened < self.schedule.prompts:
                kind, length = 'open', 0
            else:
                kind, size = 'resume', self.schedule.resumed_batch(ongoing.unfinished, ongoing.longest)
            number = opened // size.prompts if kind == 'open' else length
            batch = programs.open_batch(kind, ongoing.weights, ongoing.state, number, size)
            opened += size.prompts * (kind == 'open')
            stats.decode_batches += 1
            self._decode_batch(ongoing, batch, size, length)
        stats.seconds = time.monotonic() - began
        return programs.finish(ongoing.state), stats

    def _decode_batch(self, ongoing, batch, size, length):
        """Decodes a batch that stands at own column `length` until its rows have ended or are preempted."""
        schedule, stats, live, rows_at_start = self.schedule, ongoing.stats, size.rows, size.rows
        while live:
            if length == sum(schedule.chunks[: size.chunks]):
                admitting = schedule.admitting_batch(size)
                stats.preempted += max(live - admitting.rows, 0)
                batch = self._shrink(stats, batch, size, admitting)
                size = admitting._replace(chunks=size.chunks + 1)
                batch = self.programs.add_chunk(batch, size)
            stats.peak_bytes = max(stats.peak_bytes, schedule.bytes(*size))
            batch, ongoing.state, report = self.programs.decode_segment(
                ongoing.weights, batch, ongoing.state, ongoing.step, size
            )
            live, steps, ongoing.unfinished, ongoing.longest, stats.tokens = _fetch_ints(report)
            columns = size.prompts * schedule.prompt_columns + size.rows * (length + steps // 2)
            stats.bytes_read += steps * (self.programs.weight_bytes + schedule.column_bytes * columns)
            stats.steps += steps
            stats.slot_steps += steps * size.rows * self._shards
            length += steps
            ongoing.report(self.programs, live, size.rows)
            if ongoing.must_wake(self.programs):
                batch, ongoing.state, report = self.programs.wake(batch, ongoing.state, CUT, size)
                live, _, ongoing.unfinished, ongoing.longest, stats.tokens = _fetch_ints(report)
            # the last few rows of all batches go on together; so do rows that are short of columns because they began
            # beside a longer row
            few = live * 8 <= rows_at_start and ongoing.unfinished > live
            if live and (few or length == sum(schedule.chunks)):
                stats.preempted += live
                return
            if live:
                smaller = schedule.shrunk_batch(size, live)
                batch, size = self._shrink(stats, batch, size, smaller), smaller

    def _shrink(self, stats, batch, size, smaller):
        """Returns the batch in the smaller size, or as it is if sizes are equal; stats.peak_bytes counts the copy."""
        if smaller == size:
            return batch
        needed_bytes = self.schedule.bytes(*size) + self.schedule.copy_bytes(smaller.rows, size.chunks)
        stats.peak_bytes = max(stats.peak_bytes, needed_bytes)
        return self.programs.shrink(batch, size, smaller)


def _fetch_ints(numbers):
    """Fetches numbers from the devices, as a list of ints."""
    return [int(x) for x in jax.device_get(tuple(numbers))]


def make_sampler(
    model_config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh | Sides,
    shapes: batches.Shapes,
    sampling: Sampling,
    automata: Mapping[str, Any],
    *,
    block: int | None = None,
    segment: int | None = None,
    carried: int = 0,
) -> Sampler:
    """Makes a Sampler, (params, Prompts, key, step) -> Rollout; a program is compiled when it is first needed.

    The Sampler is an Engine, or a serve.RemoteEngine where the sampler's devices belong to other processes. mesh: one
    mesh for policy and sampler, or Sides with a mesh for each. automata: what stops.make_automata returns, or
    stops.abstract_automata where nothing runs. block and segment replace the numbers of the platform. carried: how many
    of the prompts may have rows with tokens of earlier steps; with some, the Sampler is for `go_on` alone. Raises
    BadInput when the mesh does not divide the prompts, when the cache's budget holds not even one group, or when
    rollout.kernels is 'on' and kernels cannot decode.
    """
    mesh, sides = (mesh.sampler, mesh) if isinstance(mesh, Sides) else (mesh, None)
    batches.check_divides(mesh, 'collection.in_flight', carried)
    batches.check_divides(mesh, 'data.prompts_per_step', shapes.prompts - carried)
    sizes, cache_format = choose_sizes(model_config, mesh, shapes, sampling, block, segment)
    if carried:
        sizes = let_carry(sizes, carried // batches.devices_along(mesh, ROW_AXES))
    spec = SamplerSpec(model_config, mesh, shapes, sampling, sizes, cache_format)
    engine = Engine(sizes, SamplerPrograms(spec, automata, sides), spec.shards)
    if sides is None or not sides.remote:
        return engine
    serve = importlib.import_module('grpo_jax.sampler.serve')
    return serve.RemoteEngine(engine, shapes, automata, block, segment, carried)
