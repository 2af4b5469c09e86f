"""The host side of a rollout: which rows decode together, in which shapes, and when.

A decode batch starts with all its rows together in few columns. It gets another chunk of columns when its last is full,
and half its rows go when no more than half are live, so that memory and work follow the survivors. When the cache would
outgrow its budget, rows are preempted: their tokens stay in the RolloutState, and a later batch prefills them. Prompts
that wait for memory form further batches. The host visits once a segment. Every decision is a function of numbers that
all shards share, so that all processes agree.

Each call of `sample` or `resume` makes the weights' copy that it decodes with (dtype, layout, quantization, adapters
merged), and lets go of it when it returns.
"""

from collections.abc import Callable, Mapping
import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models import lora, transformer
from grpo_jax.sampler.definitions import SamplerSetup
from grpo_jax.sampler.programs import SamplerPrograms, choose_sizes
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.sampler.schedule import Schedule
from grpo_jax.sharding import batches, compiled
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import Prompts, Rollout

Finished = Callable[[int, np.ndarray, bool], Any]  # of a row, its tokens, and whether it was truncated
Progress = Callable[[int, int, int], Any]  # of the tokens so far, the batch's live rows and its rows


class Stats(NamedTuple):
    """What a rollout cost."""

    steps: int  # decode steps, one after another
    slot_steps: int  # sum over steps of the rows decoded, live or not (of one shard, times shards)
    tokens: int
    peak_bytes: int  # of cache, the most at any time, per shard
    decode_batches: int
    preempted: int  # times that a row left a batch unfinished
    bytes_read: int  # weights and live cache over all steps, per device: the least that decoding must read
    seconds: float
    inspection: lora.Inspection | None = None  # of the weights, for run/measure.py to judge; None without adapters

    @property
    def utilisation(self) -> float:
        """Share of decoded slots that yielded a token."""
        return self.tokens / max(self.slot_steps, 1)


@dataclasses.dataclass
class _Ongoing:
    """One rollout under way; state and the numbers after it change with every segment."""

    weights: Any
    state: Any
    step: Any  # int, or i32[]
    finished: Finished | None
    progress: Progress | None
    unfinished: int = 0  # rows, in a batch or not
    longest: int = 0  # tokens of the longest of them
    tokens: int = 0  # of all rows
    handed_on: Any = False  # bool[B], rows that `finished` was called for
    counts: dict = dataclasses.field(
        default_factory=lambda: dict(steps=0, slot_steps=0, peak_bytes=0, decode_batches=0, preempted=0, bytes_read=0)
    )

    def count(self, **more):
        """Adds to the counts."""
        for name, number in more.items():
            self.counts[name] += number

    def reach(self, size):
        """Notes bytes of cache in use."""
        self.counts['peak_bytes'] = max(self.counts['peak_bytes'], size)

    def report(self, programs, live, rows):
        """Calls finished for the rows that have ended since the last call, and progress."""
        if self.finished:
            numbers, tokens, count, ended, truncated = programs.ended_rows(self.state)
            for i in np.flatnonzero(ended & ~self.handed_on):
                self.finished(int(numbers[i]), tokens[i, : count[i]], bool(truncated[i]))
            self.handed_on = self.handed_on | ended
        if self.progress:
            self.progress(self.tokens, live, rows)


class Engine:
    """Samples rollouts in decode batches, with the programs that its schedule can reach."""

    def __init__(self, schedule: Schedule, programs: SamplerPrograms, shards: int):
        self.schedule, self.programs, self._shards = schedule, programs, shards

    @property
    def device_kind(self) -> str:
        """The devices' name."""
        return self.programs.device_kind

    @property
    def hash(self) -> str:
        """Of all programs: what two runs sampled differently shows there."""
        return self.programs.hash

    def compile(self) -> 'Engine':
        """Compiles all programs that a rollout can reach, and returns the engine."""
        shapes, executables = self.programs.setup.shapes, self.programs.executables
        name = f'{len(executables)} programs that sample {shapes.prompts} x {shapes.group_size} rows'
        compiled.compile_all(executables, name)
        return self

    def __call__(self, params: Any, prompts: Prompts, key: Any, step: Any, **options: Any) -> Rollout:
        """The Rollout of `sample` alone."""
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
        """(Rollout of all prompts: rows of the mesh, group_size a prompt; its Stats).

        key and step choose the noise (see sampler.row_keys). given i32[B, C] writes those tokens instead
        of sampling (-1: sample). limit, an int or i32[B], pauses rows after that many tokens; `resume` goes on.
        finished(row, tokens, truncated) is called while others still decode, once for every row;
        progress(tokens, live rows, rows of the batch) at every host visit.
        """
        state = self.programs.new_state(prompts, key, step, given, limit)
        return self._finish_rows(params, _Ongoing(self.programs.weights(params), state, step, finished, progress), 0)

    def resume(
        self,
        params: Any,
        rollout: Rollout,
        prompts: Prompts,
        key: Any,
        step: Any,
        *,
        limit: Any = None,
        finished: Finished | None = None,
        progress: Progress | None = None,
    ) -> tuple[Rollout, Stats]:
        """(Rollout continued where its truncated rows stand, with these weights, up to `limit` more tokens; its Stats).

        Noise is that of the step in which a row began (version[:, 0]), so a row that pauses has the tokens
        it would have had without, if the weights are the same. New tokens carry version `step`.
        """
        state = self.programs.resume_state(rollout, prompts, key, limit)
        ongoing = _Ongoing(self.programs.weights(params), state, step, finished, progress)
        return self._finish_rows(params, ongoing, self.schedule.prompts)

    def replay(self, params: Any, rollout: Rollout, prompts: Prompts, key: Any) -> Rollout:
        """The Rollout with logprobs computed anew by the same decode steps, its tokens given.

        The oracle of the sampler: with the same weights the logprobs are bit-equal, since the same programs
        run on the same shapes.
        """
        tokens = rollout.tokens[:, rollout.prompt_mask.shape[1] :]
        given = jnp.where(rollout.completion_mask, tokens, -1)
        return self(params, prompts, key, rollout.version[0, 0], given=given)

    def _finish_rows(self, params, ongoing, opened):
        """(Rollout, Stats) of an _Ongoing rollout in which the first `opened` prompts have begun."""
        inspection = self.programs.inspect(ongoing.weights, params)
        began, fresh = time.monotonic(), self.schedule.fresh_batch()
        ongoing.unfinished, ongoing.longest, ongoing.tokens = _on_host(self.programs.count_remaining(ongoing.state))
        while ongoing.unfinished:
            if opened < self.schedule.prompts:
                size, length = fresh, 0
                batch = self.programs.open_batch(ongoing.weights, ongoing.state, opened // size.prompts, size)
                opened += size.prompts
            else:
                size, length = self.schedule.resumed_batch(ongoing.unfinished, ongoing.longest), ongoing.longest
                batch = self.programs.resume_rows(ongoing.weights, ongoing.state, length, size)
            ongoing.count(decode_batches=1)
            self._decode(ongoing, batch, size, length)
        seconds = time.monotonic() - began
        return self.programs.finish(ongoing.state), Stats(
            tokens=ongoing.tokens, seconds=seconds, inspection=inspection, **ongoing.counts
        )

    def _decode(self, ongoing, batch, size, length):
        """Decodes a batch that stands at own column `length` until its rows have ended or are preempted."""
        schedule, live, rows_at_start = self.schedule, size.rows, size.rows
        while live:
            if length == sum(schedule.chunks[: size.chunks]):
                admitting = schedule.admitting_batch(size)
                ongoing.count(preempted=max(live - admitting.rows, 0))
                batch = self._shrink(ongoing, batch, size, admitting)
                size = admitting._replace(chunks=size.chunks + 1)
                batch = self.programs.add_chunk(batch, size)
            ongoing.reach(schedule.bytes(*size))
            batch, ongoing.state, report = self.programs.decode(
                ongoing.weights, batch, ongoing.state, ongoing.step, size
            )
            live, steps, ongoing.unfinished, ongoing.longest, ongoing.tokens = _on_host(report)
            columns = size.prompts * schedule.prompt_columns + size.rows * (length + steps // 2)
            step_bytes = self.programs.weight_bytes + schedule.column_bytes * columns
            ongoing.count(steps=steps, slot_steps=steps * size.rows * self._shards, bytes_read=steps * step_bytes)
            length += steps
            ongoing.report(self.programs, live, size.rows)
            # the last few rows of all batches go on together; so do those that are short of columns because they
            # began beside a longer row
            few = live * 8 <= rows_at_start and ongoing.unfinished > live
            if live and (few or length == sum(schedule.chunks)):
                ongoing.count(preempted=live)
                return
            if live:
                smaller = schedule.shrunk_batch(size, live)
                batch, size = self._shrink(ongoing, batch, size, smaller), smaller

    def _shrink(self, ongoing, batch, size, smaller):
        """The batch in the smaller size."""
        if smaller == size:
            return batch
        ongoing.reach(self.schedule.bytes(*size) + self.schedule.copy_bytes(smaller.rows, size.chunks))
        return self.programs.shrink(batch, size, smaller)


def _on_host(numbers):
    return [int(x) for x in jax.device_get(tuple(numbers))]


def make_sampler(
    model_config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
    shapes: batches.Shapes,
    sampling: Sampling,
    automata: Mapping[str, Any],
    *,
    block: int | None = None,
    segment: int | None = None,
) -> Engine:
    """The Engine, (params, Prompts, key, step) -> Rollout, whose programs are compiled when they are first needed.

    automata are tables (sampler.stops), perhaps abstract; block and segment replace the platform's. BadInput when the
    mesh does not divide the prompts, the cache's budget holds not even one group, or kernels cannot decode.
    """
    batches.check_divides(mesh, 'data.prompts_per_step', shapes.prompts)
    sizes, cache_format = choose_sizes(model_config, mesh, shapes, sampling, block, segment)
    programs = SamplerPrograms(SamplerSetup(model_config, mesh, shapes, sampling, sizes, cache_format), automata)
    return Engine(sizes, programs, batches.devices_along(mesh, ROW_AXES))
