"""Sampling ahead: a step learns from completions that the policy sampled collection.staleness (k) steps earlier.

Step t first samples the completions for step t + k, with the policy before update t. Then it learns from the
completions for step t. The first policy samples the completions for steps 0 to k. Rewards of completions that wait are
computed meanwhile. Nothing here looks at a clock: which policy samples what is a function of the step.

While it samples the draw for step t, a collector sees t as the step, so that each draw has noise of its own.
Rollout.version, the step whose weights sampled a token, is t - k, but at least the step in which sampling began.
"""

from collections.abc import Sequence
from concurrent.futures import Future
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.collect.draw import ChosenPrompts, Collect, Draw, Drawer, rows_of, stack
from grpo_jax.collect.pending import Pending, PendingGroup, pack_groups, try_rewards, unpack_groups
from grpo_jax.hosts import processes
from grpo_jax.models import lora
from grpo_jax.sampler.engine import Stats
from grpo_jax.sharding import batches
from grpo_jax.sharding.sides import Sides


class Waiting(NamedTuple):
    """Completions that were sampled ahead, and wait for the steps that learn from them."""

    draws: Sequence[Draw | Future]  # of the next steps
    inner: Any  # the TrainState.pending of the collector that samples the draws: groups that go on, see carry.py
    begun: int  # the step in which the run began to sample


def sample_ahead(collect: Collect, drawer: Drawer, staleness: int, sides: Sides | None = None) -> Collect:
    """Makes collect(state, progress) -> (Draw, TrainState), which samples `staleness` steps ahead.

    It returns the Draw for the state's step. collect: samples the completions of one step, whose number it reads from
    state.step. sides: where the sampler has devices of its own, draws are sampled there while the learner goes on;
    collect must then choose prompts as Drawer.choose does, whatever the completions are like.
    """

    def start_draw(state, progress):
        """(a Draw, or the Future of one that another thread samples; the TrainState after it)."""
        if sides is None or drawer.engine is None:
            return collect(state, progress)
        # the update takes the state's memory while the draw is sampled
        step, aux = jax.device_get((state.step, state.aux))
        copy = state.replace(
            params=drawer.engine.send(state.params), opt_state=None, ref_params=None, step=step, aux=aux
        )
        _, aux = drawer.choose(int(step), dict(state.aux))
        return sides.start(lambda: collect(copy, lambda *_: None)[0]), state.replace(aux=aux)

    def collect_ahead(state, progress):
        step = int(state.step)
        loaded = load_draws(state.pending, drawer, step)
        draws, begun = [*loaded.draws], loaded.begun
        sampled = state.replace(pending=loaded.inner)
        for number in range(step + len(draws), step + staleness + 1):
            draw, sampled = start_draw(sampled.replace(step=jnp.int32(number)), progress)
            draws.append(draw)
        draw = take_draw(draws[0])
        waiting = Waiting(draws[1:], sampled.pending, begun)
        pending = Pending(lambda: pack_draws(waiting, drawer), waiting)
        version = draw.rollout.version  # of a group that another run has kept below `begun`
        version = jnp.maximum(version - staleness, jnp.where(version < begun, 0, begun))
        return draw._replace(rollout=draw.rollout.replace(version=version)), state.replace(
            aux=sampled.aux, pending=pending
        )

    return collect_ahead


def take_draw(draw: Draw | Future) -> Draw:
    """The Draw itself; waits for a Future, whose Draw another thread samples, and raises that thread's error."""
    return draw.result() if isinstance(draw, Future) else draw


def load_draws(pending: Any, drawer: Drawer, step: int) -> Waiting:
    """The draws for steps from `step` on that are Waiting when it begins; pending: TrainState.pending."""
    if pending is None:
        return Waiting([], None, step)
    if isinstance(pending, Pending):
        return pending.value
    names = sorted((name for name in pending if name.isdigit()), key=int)
    inner = {name: data for name, data in pending.items() if name not in names}
    draws, begun = zip(*[unpack_draw(pending[name], drawer, step + int(name)) for name in names], strict=True)
    return Waiting(draws, inner or None, begun[0])


def pack_draws(waiting: Waiting, drawer: Drawer) -> dict[str, np.ndarray]:
    """{name: u8 bytes} of waiting draws, for a checkpoint: '0', '1', ... in order, and the names of waiting.inner.

    Waits for the rewards. All processes must call it.
    """
    inner, draws = waiting.inner, map(take_draw, waiting.draws)
    packed = dict(inner) if isinstance(inner, dict) else inner.pack() if inner else {}
    return packed | {str(number): pack_draw(draw, waiting.begun, drawer) for number, draw in enumerate(draws)}


def pack_draw(draw: Draw, begun: int, drawer: Drawer) -> np.ndarray:
    """A Draw as u8 bytes for a checkpoint, without rewards if a reward raises an error. begun: see Waiting."""
    assert draw.chosen is not None and draw.stats is not None, 'completions are sampled'
    index_of = {example.id: index for index, example in enumerate(drawer.dataset.examples)}
    rollout, groups = processes.fetch(draw.rollout), []
    rows = len(rollout.truncated)
    rewarded, failure = try_rewards(draw.finish_rewards, drawer.unjudged(rows))
    size = rows // len(draw.examples)
    judged = np.full(size, failure is None)
    for place, example in enumerate(draw.examples):
        own, own_rewarded = rows_of((rollout, rewarded), place, size)
        groups.append(PendingGroup(index_of[example.id], 0, 0, draw.chosen.position, own, judged, own_rewarded))
    # without what a clock has measured
    stats = dataclasses.asdict(draw.stats) | {'inspection': processes.fetch(draw.stats.inspection), 'seconds': np.nan}
    return pack_groups(groups, {'begun': begun, 'counts': _plain(dict(draw.counts)), 'stats': _plain(stats)})


def unpack_draw(data: np.ndarray, drawer: Drawer, step: int) -> tuple[Draw, int]:
    """(the Draw, `begun`) from the bytes of pack_draw; step: the step that learns from the draw."""
    groups, note = unpack_groups(data, drawer.dataset, drawer.sampling.pad_token)
    rollout, rewarded = (stack([getattr(group, name) for group in groups]) for name in ('rollout', 'rewarded'))
    examples, stats = [drawer.dataset.examples[group.index] for group in groups], note['stats']
    inspection = stats['inspection'] and lora.Inspection(*stats['inspection'])

    def finish():
        if all(group.judged.all() for group in groups):
            return drawer.judge_again(examples, rollout, rewarded, step)
        return drawer.judge(examples, rollout, step)

    draw = Draw(
        examples,
        batches.put_rows(rollout, drawer.mesh),
        functools.cache(finish),
        counts=note['counts'],
        stats=Stats(**stats | {'inspection': inspection}),
        chosen=ChosenPrompts(np.array([group.index for group in groups]), 0, groups[0].position),
    )
    return draw, note['begun']


def _plain(tree):
    """A tree with numbers that JSON can hold."""
    return jax.tree.map(lambda x: x.item() if hasattr(x, 'item') else x, tree)
