"""What a run looks at besides what it learns from: the probe, and the KL to a reference that nothing pays for.

The probe is a fixed set of prompts with their first right completions, whose logprobs are compared with those at the
step of their entry. With one update a rollout, ratios are 1 and cannot show that right completions become unlikely.
"""

from collections.abc import Callable
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax import algorithms
from grpo_jax.collect.draw import Draw
from grpo_jax.hosts import processes
from grpo_jax.learner.programs import Learner, fetch_reference
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.sharding.batches import Shapes
from grpo_jax.sharding.compiled import Executable
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
    if log.kl_every and not run.algorithm.needs_reference:
        metrics = make_reference_metrics(settings.step_shapes(run.algorithm), run.mesh)
        observers.append(observe_reference(learner.scorer, metrics, log.kl_every))
        programs['reference'] = metrics
    if log.probe_every:
        shapes = settings.step_shapes(run.algorithm)
        observers.append(Probe(learner, shapes, log.probe_every, log.probe_prompts, run.mesh).observe)
    if observers:
        programs['logprobs'] = learner.scorer

    def observe(state, experience, packed, draw):
        row = {}
        for one in observers:
            state, more = one(state, experience, packed, draw)
            row |= more
        return state, row

    return Observers(observe, programs)


def observe_reference(scorer: Executable, metrics: Executable, every: int) -> Observe:
    """The observer of the KL to a reference, every so many steps; metrics is of make_reference_metrics."""

    def observe(state, experience, packed, draw):
        if int(state.step) % every:
            return state, {}
        rollout = experience.rollout
        policy, reference = (scorer(params, rollout, packed) for params in (state.params, fetch_reference(state)))
        return state, jax.device_get(metrics(policy.logprobs, reference.logprobs, rollout.loss_mask))

    return observe


def make_reference_metrics(shapes: Shapes, mesh: jax.sharding.Mesh) -> Executable:
    """The Executable (logprobs, ref_logprobs, mask) -> algorithms.reference_metrics, f32[] by name."""

    def metrics(logprobs, ref_logprobs, mask):
        values = algorithms.reference_metrics(logprobs, ref_logprobs, mask)
        return {name: x.value if isinstance(x, algorithms.PooledMean) else x for name, x in values.items()}

    rollout = batches.abstract_rollout(shapes, specs.over_rows(mesh))
    arguments = rollout.logprobs, rollout.logprobs, rollout.completion_mask
    return compiled.make_executable('the KL to a reference', metrics, arguments, mesh, specs.replicated(mesh))


class Probe(NamedTuple):
    """The observer of a few prompts' first right completions, which must not become unlikely."""

    learner: Learner  # its scorer
    shapes: Shapes  # of a step, whose rollouts the scorer takes
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
        probe = processes.fetch(state.aux[NAME])
        return state, compare(probe, self._logprobs(state.params, probe['rollout']))

    def _logprobs(self, params, rollout):
        """f32[n, C]: the policy's logprobs of a rollout on the host, of n prompts with one completion each.

        The step's scorer computes them, P at a time: each stands at the head of a group whose other rows are empty.
        """
        prompts, group, count = self.shapes.prompts, self.shapes.group_size, len(rollout.tokens)
        times = -(-count // prompts)

        def in_groups(x):
            rows = np.zeros((times * prompts, group, *x.shape[1:]), x.dtype)
            rows[:count, 0] = x
            return rows.reshape(times, prompts * group, *x.shape[1:])

        def score(part):
            part = batches.put_rows(part, self.mesh)
            output = self.learner.scorer(params, part, self.learner.pack(part))
            return processes.fetch(output.logprobs)[::group]

        parts = jax.tree.map(in_groups, rollout)
        scored = [score(jax.tree.map(operator.itemgetter(i), parts)) for i in range(times)]
        return np.concatenate(scored)[:count]

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
        probe['rollout'].logprobs[new] = self._logprobs(state.params, probe['rollout'])[new]
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
