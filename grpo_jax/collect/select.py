"""Chooses the groups that a step learns from, by the loop around draws that config.collection names.

`make_collector` makes the loop: one draw; a draw whose rows go on in the next step (in_flight, carry.py); rounds
(xrpo.py); or an exchange of dead groups, around one of the first two. Around any of them, schedule.py samples ahead
(staleness). There are two exchanges: `resample` draws again until enough groups are alive; `replay` puts groups of
earlier steps in the places of dead ones. Both are pure functions of what draws return, and wait for the rewards. Groups
that remain are kept in TrainState.aux['kept'] for a later step.
"""

from collections.abc import Callable, Sequence
import importlib
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool
import numpy as np

from grpo_jax import algorithms, data, rewards
from grpo_jax.algorithms import Grouping
from grpo_jax.collect import demonstrations
from grpo_jax.collect.draw import Collect, Draw, Drawer, abstract_aux, draw_shapes, rows_of, stack
from grpo_jax.collect.options import EXCHANGED, READ_FROM_DATA
from grpo_jax.example import Example
from grpo_jax.hosts import processes
from grpo_jax.rewards import Rewards
from grpo_jax.sampler import stops
from grpo_jax.sampler.engine import Sampler, make_sampler
from grpo_jax.sharding import batches
from grpo_jax.types import Rollout, TrainState

Between = TypeVar('Between')


class Collector(NamedTuple):
    """Collects what each step learns from."""

    collect: Collect  # rewards may still be computed
    engine: Sampler | None  # the sampler; None: completions are read from the data
    examples: Sequence[Example]  # all examples whose prompts may be drawn
    programs: dict[str, Any]  # {'sample': engine}, whose hash is of all its programs; {} without an engine
    aux: dict[str, Any]  # what it keeps in TrainState.aux, as ShapeDtypeStructs by key; all begin as zeros


def make_collector(run: Any, splits: data.Splits) -> Collector:
    """The Collector of a Run: a Drawer of its train split, inside the loop that config.collection names."""
    settings, model, algorithm = run.settings, run.model, run.algorithm
    options, shapes = settings.collection, settings.step_shapes(algorithm)
    fields, completions, engine, dataset = READ_FROM_DATA.get(options.source), None, None, splits.train
    if fields:
        dataset, completions = demonstrations.find(dataset, model.tokenizer, fields, settings.data, settings.sampling)
    rewards.check_parameters(run.rewards, dataset.examples)
    prompts_per_step = settings.data.prompts_per_step
    if not fields:
        automata = stops.make_automata(settings.sampling, model.tokenizer, model.config.vocab_size)
        at_once = draw_shapes(options, shapes, prompts_per_step)
        mesh = run.sides or run.mesh
        engine = make_sampler(model.config, mesh, at_once, settings.sampling, automata, carried=options.in_flight)
    drawer = Drawer(
        options, dataset, completions, engine, shapes,
        shapes.prompts if options.allocation == 'equal' else prompts_per_step,
        settings.seed, run.mesh, model.tokenizer, settings.sampling, run.rewards,
    )  # fmt: skip
    if options.allocation == 'uncertainty':
        xrpo = importlib.import_module('grpo_jax.collect.xrpo')
        collect = xrpo.make_rounds(drawer, settings.data.prompt_format)
    else:
        collect = drawer.draw
        if options.in_flight:
            collect = importlib.import_module('grpo_jax.collect.carry').make_carry(drawer)
        if options.dead_groups in EXCHANGED:
            collect = make_exchange(collect, drawer)
    draws_count_passes = options.allocation == 'uncertainty' or options.dead_groups in EXCHANGED
    if options.staleness:
        schedule = importlib.import_module('grpo_jax.collect.schedule')
        # a draw that exchanges or carries groups decides which prompts the next one takes, which must then wait for it
        sides = None if options.in_flight or draws_count_passes else run.sides
        collect = schedule.sample_ahead(collect, drawer, options.staleness, sides)
    if options.counts_passes and not draws_count_passes:
        collect = count_learned(collect, drawer)
    programs = {} if engine is None else {'sample': engine}
    return Collector(collect, engine, dataset.examples, programs, abstract_aux(options, shapes, len(dataset.examples)))


def count_learned(collect: Collect, drawer: Drawer) -> Collect:
    """Makes a Collect that calls `collect`, and then counts tries and hits of the prompts in its Draw."""

    def collect_and_count(state, progress):
        draw, state = collect(state, progress)
        draw, aux = drawer.count_passes(draw, draw.chosen, dict(state.aux))
        return draw, state.replace(aux=aux)

    return collect_and_count


class Group(NamedTuple):
    """Completions of one prompt, on the host."""

    example: Example
    rollout: Rollout  # of G rows
    since: int  # step that sampled them
    rewarded: Rewards
    dead: bool

    @property
    def tokens(self) -> int:
        """The number of tokens in its completions."""
        return int(self.rewarded.lengths.sum())

    @property
    def priority(self) -> float:
        """The weight with which replay draws the group: sum |r - mean| * std of its rewards r; 0 for a dead group."""
        rewards_G = self.rewarded.rewards
        if self.dead:
            return 0.0
        return float(np.nansum(np.abs(rewards_G - np.nanmean(rewards_G))) * np.nanstd(rewards_G))


class SelectedGroups(NamedTuple):
    """The groups that a step may learn from, the groups kept for later steps, and how many draws were made."""

    alive: list[Group]
    dead: list[Group]
    kept: list[Group]  # for later steps
    draws: int


# (state between draws, the draw's index) -> (the draw's Groups, the state after it)
DrawGroups = Callable[[Between, int], tuple[list[Group], Between]]


def resample(
    draw: DrawGroups, between: Between, kept: list[Group], prompts: int, max_draws: int
) -> tuple[SelectedGroups, Between]:
    """Draws until `prompts` groups are alive, but at most max_draws times (DAPO, arXiv 2503.14476, eq. 11).

    kept: living groups of earlier steps, which count too. Of the living groups beyond `prompts`, the first `prompts`
    are kept for later steps. Returns (SelectedGroups, the state between draws after the last draw).
    """
    alive, dead, draws = list(kept), [], 0
    while True:
        groups, between = draw(between, draws)
        for group in groups:
            (dead if group.dead else alive).append(group)
        draws += 1
        if len(alive) >= prompts or draws == max_draws:
            return SelectedGroups(alive, dead, alive[prompts : 2 * prompts], draws), between


def replay(
    draw: DrawGroups, between: Between, kept: list[Group], prompts: int, noise: np.random.Generator
) -> tuple[SelectedGroups, Between]:
    """Draws once, and puts kept groups of earlier steps in the places of dead ones.

    The kept groups are chosen by `noise` with probabilities in proportion to their priorities. The `prompts` living
    groups with the highest priorities, new or kept, are kept for later steps. Returns (SelectedGroups, the state
    between draws after this draw).
    """
    alive, dead = [], []
    groups, between = draw(between, 0)
    for group in groups:
        (dead if group.dead else alive).append(group)
    kept_next = sorted(alive + kept, key=lambda group: -group.priority)[:prompts]
    count = min(prompts - len(alive), len(kept))
    if count > 0:
        priorities = np.array([group.priority for group in kept])
        replayed = noise.choice(len(kept), count, replace=False, p=priorities / priorities.sum())
        alive = alive + [kept[i] for i in replayed]
    return SelectedGroups(alive, dead, kept_next, 1), between


def make_exchange(collect_draw: Callable[..., tuple[Draw, TrainState]], drawer: Drawer) -> Collect:
    """Makes collect(state, progress) -> (Draw, TrainState) for steps that replace dead groups: resample, replay.

    collect_draw(state, progress, index): makes one draw; index: how many the step has made before. With in_flight, its
    unfinished rows go on in the step's next draw.
    """
    options, prompts, examples = drawer.options, drawer.shapes.prompts, drawer.dataset.examples

    def collect(state, progress):
        step = int(state.step)

        def draw_groups(between, index):
            """Makes one draw of the step, see DrawGroups; between: (TrainState, draws so far)."""
            state, draws = between
            draw, state = collect_draw(state, progress, index)
            draw, aux = drawer.count_passes(draw, draw.chosen, dict(state.aux), index)
            return split_groups(draw, step, options.gate), (state.replace(aux=aux), [*draws, draw])

        kept: list[Group] = []
        if options.keeps_groups:
            kept = load_kept(state.aux['kept'], step - options.max_staleness, step, drawer)
        between = state, []
        if options.dead_groups == 'replay':
            noise = np.random.default_rng((drawer.seed, step))
            selection, (state, draws) = replay(draw_groups, between, kept, prompts, noise)
        else:
            selection, (state, draws) = resample(draw_groups, between, kept, prompts, options.max_draws)
        if options.keeps_groups:
            stored = store_kept(selection.kept, examples, state.aux['kept'])
            state = state.replace(aux=state.aux | {'kept': stored})
        groups = (selection.alive + selection.dead)[:prompts]  # living groups first
        sampled = sum(group.tokens for group in selection.alive + selection.dead if group.since == step)
        useful = sum(group.tokens for group in selection.alive[:prompts] if group.since == step)
        counts = {name: count for draw in draws for name, count in draw.counts.items()} | {
            'draws': selection.draws,
            'groups_of_earlier_steps': sum(group.since < step for group in groups),
            'wasted_tokens': sampled - useful,
        }
        draw = concatenate(groups, drawer.mesh)
        streams = [stream for each_draw in draws for stream in each_draw.streams]
        draw = draw._replace(counts=counts, stats=draws[-1].stats, streams=streams, chosen=draws[0].chosen)
        return draw, state

    return collect


def find_dead(gate: str, rewarded: Rewards, grouping: Grouping | None = None) -> Bool[np.ndarray, ' P']:
    """Which groups are dead by collection.gate, see group_math.judge_groups; grouping None: all rows are one group."""
    grouping = grouping or Grouping.by_sizes(np.array([len(rewarded.rewards)]))
    return algorithms.judge_groups(gate, *(grouping.spread(x, np.nan) for x in (rewarded.rewards, rewarded.correct)))


def split_groups(draw: Draw, step: int, gate: str) -> list[Group]:
    """The blocks of a Draw as Groups, on the host; waits for the rewards. step: the step that made the draw."""
    rollout, rewarded = processes.fetch(draw.rollout), draw.finish_rewards()
    size = len(rewarded.rewards) // len(draw.examples)
    dead, groups = find_dead(gate, rewarded, draw.grouping), []
    for i, example in enumerate(draw.examples):
        group_rollout, group_rewarded = rows_of((rollout, rewarded), i, size)
        groups.append(Group(example, group_rollout, step, group_rewarded, bool(dead[i])))
    return groups


def concatenate(groups: Sequence[Group], mesh: jax.sharding.Mesh) -> Draw:
    """The Draw that holds these Groups one after another; their rewards are known."""
    rollout, rewarded = stack([(group.rollout, group.rewarded) for group in groups])
    return Draw([group.example for group in groups], batches.put_rows(rollout, mesh), lambda: rewarded)


def load_kept(kept: dict[str, Any], oldest: int, step: int, drawer: Drawer) -> list[Group]:
    """The Groups in aux['kept'] (`kept`) that were sampled at step `oldest` or later, and are alive at `step`.

    Their rewards are not stored but computed again, so that changed rewards apply to kept groups too.
    """
    host, groups = jax.device_get(kept), []
    for slot in np.flatnonzero((host['filled'] == 1) & (host['since'] >= oldest)):
        rollout = rows_of(host['rollout'], slot, drawer.shapes.group_size)
        example, since = drawer.dataset.examples[host['index'][slot]], int(host['since'][slot])
        rewarded = drawer.judge([example], rollout, step)
        if not find_dead(drawer.options.gate, rewarded)[0]:
            groups.append(Group(example, rollout, since, rewarded, dead=False))
    return groups


def store_kept(groups: Sequence[Group], examples: Sequence[Example], like: dict[str, Any]) -> dict[str, Any]:
    """The arrays of aux['kept'] that hold these Groups, at most P; examples: the data set's; like: the old arrays."""
    index_of = {example.id: index for index, example in enumerate(examples)}
    kept = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    for slot, group in enumerate(groups):
        for array, rows in zip(jax.tree.leaves(kept['rollout']), jax.tree.leaves(group.rollout), strict=True):
            array[slot * len(rows) : (slot + 1) * len(rows)] = rows
        kept['index'][slot], kept['since'][slot] = index_of[group.example.id], group.since
        kept['filled'][slot] = 1
    return jax.tree.map(jnp.asarray, kept)
