"""What a step learns from: completions of its prompts, and their rewards.

A Collector draws once a step. `resample` and `replay` are loops around its draw: they draw again, or exchange groups
for those of earlier steps, until the groups differ. What is kept between steps lies in TrainState.aux, so that a
resumed run draws the same: position, how many prompts were visited; tries and hits of each example, for the
curriculum; and kept, groups of earlier steps.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool
import numpy as np

from grpo_jax import algorithms, data, ranges, rewards
from grpo_jax.algorithms import Algorithm
from grpo_jax.algorithms.validation import CHOICES
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.hosts import processes
from grpo_jax.models import lora
from grpo_jax.ranges import Natural, OneOf, PositiveShare, Range, Share
from grpo_jax.run import demonstrations, metrics
from grpo_jax.sharding import batches
from grpo_jax.types import Rollout, TrainState

# sources that sample nothing: the fields of an example's meta that are a group's completions, the best first
READ_FROM_DATA = {'demonstrations': ('demonstration',), 'pairs': ('demonstration', 'rejected')}
SCHEDULES = ('frozen', 'hard', 'polyak')  # of the reference


class Collection(NamedTuple):
    """What a step learns from, and which policies are beside the one that learns: config.collection."""

    source: Annotated[str, OneOf(CHOICES['source'])] = 'policy'
    gate: Annotated[str, OneOf(CHOICES['gate'])] = 'auto'
    dead_groups: Annotated[str, OneOf(CHOICES['dead_groups'])] = 'keep'
    max_draws: Annotated[int, Range(least=1, most=10_000)] = 10
    max_staleness: Natural = 0
    retire_above: Share = 0.0
    revisit: Annotated[float, Range(least=0, below=1)] = 0.0
    reference: Annotated[str, OneOf(SCHEDULES)] = 'frozen'
    reference_every: Natural = 0
    reference_mix: PositiveShare = 0.6

    @classmethod
    def from_config(cls, section, *, corrected: bool, reward_options: rewards.RewardOptions):
        """Collection of config.collection; BadInput for what cannot work.

        corrected: the algorithm accounts for completions of other policies. A gate auto is outcome or reward then.
        """
        collection = cls(**ranges.read_section(cls, section, 'collection'))
        _check_reference(collection)
        if collection.gate == 'outcome' and not reward_options.verifies_all:
            raise BadInput('collection.gate', 'outcome', 'needs a reward.verifier to know what is correct; name one')
        _check_retirement(collection, reward_options.verifies_all)
        if collection.dead_groups == 'replay' and collection.max_staleness < 1:
            raise BadInput(
                'collection.max_staleness',
                collection.max_staleness,
                'must be at least 1 for replay: groups of the same step are none',
            )
        if collection.keeps_groups and not corrected:
            raise BadInput(
                'collection.max_staleness',
                collection.max_staleness,
                'lets in completions of older policies, and nothing accounts for them; set a correction, like '
                "truncated, or ratio_base='sampler'",
            )
        if collection.gate == 'auto':
            return collection._replace(gate='outcome' if reward_options.verifier_pays else 'reward')
        return collection

    @property
    def keeps_groups(self) -> bool:
        """Whether groups are kept from step to step."""
        return self.dead_groups in ('resample', 'replay') and self.max_staleness > 0


def _check_reference(collection):
    """BadInput for a schedule that never or always acts."""
    schedule, every = collection.reference, collection.reference_every
    if (schedule == 'frozen') != (every == 0):
        raise BadInput(
            'collection.reference_every',
            every,
            f'does not fit collection.reference={schedule!r}: '
            'use 0 with frozen, and 1 or more steps with hard and polyak',
        )


def _check_retirement(collection, verifier):
    """BadInput for prompts that would retire by unknown pass rates, and for visits of retired prompts without any."""
    retire_above, revisit = collection.retire_above, collection.revisit
    if retire_above and not verifier:
        raise BadInput(
            'collection.retire_above', retire_above, 'needs a reward.verifier to know pass rates; name one, or use 0'
        )
    if revisit and not retire_above:
        raise BadInput(
            'collection.revisit', revisit, 'gives places to retired prompts; set collection.retire_above, or use 0'
        )


class Draw(NamedTuple):
    """Completions of P prompts."""

    examples: list[Example]
    rollout: Rollout
    finish_rewards: Callable  # () -> rewards.Rewards
    counts: dict[str, float]  # what it took, by name

    def fetch_tokens(self):
        """(tokens i32[B, T], completion_mask bool[B, C]) on the host."""
        return processes.fetch((self.rollout.tokens, self.rollout.completion_mask))


class Group(NamedTuple):
    """Completions of one prompt, on the host."""

    example: Example
    rollout: Rollout  # of G rows
    since: int  # step that sampled them
    rewarded: rewards.Rewards
    dead: bool

    @property
    def tokens(self) -> int:
        """Tokens of its completions."""
        return int(self.rewarded.lengths.sum())

    @property
    def priority(self) -> float:
        """How much replay wants it: sum |A| std(r) of centred advantages; 0 when it is dead."""
        values = self.rewarded.rewards
        if self.dead:
            return 0.0
        return float(np.nansum(np.abs(values - np.nanmean(values))) * np.nanstd(values))


class Selection(NamedTuple):
    """The groups that a step may learn from."""

    alive: list[Group]
    dead: list[Group]
    left: list[Group]  # for later steps
    draws: int


def resample(draw: Callable[[int], list[Group]], kept: list[Group], prompts: int, max_draws: int) -> Selection:
    """Draws until `prompts` groups are alive, or max_draws times (DAPO, arXiv 2503.14476, eq. 11)."""
    alive, dead, draws = list(kept), [], 0
    while True:
        for group in draw(draws):
            (dead if group.dead else alive).append(group)
        draws += 1
        if len(alive) >= prompts or draws == max_draws:
            return Selection(alive, dead, alive[prompts : 2 * prompts], draws)


def replay(
    draw: Callable[[int], list[Group]], kept: list[Group], prompts: int, noise: np.random.Generator
) -> Selection:
    """Draws once, and puts kept groups in the places of dead ones, drawn in proportion to their priorities."""
    alive, dead = [], []
    for group in draw(0):
        (dead if group.dead else alive).append(group)
    left = sorted(alive + kept, key=lambda group: -group.priority)[:prompts]
    count = min(prompts - len(alive), len(kept))
    if count > 0:
        priorities = np.array([group.priority for group in kept])
        chosen = noise.choice(len(kept), count, replace=False, p=priorities / priorities.sum())
        alive = alive + [kept[i] for i in chosen]
    return Selection(alive, dead, left, 1)


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
        self.sample = None if fields else experiment.sampler(shapes)

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
        if collection.dead_groups not in ('resample', 'replay'):
            draw, aux = self._draw(state, dict(state.aux), 0, progress)
            return draw, state.replace(aux=aux)
        aux, counts = dict(state.aux), {}

        def draw_groups(index):
            nonlocal aux
            draw, aux = self._draw(state, aux, index, progress)
            counts.update(draw.counts)
            return split_groups(draw, step, collection)

        kept = self._load(aux['kept'], step - collection.max_staleness) if collection.keeps_groups else []
        if collection.dead_groups == 'replay':
            noise = np.random.default_rng((self._experiment.settings.seed, step))
            selection = replay(draw_groups, kept, prompts, noise)
        else:
            selection = resample(draw_groups, kept, prompts, collection.max_draws)
        if collection.keeps_groups:
            aux['kept'] = self._store(selection.left)
        return self._join(selection, step, counts), state.replace(aux=aux)

    def _draw(self, state, aux, index, progress):
        """(Draw of the next prompts, aux that is moved on); rewards are computed while other rows still decode."""
        experiment, shapes, collection = self._experiment, self._shapes, self._collection
        # 1. prompts: a function of the seed, the step, the position and the retired examples
        seed, position, count = experiment.settings.seed, int(aux['position']), len(self._dataset.examples)
        retired = find_retired(collection, aux, count)
        share = 0.0 if index else collection.revisit  # drawn again, a step would visit a retired prompt twice
        revisits = data.revisit(seed, int(state.step), shapes.prompts, retired, share)
        fresh, position = data.walk(seed, position, shapes.prompts - len(revisits), retired, self._dataset.sources)
        chosen = np.concatenate([revisits, fresh])
        aux = aux | {'position': jnp.int32(position)}
        examples, prompts = data.prompts(self._dataset, chosen, shapes.queries, experiment.pad_token)
        # 2. completions
        if self.sample is None:
            rollout = demonstrations.as_rollout(experiment, self._dataset, self._completions, chosen, shapes)
            finish = functools.partial(self._rewards_of, examples, rollout)
            draw = Draw(examples, batches.put_rows(rollout, experiment.mesh), finish, {})
        else:
            params = state.params
            if collection.source == 'reference':  # which may wait in the hosts' memory
                params = _reference(state)
            # a prompt may come twice in a step; its noise must not
            key = jax.random.fold_in(experiment.key, index) if index else experiment.key
            stream = rewards.RewardStream(
                experiment.reward_functions, examples, shapes.group_size, experiment.tokenizer
            )
            self.streams.append(stream)
            rollout = self.sample(
                params, batches.put_rows(prompts, experiment.mesh), key, int(state.step),
                finished=stream.add, progress=progress,
            )  # fmt: skip
            finish = functools.cache(lambda: processes.gather_rows(stream.rows, stream.results()))
            draw = Draw(examples, rollout, finish, {})
        # 3. pass rates, for the curriculum
        if collection.retire_above:
            correct = (draw.finish_rewards().correct == 1).reshape(shapes.prompts, -1)
            aux['tries'] = aux['tries'].at[chosen].add(correct.shape[1])
            aux['hits'] = aux['hits'].at[chosen].add(correct.sum(1))
            draw.counts['retired'] = float(np.mean(find_retired(collection, aux, count)))
            if share:
                draw.counts['revisited'] = len(revisits)
                draw.counts['revisited_pass_rate'] = correct[: len(revisits)].mean() if len(revisits) else np.nan
        return draw, aux

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
        rollout, rewarded = jax.tree.map(
            lambda *rows: np.concatenate(rows), *((group.rollout, group.rewarded) for group in groups)
        )
        rollout = batches.put_rows(rollout, self._experiment.mesh)
        return Draw([group.example for group in groups], rollout, lambda: rewarded, counts)

    def _rewards_of(self, examples, rollout):
        """The Rewards of a rollout on the host."""
        experiment = self._experiment
        columns = metrics.decode_completions(experiment.tokenizer, rollout)
        compute = functools.partial(rewards.compute_rewards, experiment.reward_functions)
        rewarded = processes.by_group(compute, examples, *columns)
        if self._collection.source == 'pairs':  # the data says which is better
            better = np.tile([1.0, 0.0], len(examples))
            rewarded = rewarded._replace(rewards=better, correct=better)
        return rewarded

    def _load(self, kept, oldest):
        """The kept groups that are not older than step `oldest`, with their rewards computed again."""
        host, groups = jax.device_get(kept), []
        for slot in np.flatnonzero((host['filled'] == 1) & (host['since'] >= oldest)):
            rows = self._rows(slot)
            rollout = jax.tree.map(lambda x, rows=rows: x[rows], host['rollout'])
            example = self._dataset.examples[host['index'][slot]]
            rewarded, since = self._rewards_of([example], rollout), int(host['since'][slot])
            groups.append(Group(example, rollout, since, rewarded, bool(dead_groups(self._collection, rewarded, 1)[0])))
        return groups

    def _store(self, groups):
        """aux['kept'] of at most P groups."""
        index_of = {example.id: index for index, example in enumerate(self._dataset.examples)}
        kept = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.aux()['kept'])
        for slot, group in enumerate(groups):
            for whole, part in zip(jax.tree.leaves(kept['rollout']), jax.tree.leaves(group.rollout), strict=True):
                whole[self._rows(slot)] = part
            kept['index'][slot], kept['since'][slot] = index_of[group.example.id], group.since
            kept['filled'][slot] = 1
        return jax.tree.map(jnp.asarray, kept)

    def _rows(self, slot):
        return slice(slot * self._shapes.group_size, (slot + 1) * self._shapes.group_size)


def _reference(state):
    """The reference's parameters on the devices."""
    trained, frozen = lora.split(state.params)
    return lora.join(jax.device_put(state.ref_params, jax.tree.map(lambda x: x.sharding, trained)), frozen)


def abstract_aux(collection: Collection, shapes: batches.Shapes, count: int) -> dict[str, Any]:
    """ShapeDtypeStructs of what a Collector of `count` examples has in TrainState.aux."""
    aux: dict[str, Any] = {'position': jax.ShapeDtypeStruct((), jnp.int32)}
    if collection.retire_above:
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


def dead_groups(collection: Collection, rewarded: rewards.Rewards, prompts: int) -> Bool[np.ndarray, ' P']:
    """Which groups of completions teach nothing, by the collection's gate."""
    return algorithms.judge_groups(
        collection.gate, rewarded.rewards.reshape(prompts, -1), rewarded.correct.reshape(prompts, -1)
    )


def split_groups(draw: Draw, step: int, collection: Collection) -> list[Group]:
    """The draw's Groups, on the host."""
    rollout, rewarded = processes.fetch(draw.rollout), draw.finish_rewards()
    size = len(rewarded.rewards) // len(draw.examples)
    dead, groups = dead_groups(collection, rewarded, len(draw.examples)), []
    for i, example in enumerate(draw.examples):
        rows = slice(i * size, (i + 1) * size)
        rows_of = jax.tree.map(lambda x, rows=rows: x[rows], (rollout, rewarded))
        groups.append(Group(example, rows_of[0], step, rows_of[1], bool(dead[i])))
    return groups


def step_shapes(experiment, algorithm: Algorithm) -> batches.Shapes:
    """Shapes of a step's batch: as many rows, of more prompts, where completions are read from the data."""
    settings = experiment.settings
    prompts, group_size = settings.data.prompts_per_step, settings.group_size
    if algorithm.source in READ_FROM_DATA:
        size = len(READ_FROM_DATA[algorithm.source])
        prompts, group_size = prompts * group_size // size, size
    return experiment.shapes(prompts, group_size)
