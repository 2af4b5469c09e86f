"""What a step learns from: completions of its prompts, and their rewards.

A Collector draws once a step. `resample`, `replay` and allocation.explore are loops around its draw: they draw again,
or exchange groups for those of earlier steps, until the groups differ, or give more completions to some prompts than to
others. What is kept between steps lies in TrainState.aux, so that a resumed run draws the same: position, how many
prompts were visited; tries and hits of each example, for the curriculum and the sizes of groups; and kept, groups of
earlier steps.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int
import numpy as np

from grpo_jax import algorithms, data, rewards
from grpo_jax.algorithms import Algorithm, Grouping
from grpo_jax.example import Example
from grpo_jax.hosts import processes
from grpo_jax.learner.state import fetch_reference
from grpo_jax.run import allocation, demonstrations, measure, seeding
from grpo_jax.run.collection import READ_FROM_DATA, Collection
from grpo_jax.run.selection import Group, replay, resample
from grpo_jax.sharding import batches
from grpo_jax.types import Rollout, TrainState


class Draw(NamedTuple):
    """Completions of prompts."""

    examples: list[Example]  # of equal parts of the rows; those of one prompt's parts follow one another
    rollout: Rollout
    finish_rewards: Callable  # () -> rewards.Rewards
    counts: dict[str, float]  # what it took, by name
    sizes: Int[np.ndarray, ' P'] | None = None  # of the groups; None: each part is one

    @property
    def grouping(self) -> Grouping:
        """Which rows are a group."""
        parts, rows = len(self.examples), len(self.rollout.truncated)
        return Grouping.by_sizes(np.full(parts, rows // parts) if self.sizes is None else self.sizes)

    @property
    def prompts(self) -> list[Example]:
        """The example of each group."""
        rows = len(self.rollout.truncated) // len(self.examples)
        return [self.examples[row // rows] for row in np.flatnonzero(self.grouping.place == 0)]

    def fetch_tokens(self):
        """(tokens i32[B, T], completion_mask bool[B, C]) on the host."""
        return processes.fetch((self.rollout.tokens, self.rollout.completion_mask))


class Collector:
    """Collects what each step of a run learns from."""

    def __init__(self, experiment, shapes: batches.Shapes):
        self._experiment, self._shapes = experiment, shapes
        self._collection: Collection = experiment.settings.collection
        fields = READ_FROM_DATA.get(self._collection.source)
        experiment.check_splits()
        if fields:
            self._dataset, self._completions = demonstrations.find(experiment, fields)
        else:
            self._dataset, self._completions = experiment.load('train'), None
        rewards.check_parameters(experiment.reward_functions, self._dataset.examples)
        equal = self._collection.allocation == 'equal'
        self._groups = shapes.prompts if equal else experiment.settings.data.prompts_per_step
        self.sample = None if fields else experiment.sampler(draw_shapes(experiment, shapes))

    @property
    def programs(self) -> dict[str, Any]:
        """The compiled programs by name."""
        return {} if self.sample is None else {'sample': self.sample}

    @property
    def examples(self) -> Sequence[Example]:
        """The examples of the train split that it draws from."""
        return self._dataset.examples

    def aux(self):
        """ShapeDtypeStructs of what lies in TrainState.aux, zeros at the start."""
        return abstract_aux(self._collection, self._shapes, len(self._dataset.examples))

    def __call__(self, state: TrainState, progress: Callable) -> tuple[Draw, TrainState]:
        """(Draw, TrainState) of a step; its rewards may still be computed. progress is called as the sampler says."""
        collection, step, prompts = self._collection, int(state.step), self._shapes.prompts
        self.streams: list[rewards.RewardStream] = []  # of this step
        if collection.allocation == 'uncertainty':
            return _explore(self, state, progress)
        if collection.dead_groups not in ('resample', 'replay'):
            draw, aux = self._draw(state, dict(state.aux), 0, progress)
            return draw, state.replace(aux=aux)
        aux, counts = dict(state.aux), {}

        def draw_groups(index):
            nonlocal aux
            draw, aux = self._draw(state, aux, index, progress)
            counts.update(draw.counts)
            return split_groups(draw, step, collection)

        kept = _load(self, aux['kept'], step - collection.max_staleness) if collection.keeps_groups else []
        if collection.dead_groups == 'replay':
            noise = np.random.default_rng((self._experiment.settings.seed, step))
            selection = replay(draw_groups, kept, prompts, noise)
        else:
            selection = resample(draw_groups, kept, prompts, collection.max_draws)
        if collection.keeps_groups:
            aux['kept'] = _store(selection.left, self._dataset.examples, self.aux()['kept'])
        return self._join(selection, step, counts), state.replace(aux=aux)

    def _draw(self, state, aux, index, progress):
        """(Draw of the next prompts, aux that is moved on); rewards are computed while other rows still decode."""
        chosen, revisits, aux = self._choose(state, aux, index)
        if self._completions is not None:
            examples, _ = self._prompts(chosen)
            read = self._experiment, self._dataset, self._completions
            rollout = demonstrations.as_rollout(*read, chosen, self._shapes)
            finish = functools.partial(self._rewards_of, examples, rollout)
            draw = Draw(examples, batches.put_rows(rollout, self._experiment.mesh), finish, {})
        elif self._collection.allocation == 'pass_rate':
            tries, hits = (np.asarray(aux[name])[chosen] for name in ('tries', 'hits'))
            unit = self._shapes.group_size
            sizes = allocation.spread_by_pass_rate(hits, tries, self._shapes.prompts * unit, unit)
            parts = Grouping.by_sizes(sizes // unit)
            first = _earlier_samples(chosen, self._shapes)[parts.owner] + np.int32(unit * parts.place)
            draw = self._sample(state, progress, self._prompts(chosen[parts.owner]), first=first)
            draw = draw._replace(sizes=sizes, counts=count_sizes(sizes))
        else:
            draw = self._sample(state, progress, self._prompts(chosen), index, _earlier_samples(chosen, self._shapes))
        return draw, self._count_passes(draw, chosen, revisits, aux, index)

    def _choose(self, state, aux, index):
        """(indices of the next prompts, how many of them are visited again, aux that is moved on).

        A function of the seed, the step, the position and the retired examples.
        """
        seed, position, count = self._experiment.settings.seed, int(aux['position']), len(self._dataset.examples)
        retired, prompts = find_retired(self._collection, aux, count), self._groups
        share = 0.0 if index else self._collection.revisit  # drawn again, a step would visit a retired prompt twice
        revisits = data.revisit(seed, int(state.step), prompts, retired, share)
        fresh, position = data.walk(seed, position, prompts - len(revisits), retired, self._dataset.sources)
        return np.concatenate([revisits, fresh]), len(revisits), aux | {'position': jnp.int32(position)}

    def _prompts(self, chosen):
        """(examples, Prompts on the host) of the chosen indices."""
        return data.prompts(self._dataset, chosen, self._shapes.queries, self._experiment.pad_token)

    def _sample(self, state, progress, asked, index=0, first=None):
        """The Draw of completions of what is asked, (examples, Prompts)."""
        assert self.sample is not None, 'completions are sampled'
        experiment, (examples, prompts) = self._experiment, asked
        params = fetch_reference(state) if self._collection.source == 'reference' else state.params
        # a prompt may come again in a later draw of a step; its noise must not
        key = jax.random.fold_in(experiment.key, index) if index else experiment.key
        group_size = self._shapes.group_size
        stream = rewards.RewardStream(experiment.reward_functions, examples, group_size, experiment.tokenizer)
        self.streams.append(stream)
        rollout = self.sample(
            params, batches.put_rows(prompts, experiment.mesh).replace(first=first), key, int(state.step),
            finished=stream.add, progress=progress,
        )  # fmt: skip
        finish = functools.cache(lambda: processes.gather_rows(stream.rows, stream.results()))
        return Draw(examples, rollout, finish, {})

    def _count_passes(self, draw, chosen, revisits, aux, index=0):
        """aux with the tries and hits of a Draw of the chosen prompts, which adds to the draw's counts."""
        if not self._collection.counts_passes:
            return aux
        grouping, correct = draw.grouping, draw.finish_rewards().correct == 1
        hits = np.bincount(grouping.owner, correct).astype(np.int32)
        aux = aux | {'tries': aux['tries'].at[chosen].add(grouping.sizes), 'hits': aux['hits'].at[chosen].add(hits)}
        if self._collection.retire_above:
            draw.counts['retired'] = float(np.mean(find_retired(self._collection, aux, len(self._dataset.examples))))
        if self._collection.revisit and not index:  # of the step's first rollout, which alone revisits
            rate = (hits[:revisits] / grouping.sizes[:revisits]).mean() if revisits else np.nan
            draw.counts.update(revisited=revisits, revisited_pass_rate=rate)
        return aux

    def _join(self, selection, step, counts):
        """The Draw of a Selection: P groups, those that differ first; counts are those of what was drawn."""
        prompts = self._shapes.prompts
        groups = (selection.alive + selection.dead)[:prompts]
        sampled = sum(group.tokens for group in selection.alive + selection.dead if group.since == step)
        useful = sum(group.tokens for group in selection.alive[:prompts] if group.since == step)
        counts = counts | {
            'draws': selection.draws,
            'groups_of_earlier_steps': sum(group.since < step for group in groups),
            'wasted_tokens': sampled - useful,
        }
        return concatenate(self._experiment.mesh, groups, counts)

    def _rewards_of(self, examples, rollout):
        """The Rewards of a rollout on the host."""
        experiment = self._experiment
        columns = measure.decode_completions(experiment.tokenizer, rollout)
        compute = functools.partial(rewards.compute_rewards, experiment.reward_functions)
        rewarded = processes.by_group(compute, examples, *columns)
        if self._collection.source == 'pairs':  # the data says which is better
            better = np.tile([1.0, 0.0], len(examples))
            rewarded = rewarded._replace(rewards=better, correct=better)
        return rewarded


def _explore(collector, state, progress):
    """(Draw, TrainState) of a step in rounds, each of which goes to the prompts that want completions most."""
    collection, prompts = collector._collection, collector._groups
    chosen, revisits, aux = collector._choose(state, dict(state.aux), 0)
    plain, seeded, earlier = data.pick(collector._dataset, chosen), 0, _earlier_samples(chosen, collector._shapes)

    def draw_round(owners, first, parts):
        nonlocal seeded
        if collection.seeding and parts[0]:
            asked, more = seeding.seed_unsolved(collector._experiment, plain, owners, parts, collection.seeding)
            seeded += more * collector._shapes.group_size
        else:
            asked = data.pick(plain, owners)
        _, tokens = data.prompts(asked, range(prompts), collector._shapes.queries, collector._experiment.pad_token)
        first = np.int32(np.asarray(first) + earlier[owners])
        draw = collector._sample(state, progress, ([plain.examples[i] for i in owners], tokens), first=first)
        return split_groups(draw._replace(examples=asked.examples), int(state.step), collection)

    rounds, unit = collector._shapes.prompts // prompts, collector._shapes.group_size
    parts = allocation.explore(draw_round, prompts, rounds, unit, collection.exploration)
    sizes = unit * np.array([len(own) for own in parts])
    joined = [part for own in parts for part in own]
    draw = concatenate(collector._experiment.mesh, joined, count_sizes(sizes, seeded), sizes)
    return draw, state.replace(aux=collector._count_passes(draw, chosen, revisits, aux))


def _earlier_samples(chosen, shapes):
    """The number that the first sample of each chosen prompt has: above those of its earlier places in the draw."""
    return (Grouping.by_ids(chosen).place * shapes.prompts * shapes.group_size).astype(np.int32)


def _load(collector, kept, oldest):
    """The kept groups that are not older than step `oldest`, and alive by their rewards, which are computed again."""
    host, groups = jax.device_get(kept), []
    for slot in np.flatnonzero((host['filled'] == 1) & (host['since'] >= oldest)):
        rows = _rows(slot, collector._shapes.group_size)
        rollout = jax.tree.map(lambda x, rows=rows: x[rows], host['rollout'])
        example = collector._dataset.examples[host['index'][slot]]
        rewarded, since = collector._rewards_of([example], rollout), int(host['since'][slot])
        if not dead_groups(collector._collection, rewarded)[0]:  # as it was when it was kept, by other rewards
            groups.append(Group(example, rollout, since, rewarded, dead=False))
    return groups


def _store(groups, examples, abstract):
    """aux['kept'], of that abstract form, of at most P groups."""
    index_of = {example.id: index for index, example in enumerate(examples)}
    kept = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    for slot, group in enumerate(groups):
        for whole, part in zip(jax.tree.leaves(kept['rollout']), jax.tree.leaves(group.rollout), strict=True):
            whole[_rows(slot, len(part))] = part
        kept['index'][slot], kept['since'][slot] = index_of[group.example.id], group.since
        kept['filled'][slot] = 1
    return jax.tree.map(jnp.asarray, kept)


def _rows(slot, size):
    """The rows of a kept group."""
    return slice(slot * size, (slot + 1) * size)


def abstract_aux(collection: Collection, shapes: batches.Shapes, count: int) -> dict[str, Any]:
    """ShapeDtypeStructs of what a Collector of `count` examples has in TrainState.aux."""
    aux: dict[str, Any] = {'position': jax.ShapeDtypeStruct((), jnp.int32)}
    if collection.counts_passes:
        aux |= {name: jax.ShapeDtypeStruct((count,), jnp.int32) for name in ('tries', 'hits')}
    if collection.keeps_groups:
        numbers = jax.ShapeDtypeStruct((shapes.prompts,), jnp.int32)
        rollout = batches.abstract_rollout(shapes, None)
        aux['kept'] = {'rollout': rollout, 'index': numbers, 'since': numbers, 'filled': numbers}
    return aux


def find_retired(collection: Collection, aux: dict[str, Any], count: int) -> Bool[np.ndarray, ' N']:
    """Those of `count` examples whose pass rate over all their visits is too high."""
    if not collection.retire_above:
        return np.zeros(count, bool)
    tries, hits = np.asarray(aux['tries']), np.asarray(aux['hits'])
    return (tries > 0) & (hits >= collection.retire_above * tries)


def dead_groups(
    collection: Collection, rewarded: rewards.Rewards, grouping: Grouping | None = None
) -> Bool[np.ndarray, ' P']:
    """Which groups of completions teach nothing, by the collection's gate; without grouping, all are one group."""
    grouping = grouping or Grouping.by_sizes(np.array([len(rewarded.rewards)]))
    return algorithms.judge_groups(
        collection.gate, *(grouping.spread(x, np.nan) for x in (rewarded.rewards, rewarded.correct))
    )


def count_sizes(sizes: Int[np.ndarray, ' P'], seeded: int = 0) -> dict[str, float]:
    """The least and the most completions of a prompt, and those asked for behind solved prompts, by name."""
    return {'group_size_least': int(sizes.min()), 'group_size_most': int(sizes.max()), 'seeded': seeded}


def concatenate(mesh: Any, groups: Sequence[Group], counts: dict[str, float], sizes: Any = None) -> Draw:
    """The Draw of Groups one after another, or of parts of groups of these sizes."""
    rollout, rewarded = jax.tree.map(
        lambda *rows: np.concatenate(rows), *((group.rollout, group.rewarded) for group in groups)
    )
    examples = [group.example for group in groups]
    return Draw(examples, batches.put_rows(rollout, mesh), lambda: rewarded, counts, sizes)


def split_groups(draw: Draw, step: int, collection: Collection) -> list[Group]:
    """The draw's Groups, on the host."""
    rollout, rewarded = processes.fetch(draw.rollout), draw.finish_rewards()
    size = len(rewarded.rewards) // len(draw.examples)
    dead, groups = dead_groups(collection, rewarded, draw.grouping), []
    for i, example in enumerate(draw.examples):
        rows = slice(i * size, (i + 1) * size)
        rows_of = jax.tree.map(lambda x, rows=rows: x[rows], (rollout, rewarded))
        groups.append(Group(example, rows_of[0], step, rows_of[1], bool(dead[i])))
    return groups


def step_shapes(experiment, algorithm: Algorithm) -> batches.Shapes:
    """Shapes of a step's batch: as many rows, of more prompts, where completions are read from the data.

    Where groups differ in size, the parts that they are made of count as prompts.
    """
    settings, size = experiment.settings, experiment.settings.group_size
    if algorithm.source in READ_FROM_DATA:
        size = len(READ_FROM_DATA[algorithm.source])
    elif settings.collection.allocation != 'equal':
        size = settings.collection.allocation_unit
    return experiment.shapes(settings.data.prompts_per_step * settings.group_size // size, size)


def draw_shapes(experiment, shapes: batches.Shapes) -> batches.Shapes:
    """Shapes of what is sampled at once for a step of these shapes: all of it, or one part of each prompt."""
    if experiment.settings.collection.allocation == 'uncertainty':
        return shapes._replace(prompts=experiment.settings.data.prompts_per_step)
    return shapes
