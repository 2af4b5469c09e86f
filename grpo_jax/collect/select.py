"""What a step collects, by make_collector: a draw, or the loop around draws that config.collection.dead_groups names.

`resample` draws again until the groups differ, `replay` exchanges groups for those of earlier steps: pure functions of
what a draw gives. What must know rewards waits for them, as the retirement of prompts does (`collect/draw.py`).
Groups that are left lie in TrainState.aux['kept'] until a later step.
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
from grpo_jax.collect.draw import Draw, Drawer, Progress, abstract_aux, draw_shapes
from grpo_jax.collect.options import READ_FROM_DATA
from grpo_jax.example import Example
from grpo_jax.hosts import processes
from grpo_jax.rewards import Rewards
from grpo_jax.sampler import stops
from grpo_jax.sampler.engine import Engine, make_sampler
from grpo_jax.sharding import batches
from grpo_jax.types import Rollout, TrainState

Carry = TypeVar('Carry')


class Collector(NamedTuple):
    """Collects what each step learns from."""

    collect: Callable[[TrainState, Progress], tuple[Draw, TrainState]]  # its rewards may still be computed
    engine: Engine | None  # that samples; None: completions are read from the data
    examples: Sequence[Example]  # that prompts are taken from
    programs: dict[str, Engine]  # by name
    aux: dict[str, Any]  # ShapeDtypeStructs of what it keeps in TrainState.aux, zeros at the start


def make_collector(run: Any, splits: data.Splits) -> Collector:
    """The Collector of a Run: a Drawer of its train split, in the loop that config.collection names."""
    settings, model, algorithm = run.settings, run.model, run.algorithm
    options, shapes = settings.collection, settings.step_shapes(algorithm)
    fields, completions, engine, dataset = READ_FROM_DATA.get(options.source), None, None, splits.train
    if fields:
        dataset, completions = demonstrations.find(
            dataset, model.tokenizer, fields, settings.sampling.max_tokens, settings.data.name
        )
    rewards.check_parameters(run.rewards, dataset.examples)
    prompts_per_step = settings.data.prompts_per_step
    if not fields:
        automata = stops.make_automata(settings.sampling, model.tokenizer, model.config.vocab_size)
        at_once = draw_shapes(options, shapes, prompts_per_step)
        engine = make_sampler(model.config, run.mesh, at_once, settings.sampling, automata)
    drawer = Drawer(
        options, dataset, completions, engine, shapes,
        shapes.prompts if options.allocation == 'equal' else prompts_per_step,
        settings.seed, run.mesh, model.tokenizer, settings.sampling.pad_token, run.rewards,
    )  # fmt: skip
    if options.allocation == 'uncertainty':
        xrpo = importlib.import_module('grpo_jax.collect.xrpo')
        collect = xrpo.make_rounds(drawer, settings.data.prompt_format)
    elif options.dead_groups in ('resample', 'replay'):
        collect = make_exchange(drawer)
    else:
        collect = draw_once(drawer)
    programs = {} if engine is None else {'sample': engine}
    return Collector(collect, engine, dataset.examples, programs, abstract_aux(options, shapes, len(dataset.examples)))


def draw_once(drawer: Drawer) -> Callable[[TrainState, Progress], tuple[Draw, TrainState]]:
    """(state, progress) -> (Draw, TrainState) of a step that learns from one draw."""

    def collect(state, progress):
        draw, aux = drawer.draw(state, dict(state.aux), 0, progress)
        return draw, state.replace(aux=aux)

    return collect


class Group(NamedTuple):
    """Completions of one prompt, on the host."""

    example: Example
    rollout: Rollout  # of G rows
    since: int  # step that sampled them
    rewarded: Rewards
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


DrawGroups = Callable[[Carry, int], tuple[list[Group], Carry]]  # (what is carried on, index of the draw)


def resample(
    draw: DrawGroups, carry: Carry, kept: list[Group], prompts: int, max_draws: int
) -> tuple[Selection, Carry]:
    """Draws until `prompts` groups are alive, or max_draws times (DAPO, arXiv 2503.14476, eq. 11)."""
    alive, dead, draws = list(kept), [], 0
    while True:
        groups, carry = draw(carry, draws)
        for group in groups:
            (dead if group.dead else alive).append(group)
        draws += 1
        if len(alive) >= prompts or draws == max_draws:
            return Selection(alive, dead, alive[prompts : 2 * prompts], draws), carry


def replay(
    draw: DrawGroups, carry: Carry, kept: list[Group], prompts: int, noise: np.random.Generator
) -> tuple[Selection, Carry]:
    """Draws once, and puts kept groups in the places of dead ones, drawn in proportion to their priorities."""
    alive, dead = [], []
    groups, carry = draw(carry, 0)
    for group in groups:
        (dead if group.dead else alive).append(group)
    left = sorted(alive + kept, key=lambda group: -group.priority)[:prompts]
    count = min(prompts - len(alive), len(kept))
    if count > 0:
        priorities = np.array([group.priority for group in kept])
        chosen = noise.choice(len(kept), count, replace=False, p=priorities / priorities.sum())
        alive = alive + [kept[i] for i in chosen]
    return Selection(alive, dead, left, 1), carry


def make_exchange(drawer: Drawer) -> Callable[[TrainState, Progress], tuple[Draw, TrainState]]:
    """(state, progress) -> (Draw, TrainState): a step's draws by resample or replay, and what they leave for later."""
    options, prompts, examples = drawer.options, drawer.shapes.prompts, drawer.dataset.examples

    def collect(state, progress):
        step = int(state.step)

        def draw_groups(carry, index):
            aux, draws = carry
            draw, aux = drawer.draw(state, aux, index, progress)
            return split_groups(draw, step, options.gate), (aux, [*draws, draw])

        kept: list[Group] = []
        if options.keeps_groups:
            kept = load_kept(state.aux['kept'], step - options.max_staleness, drawer)
        carry = dict(state.aux), []
        if options.dead_groups == 'replay':
            noise = np.random.default_rng((drawer.seed, step))
            selection, (aux, draws) = replay(draw_groups, carry, kept, prompts, noise)
        else:
            selection, (aux, draws) = resample(draw_groups, carry, kept, prompts, options.max_draws)
        if options.keeps_groups:
            aux['kept'] = store_kept(selection.left, examples, state.aux['kept'])
        groups = (selection.alive + selection.dead)[:prompts]  # those that differ first
        sampled = sum(group.tokens for group in selection.alive + selection.dead if group.since == step)
        useful = sum(group.tokens for group in selection.alive[:prompts] if group.since == step)
        counts = {name: count for draw in draws for name, count in draw.counts.items()} | {
            'draws': selection.draws,
            'groups_of_earlier_steps': sum(group.since < step for group in groups),
            'wasted_tokens': sampled - useful,
        }
        draw = concatenate(groups, drawer.mesh)
        streams = [stream for one in draws for stream in one.streams]
        return draw._replace(counts=counts, stats=draws[-1].stats, streams=streams), state.replace(aux=aux)

    return collect


def dead_groups(gate: str, rewarded: Rewards, grouping: Grouping | None = None) -> Bool[np.ndarray, ' P']:
    """Which groups of completions teach nothing, by collection.gate; without grouping, all are one group."""
    grouping = grouping or Grouping.by_sizes(np.array([len(rewarded.rewards)]))
    return algorithms.judge_groups(gate, *(grouping.spread(x, np.nan) for x in (rewarded.rewards, rewarded.correct)))


def split_groups(draw: Draw, step: int, gate: str) -> list[Group]:
    """The draw's Groups, on the host; waits for its rewards."""
    rollout, rewarded = processes.fetch(draw.rollout), draw.finish_rewards()
    size = len(rewarded.rewards) // len(draw.examples)
    dead, groups = dead_groups(gate, rewarded, draw.grouping), []
    for i, example in enumerate(draw.examples):
        rows = slice(i * size, (i + 1) * size)
        rows_of = jax.tree.map(lambda x, rows=rows: x[rows], (rollout, rewarded))
        groups.append(Group(example, rows_of[0], step, rows_of[1], bool(dead[i])))
    return groups


def concatenate(groups: Sequence[Group], mesh: jax.sharding.Mesh) -> Draw:
    """The Draw of Groups one after another."""
    rollout, rewarded = jax.tree.map(
        lambda *rows: np.concatenate(rows), *((group.rollout, group.rewarded) for group in groups)
    )
    return Draw([group.example for group in groups], batches.put_rows(rollout, mesh), lambda: rewarded)


def load_kept(kept: dict[str, Any], oldest: int, drawer: Drawer) -> list[Group]:
    """The groups of aux['kept'] that are not older than step `oldest`, and alive by rewards that are computed again."""
    host, groups = jax.device_get(kept), []
    for slot in np.flatnonzero((host['filled'] == 1) & (host['since'] >= oldest)):
        rows = _rows(slot, drawer.shapes.group_size)
        rollout = jax.tree.map(lambda x, rows=rows: x[rows], host['rollout'])
        example, since = drawer.dataset.examples[host['index'][slot]], int(host['since'][slot])
        rewarded = drawer.judge([example], rollout)
        if not dead_groups(drawer.options.gate, rewarded)[0]:  # as it was when it was kept, by other rewards
            groups.append(Group(example, rollout, since, rewarded, dead=False))
    return groups


def store_kept(groups: Sequence[Group], examples: Sequence[Example], like: dict[str, Any]) -> dict[str, Any]:
    """The groups, at most P, as arrays for aux['kept']; `like` has their shapes and dtypes."""
    index_of = {example.id: index for index, example in enumerate(examples)}
    kept = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    for slot, group in enumerate(groups):
        for whole, part in zip(jax.tree.leaves(kept['rollout']), jax.tree.leaves(group.rollout), strict=True):
            whole[_rows(slot, len(part))] = part
        kept['index'][slot], kept['since'][slot] = index_of[group.example.id], group.since
        kept['filled'][slot] = 1
    return jax.tree.map(jnp.asarray, kept)


def _rows(slot, size):
    """The rows of a kept group."""
    return slice(slot * size, (slot + 1) * size)
