"""What a run looks at besides what it learns from: the probe, and the KL to a reference that nothing pays for.

The probe is a fixed set of prompts with their first right completions, whose logprobs are compared with those at the
step of their entry. With one update a rollout, ratios are 1 and cannot show that right completions become unlikely.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.collect.draw import Draw
from grpo_jax.hosts import processes
from grpo_jax.learner import logprobs, packing, partition
from grpo_jax.learner.options import Learning
from grpo_jax.learner.programs import Learner
from grpo_jax.models import lora, transformer
from grpo_jax.models.linear import in_dtype
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.sharding.batches import Shapes
from grpo_jax.sharding.compiled import Executable, abstract
from grpo_jax.sharding.mesh import BATCH_AXES
from grpo_jax.types import Experience, TrainState

NAME = 'probe'  # in TrainState.aux


class Entry(NamedTuple):
    """A row of a rollout that enters the probe."""

    row: int
    id: int  # of its example
    shared: int  # tokens with which another, different completion of its group begins too


def abstract_probe(log: Any, shapes: batches.Shapes) -> dict[str, Any]:
    """ShapeDtypeStructs of the probe in TrainState.aux with such LogOptions, zeros at the start; {} without one.

    Of the rollout, logprobs are the learner's at a row's entry, and version is the step of it.
    """
    if not log.probe_every:
        return {}
    numbers = jax.ShapeDtypeStruct((log.probe_prompts,), jnp.int32)
    rollout = batches.abstract_rollout(shapes._replace(prompts=log.probe_prompts, group_size=1), None)
    size = jax.ShapeDtypeStruct((), jnp.int32)
    return {NAME: {'rollout': rollout, 'ids': numbers, 'shared': numbers, 'size': size}}


# (state, experience, packed rows of it, draw) -> (state with what the observer remembers, metrics by name), before the
# update from the experience; the draw's rollout is that from which no group was dropped
Observe = Callable[[TrainState, Experience, Any, Draw], tuple[TrainState, dict[str, Any]]]


class Observers(NamedTuple):
    """Looks at the policy before each update; nothing that the run learns from depends on it."""

    observe: Observe  # all processes must call it
    programs: dict[str, Executable]  # by name


def make_observers(run: Any, learner: Learner) -> Observers:
    """The Observers of a Run: the KL to a reference that nothing pays for, and the probe, as config.log says."""
    settings, log = run.settings, run.settings.log
    observers, programs = [], {}
    if learner.reference is not None:
        observers.append(observe_reference(learner.reference, log.kl_observe))
        programs['reference'] = learner.reference
    if log.probe_every:
        shapes = settings.step_shapes(run.algorithm)
        abstract_rollout = abstract_probe(log, shapes)[NAME]['rollout']
        program = make_probe(run.model.config, run.mesh, shapes, settings.learning, learner.packing, abstract_rollout)
        observers.append(Probe(program, log.probe_every, log.probe_prompts, run.mesh).observe)
        programs[NAME] = program

    def observe(state, experience, packed, draw):
        row = {}
        for one in observers:
            state, more = one(state, experience, packed, draw)
            row |= more
        return state, row

    return Observers(observe, programs)


def observe_reference(program: Executable, every: int) -> Observe:
    """The observer of the KL to a reference, every so many steps."""

    def observe(state, experience, packed, draw):
        due = int(state.step) % every == 0
        return state, jax.device_get(program(state, experience.rollout, packed)) if due else {}

    return observe


class Probe(NamedTuple):
    """The observer of a few prompts' first right completions, which must not become unlikely."""

    logprobs: Executable  # (params, Rollout) -> f32[n, C]
    every: int  # steps
    most: int  # prompts
    mesh: jax.sharding.Mesh

    def observe(
        self, state: TrainState, experience: Experience, packed: Any, draw: Draw
    ) -> tuple[TrainState, dict[str, Any]]:
        """See Observe."""
        due, size, entries = int(state.step) % self.every == 0, int(state.aux[NAME]['size']), []
        if size < self.most:
            entries = self._find_entries(state.aux[NAME], experience, draw.examples, draw.rollout)
        if entries:
            state = state.replace(aux=state.aux | {NAME: self._enter(state, entries, draw.rollout)})
        if not due:
            return state, {}
        if not size and not entries:
            return state, {'probe_size': 0}
        logprobs = processes.fetch(self.logprobs(state.params, state.aux[NAME]['rollout']))
        return state, compare(processes.fetch(state.aux[NAME]), logprobs)

    def _find_entries(self, probe, experience, examples, rollout):
        """The Entries of a step, of examples that are not in the probe yet."""
        shape, ids, size = (len(examples), -1), np.asarray(probe['ids']), int(probe['size'])
        correct, rewards = processes.fetch((experience.correct, experience.rewards))
        right = mark_right(correct.reshape(shape), rewards.reshape(shape))
        known, free = set(ids[:size].tolist()), len(ids) - size
        new = [i for i in np.flatnonzero(right.any(1)) if examples[i].id not in known]
        if not new:
            return []
        tokens, mask = processes.fetch((rollout.tokens, rollout.completion_mask))
        tokens = tokens[:, -mask.shape[1] :]
        entries: dict[int, Entry] = {}
        for i in new:
            rows, one = slice(i * right.shape[1], (i + 1) * right.shape[1]), int(np.argmax(right[i]))
            shared = shared_prefix(tokens[rows], mask[rows], one)
            # a prompt may come twice in a step
            entries.setdefault(examples[i].id, Entry(rows.start + one, examples[i].id, shared))
        return list(entries.values())[:free]

    def _enter(self, state, entries, rollout):
        """The probe with new entries, and the policy's logprobs of them."""
        probe = jax.tree.map(np.array, processes.fetch(state.aux[NAME]))
        first = int(probe['size'])
        new, rows = slice(first, first + len(entries)), np.array([entry.row for entry in entries])
        for whole, part in zip(jax.tree.leaves(probe['rollout']), jax.tree.leaves(rollout), strict=True):
            whole[new] = processes.fetch(part)[rows]
        probe['ids'][new], probe['shared'][new] = ([entry[i] for entry in entries] for i in (1, 2))
        probe['size'] += np.int32(len(entries))
        on_devices = processes.put(probe['rollout'], specs.replicated(self.mesh))
        probe['rollout'].logprobs[new] = processes.fetch(self.logprobs(state.params, on_devices))[new]
        probe['rollout'].version[new] = int(state.step)
        return processes.put(probe, specs.replicated(self.mesh))


def mark_right(correct: Float[np.ndarray, 'P G'], rewards: Float[np.ndarray, 'P G']) -> Bool[np.ndarray, 'P G']:
    """Which completions are right: by the verifier; where it judges none, the best of groups whose rewards differ."""
    if np.isfinite(correct).any():
        return correct == 1
    best = np.where(np.isfinite(rewards), rewards, -np.inf).max(1, keepdims=True)
    worst = np.where(np.isfinite(rewards), rewards, np.inf).min(1, keepdims=True)
    return (rewards == best) & (best > worst)


def shared_prefix(tokens: Int[np.ndarray, 'G C'], mask: Bool[np.ndarray, 'G C'], row: int) -> int:
    """How many tokens at the start of a row begin another row as well; rows that are the same as it do not count."""
    same = (tokens == tokens[row]) & mask & mask[row]
    different = (same != mask[row]).any(1) | (mask != mask[row]).any(1)
    return int((np.cumprod(same, 1).sum(1) * different).max())


def compare(probe: dict[str, Any], logprobs: Float[np.ndarray, 'n C']) -> dict[str, Any]:
    """The probe's metrics by name, means over the tokens of all its rows, of the policy's logprobs; NaN without any."""
    rollout, size = probe['rollout'], int(probe['size'])
    mask = rollout.loss_mask & (np.arange(len(logprobs)) < size)[:, None]
    change = logprobs.astype(np.float64) - rollout.logprobs
    prefix = np.arange(logprobs.shape[1]) < probe['shared'][:, None]

    def mean(values, where):
        return np.mean(values[where], dtype=np.float64) if where.any() else np.nan

    return {
        'probe_size': size,
        'probe_logprob': mean(logprobs, mask),
        'probe_logprob_change': mean(change, mask),
        'probe_prefix_change': mean(change, mask & prefix),
        'probe_rest_change': mean(change, mask & ~prefix),
    }


def make_probe(
    model_config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
    shapes: Shapes,
    learning: Learning,
    packed: packing.Packing | None,
    rollout: Any,
) -> Executable:
    """The Executable (params, Rollout) -> f32[n, C], the policy's logprobs of a few completions that all devices have.

    rollout is abstract; shapes are those of a step, of whose microbatches it computes no more rows at once.
    """
    rows = len(rollout.truncated)
    collectives = partition.make_collectives(model_config, mesh, learning.lora, learning.attention)
    chunk = logprobs.choose_chunk(learning.chunk, model_config.vocab_size, mesh)
    head = logprobs.Head(learning.temperature, chunk, False, collectives)
    devices_along = batches.devices_along(mesh, BATCH_AXES)
    if packed is None:
        at_once = shapes.prompts * shapes.group_size // (learning.minibatches * learning.microbatches)
    else:
        at_once = packed.rows * packed.columns // (shapes.queries + shapes.tokens)
    at_once = min(max(at_once // devices_along, 1), -(-rows // devices_along)) * devices_along

    def completion_logprobs(params, rollout):
        compute = in_dtype(params, learning.dtype)
        padded = jax.tree.map(lambda x: jnp.pad(x, ((0, -rows % at_once),) + ((0, 0),) * (x.ndim - 1)), rollout)
        parts = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), padded)
        values = jax.lax.map(
            lambda part: logprobs.rollout_logprobs(compute, part, model_config, head, 'none').logprobs, parts
        )
        return values.reshape(-1, values.shape[-1])[:rows]

    params = lora.abstract_params(model_config, learning.lora, learning.dtype, mesh)
    rollout = jax.tree.map(lambda x: abstract(x.shape, x.dtype, specs.replicated(mesh)), rollout)
    return compiled.make_executable(
        "the learner's probe", completion_logprobs, (params, rollout), mesh, specs.replicated(mesh)
    )
