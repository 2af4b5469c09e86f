"""Staleness as a schedule: a step learns from completions of the policy of `collection.staleness` steps before.

Step t first samples the completions of step t + k, by the policy before update t. Then it learns from the completions
of step t. The first policy samples the completions of steps 0 to k. Rewards of the completions that wait are computed
meanwhile. Nothing here looks at a clock: which policy samples what is a function of the step.

Inside, the number of a draw stands for the step, so that draws have their own noise; the step whose weights sampled a
token, Rollout.version, is the draw's number less k, but not before the step in which the first draws were sampled.
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
    """What later steps learn from."""

    draws: Sequence[Draw | Future]  # of the next steps
    inner: Any  # what is pending inside them: groups that go on, see carry.py
    begun: int  # the step in which the run began to sample


def sample_ahead(collect: Collect, drawer: Drawer, staleness: int, sides: Sides | None = None) -> Collect:
    """Makes collect(state, progress) -> (Draw, TrainState) for steps that learn from completions sampled before.

    collect: samples the completions of one step, whose number it reads from state.step. sides: where the sampler has
    devices of its own, on which draws are then sampled while the learner goes on; collect must choose prompts as
    Drawer.choose does, whatever the completions are like.
    """

    def start_draw(state, progress):
        """(what take_draw makes a Draw of, the TrainState after it)."""
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
    """The Draw, which another thread may still be sampling; raises that thread's error."""
    return draw.result() if isinstance(draw, Future) else draw


def load_draws(pending: Any, drawer: Drawer, step: int) -> Waiting:
    """The draws of steps from `step` on, as they are Waiting when it begins."""
    if pending is None:
        return Waiting([], None, step)
    if isinstance(pending, Pending):
        return pending.value
    names = sorted((name for name in pending if name.isdigit()), key=int)
    inner = {name: data for name, data in pending.items() if name not in names}
    draws, begun = zip(*[unpack_draw(pending[name], drawer, step + int(name)) for name in names], strict=True)
    return Waiting(draws, inner or None, begun[0])


def pack_draws(waiting: Waiting, drawer: Drawer) -> dict[str, np.ndarray]:
    """What is pending as a checkpoint holds it: a draw under each number from 0, and what is pending inside the draws.

    Waits for the rewards. All processes must call it.
    """
    inner, draws = waiting.inner, map(take_draw, waiting.draws)
    packed = dict(inner) if isinstance(inner, dict) else inner.pack() if inner else {}
    return packed | {str(number): pack_draw(draw, waiting.begun, drawer) for number, draw in enumerate(draws)}


def pack_draw(draw: Draw, begun: int, drawer: Drawer) -> np.ndarray:
    """A draw as the bytes of a checkpoint; unjudged where a reward ends the run. begun: as of Waiting."""
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
    """(the Draw, `begun`) of the bytes that pack_draw made; step: that learns from it."""
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
