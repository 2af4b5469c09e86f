"""Measurements that training does not read: probe, KL to a reference, and agreement of sampler and learner.

The probe is a set of prompts, each with its first right completion. It compares the policy's logprobs of these
completions with the logprobs at the step in which they entered. Ratios cannot show that right completions become
unlikely: with one update a rollout they are all 1.
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

NAME = 'probe'  # its key in TrainState.aux


class Entry(NamedTuple):
    """A completion of a rollout that enters the probe."""

    row: int  # of the rollout
    id: int  # of its example
    shared: int  # how many of its first tokens another, different completion of its group begins with too


def abstract_probe(log: Any, shapes: batches.Shapes) -> dict[str, Any]:
    """ShapeDtypeStructs of the probe in TrainState.aux, whose arrays begin as zeros; {} when config.log has no probe.

    log: the LogOptions; shapes: of a step. A row of the probe's rollout holds the learner's logprobs at the step in
    which the row entered, and that step as `version`.
    """
    if not log.probe_every:
        return {}
    numbers = jax.ShapeDtypeStruct((log.probe_prompts,), jnp.int32)
    rollout = batches.abstract_rollout(shapes._replace(prompts=log.probe_prompts, group_size=1), None)
    size = jax.ShapeDtypeStruct((), jnp.int32)
    return {NAME: {'rollout': rollout, 'ids': numbers, 'shared': numbers, 'size': size}}


# (state, experience, its packed rows, draw) -> (state with the observer's arrays renewed, {metric: value}); called
# before the update from the experience; the draw's rollout also has the groups that the experience leaves out
Observe = Callable[[TrainState, Experience, Any, Draw], tuple[TrainState, dict[str, Any]]]


class Observers(NamedTuple):
    """All measurements of the policy before an update, as one function; training does not depend on them."""

    observe: Observe  # all processes must call it
    programs: dict[str, Executable]  # that the measurements run, by name


def make_observers(run: Any, learner: Learner) -> Observers:
    """The Observers of a Run: config.log turns on KL and probe; where steps do not wait, the agreement is measured."""
    log, shapes = run.settings.log, run.settings.step_shapes(run.algorithm)
    observers, programs = [], {}
    if not run.algorithm.needs_reference and log.kl_every:
        metrics = make_reference_metrics(shapes, run.mesh)
        observers.append(observe_reference(learner.scorer, metrics, log.kl_every))
        programs['reference'] = metrics
    if log.probe_every:
        observers.append(Probe(learner, shapes, log.probe_every, log.probe_prompts, run.mesh).observe)
    collection = run.settings.collection
    # on two sides the newest draw is not there yet, and later the weights that have sampled it are not
    if collection.in_flight or (collection.staleness and run.sides is None):
        observers.append(observe_agreement(learner, collection.staleness))
    if observers:
        programs['logprobs'] = learner.scorer

    def observe(state, experience, packed, draw):
        row = {}
        for observer in observers:
            state, metrics = observer(state, experience, packed, draw)
            row |= metrics
        return state, row

    return Observers(observe, programs)


def observe_reference(scorer: Executable, metrics: Executable, every: int) -> Observe:
    """An Observe function that measures the KL between policy and reference every `every` steps.

    scorer: of the learner; metrics: of make_reference_metrics. Its metrics are f32[] on the host.
    """

    def observe(state, experience, packed, draw):
        if int(state.step) % every:
            return state, {}
        rollout = experience.rollout
        policy, reference = (scorer(params, rollout, packed) for params in (state.params, fetch_reference(state)))
        return state, jax.device_get(metrics(policy.logprobs, reference.logprobs, rollout.loss_mask))

    return observe


def observe_agreement(learner: Learner, staleness: int) -> Observe:
    """An Observe function that measures how far the sampler's and learner's logprobs differ under the same weights.

    It compares only tokens that this step's weights have sampled; other metrics also compare tokens of earlier weights.
    With staleness these tokens are in the newest draw, which a later step learns from.
    """

    def observe(state, experience, packed, draw):
        rollout, logprobs = experience.rollout, experience.old_logprobs
        if staleness:
            draws = state.pending.value.draws  # that wait, see schedule.sample_ahead; the newest is the last
            rollout, logprobs = draws[-1].rollout, None
            packed = learner.pack(rollout)
        if logprobs is None:
            logprobs = learner.scorer(state.params, rollout, packed).logprobs
        arrays = logprobs, rollout.logprobs, rollout.loss_mask, rollout.version
        by_learner, by_sampler, mask, version = processes.fetch(arrays)
        gap = np.abs(by_learner - by_sampler)[mask & (version == int(state.step) + staleness)]
        mean, most = (gap.mean(dtype=np.float64), gap.max()) if len(gap) else (np.nan, np.nan)
        return state, {'fresh_gap_mean': mean, 'fresh_gap_max': most}

    return observe


def make_reference_metrics(shapes: Shapes, mesh: jax.sharding.Mesh) -> Executable:
    """The Executable of algorithms.reference_metrics: (logprobs, ref_logprobs, mask) [B, C] -> {metric: f32[]}."""

    def metrics(logprobs, ref_logprobs, mask):
        values = algorithms.reference_metrics(logprobs, ref_logprobs, mask)
        return {name: x.value if isinstance(x, algorithms.PooledMean) else x for name, x in values.items()}

    rollout = batches.abstract_rollout(shapes, specs.over_rows(mesh))
    arguments = rollout.logprobs, rollout.logprobs, rollout.completion_mask
    return compiled.make_executable('the KL to a reference', metrics, arguments, mesh, specs.replicated(mesh))


class Probe(NamedTuple):
    """The probe: measures whether the first right completions of a few prompts become unlikely."""

    learner: Learner  # whose scorer computes logprobs
    shapes: Shapes  # of a step's rollout, which the scorer is compiled for
    every: int  # steps between measurements
    most: int  # prompts in the probe
    mesh: jax.sharding.Mesh

    def observe(
        self, state: TrainState, experience: Experience, packed: Any, draw: Draw
    ) -> tuple[TrainState, dict[str, Any]]:
        """Adds this step's new entries to the probe; measures it every `every` steps. See Observe."""
        due, size, entries = int(state.step) % self.every == 0, int(state.aux[NAME]['size']), []
        if size < self.most:
            entries = self._find_entries(state.aux[NAME], experience, draw.examples, draw.rollout)
        if not entries and not due:
            return state, {}
        if not entries and not size:
            return state, {'probe_size': 0}
        probe = jax.tree.map(np.array, processes.fetch(state.aux[NAME]))
        if entries:
            self._enter(probe, entries, draw.rollout)
        logprobs = self._logprobs(state.params, probe['rollout'])
        if entries:
            new = slice(size, size + len(entries))
            probe['rollout'].logprobs[new] = logprobs[new]
            probe['rollout'].version[new] = int(state.step)
            state = state.replace(aux=state.aux | {NAME: processes.put(probe, specs.replicated(self.mesh))})
        return state, compare(probe, logprobs) if due else {}

    def _logprobs(self, params, rollout):
        """f32[n, C]: the policy's logprobs of a host rollout with n prompts of one completion each.

        The scorer takes B rows at a time. Where rows are packed, the rows of a group have one prompt, so that each
        completion is the first row of a group whose other rows are empty.
        """
        group = 1 if self.learner.sizes is None else self.shapes.group_size
        groups, count = self.shapes.prompts * self.shapes.group_size // group, len(rollout.tokens)
        times = -(-count // groups)

        def in_groups(x):
            """[n, ...] as [times, B, ...]: the rows of each call of the scorer, filled up with zeros."""
            rows = np.zeros((times * groups, group, *x.shape[1:]), x.dtype)
            rows[:count, 0] = x
            return rows.reshape(times, groups * group, *x.shape[1:])

        def score(batch):
            """f32[groups, C]: the logprobs of the first row of each group in a batch of B rows."""
            batch = batches.put_rows(batch, self.mesh)
            output = self.learner.scorer(params, batch, self.learner.pack(batch))
            return processes.fetch(output.logprobs)[::group]

        all_batches = jax.tree.map(in_groups, rollout)
        scored = [score(jax.tree.map(operator.itemgetter(i), all_batches)) for i in range(times)]
        return np.concatenate(scored)[:count]

    def _find_entries(self, probe, experience, examples, rollout):
        """[Entry of the first right completion of each example that is not in the probe yet], as many as have room."""
        shape, ids, size = (len(examples), -1), np.asarray(probe['ids']), int(probe['size'])
        correct, rewards = processes.fetch((experience.correct, experience.rewards))
        right = mark_right(correct.reshape(shape), rewards.reshape(shape))
        probed, free = set(ids[:size].tolist()), len(ids) - size
        new = [i for i in np.flatnonzero(right.any(1)) if examples[i].id not in probed]
        if not new:
            return []
        tokens, mask = processes.fetch((rollout.tokens, rollout.completion_mask))
        tokens = tokens[:, -mask.shape[1] :]
        entries: dict[int, Entry] = {}
        for i in new:
            rows, first = slice(i * right.shape[1], (i + 1) * right.shape[1]), int(np.argmax(right[i]))
            shared = shared_prefix_length(tokens[rows], mask[rows], first)
            # a prompt may come twice in a step
            entries.setdefault(examples[i].id, Entry(rows.start + first, examples[i].id, shared))
        return list(entries.values())[:free]

    def _enter(self, probe, entries, rollout):
        """Writes the entries' rows of a rollout into the probe's arrays on the host."""
        first = int(probe['size'])
        new, rows = slice(first, first + len(entries)), np.array([entry.row for entry in entries])
        for kept, array in zip(jax.tree.leaves(probe['rollout']), jax.tree.leaves(rollout), strict=True):
            kept[new] = processes.fetch(array)[rows]
        probe['ids'][new], probe['shared'][new] = ([entry[i] for entry in entries] for i in (1, 2))
        probe['size'] += np.int32(len(entries))


def mark_right(correct: Float[np.ndarray, 'P G'], rewards: Float[np.ndarray, 'P G']) -> Bool[np.ndarray, 'P G']:
    """Which completions are right: by the verifier; if it judges none, the best where a group's rewards differ."""
    if np.isfinite(correct).any():
        return correct == 1
    best = np.where(np.isfinite(rewards), rewards, -np.inf).max(1, keepdims=True)
    worst = np.where(np.isfinite(rewards), rewards, np.inf).min(1, keepdims=True)
    return (rewards == best) & (best > worst)


def shared_prefix_length(tokens: Int[np.ndarray, 'G C'], mask: Bool[np.ndarray, 'G C'], row: int) -> int:
    """How many first tokens row number `row` shares with another row of its group, at most; equal rows do not count."""
    same = (tokens == tokens[row]) & mask & mask[row]
    different = (same != mask[row]).any(1) | (mask != mask[row]).any(1)
    return int((np.cumprod(same, 1).sum(1) * different).max())


def compare(probe: dict[str, Any], logprobs: Float[np.ndarray, 'n C']) -> dict[str, Any]:
    """{metric: value} of the probe: mean logprobs of its entries' tokens, and their mean change; NaN without tokens.

    probe: the host arrays in TrainState.aux; logprobs: the policy's now, of n rows, whose first `size` are entries.
    """
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
