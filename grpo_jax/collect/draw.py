"""A step's draw: its next prompts, their completions, and rewards that may still be computed.

A Drawer makes draws. What changes from draw to draw lies in TrainState.aux, so that a resumed run draws the same:
`position`, how many places of the data's shuffled order were visited; `tries` and `hits`, how many completions of each
example were sampled and how many were right. Rows that are under way lie in TrainState.pending. Loops around a draw are
in select.py, xrpo.py, carry.py and schedule.py.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int
import numpy as np

from grpo_jax import data, rewards
from grpo_jax.algorithms import Grouping
from grpo_jax.collect import allocate, demonstrations
from grpo_jax.collect.options import CollectOptions
from grpo_jax.example import Example
from grpo_jax.hosts import processes
from grpo_jax.learner.programs import fetch_reference
from grpo_jax.sampler.engine import Sampler, Stats
from grpo_jax.sampler.sampling import Sampling
from grpo_jax.sharding import batches
from grpo_jax.sharding.sides import move_rows
from grpo_jax.text import completion_text
from grpo_jax.types import Prompts, Rollout, TrainState

Progress = Callable[[int, int, int], Any]  # see sampler.engine


class ChosenPrompts(NamedTuple):
    """The prompts of a draw, as indices of the data set's examples; the first `revisits` are retired prompts."""

    indices: Int[np.ndarray, ' P']
    revisits: int
    position: int  # in the data's order, from which they would be chosen again


class Draw(NamedTuple):
    """The completions of a step's next prompts; their rewards may be unfinished until finish_rewards() returns them."""

    examples: list[Example]  # one per equal block of rows; blocks of one prompt are adjacent
    rollout: Rollout
    finish_rewards: Callable[[], rewards.Rewards]  # waits for the rewards that are still being computed
    counts: dict[str, float] = {}  # metrics of the draw, by name
    sizes: Int[np.ndarray, ' P'] | None = None  # completions of each group; None: each block is a group
    stats: Stats | None = None  # of the sampler's last rollout; None: completions were read from the data
    streams: Sequence[rewards.RewardStream] = ()  # that computed the rewards while the sampler decoded
    chosen: ChosenPrompts | None = None  # the prompts, where passes are counted when the step learns from them

    @property
    def grouping(self) -> Grouping:
        """The Grouping of the rollout's rows: which of them form a group."""
        blocks, rows = len(self.examples), len(self.rollout.truncated)
        return Grouping.by_sizes(np.full(blocks, rows // blocks) if self.sizes is None else self.sizes)

    @property
    def prompts(self) -> list[Example]:
        """The example of each group, in the groups' order."""
        rows = len(self.rollout.truncated) // len(self.examples)
        return [self.examples[row // rows] for row in np.flatnonzero(self.grouping.place == 0)]

    def fetch_tokens(self):
        """(tokens i32[B, T], completion_mask bool[B, C]) on the host."""
        return processes.fetch((self.rollout.tokens, self.rollout.completion_mask))


Collect = Callable[[TrainState, Progress], tuple[Draw, TrainState]]  # how a step gets what it learns from


@dataclasses.dataclass(frozen=True)
class Drawer:
    """Draws completions of a step's next prompts, by sampling or from the data. It keeps no state between draws."""

    options: CollectOptions
    dataset: data.Dataset
    completions: list[list[list[int]]] | None  # token ids of the data's own completions; None: they are sampled
    engine: Sampler | None  # None: completions are read from the data
    shapes: batches.Shapes  # of a step
    prompts: int  # distinct prompts of a draw: P, or fewer where a prompt's group is made of several blocks
    seed: int
    mesh: jax.sharding.Mesh
    tokenizer: Any
    sampling: Sampling
    reward_functions: rewards.RewardFunctions

    def draw(self, state: TrainState, progress: Progress, index: int = 0) -> tuple[Draw, TrainState]:
        """Returns (the Draw of the next prompts, the TrainState after it).

        state: the step's, as its earlier draws have left it. progress: see sampler.engine. index: how many draws the
        step has made before. Rewards are computed while other rows still decode.
        """
        chosen, aux = self.choose(int(state.step), dict(state.aux), index)
        indices = chosen.indices
        if self.completions is not None:
            examples, prompts = self.pick_prompts(indices)
            completions = [self.completions[index] for index in indices]
            rollout = demonstrations.as_rollout(prompts, completions, self.shapes, self.sampling.pad_token)
            judge = functools.partial(self.judge, examples, rollout, int(state.step))
            draw = Draw(examples, batches.put_rows(rollout, self.mesh), judge)
        elif self.options.allocation == 'pass_rate':
            tries, hits = (np.asarray(aux[name])[indices] for name in ('tries', 'hits'))
            unit = self.shapes.group_size
            sizes = allocate.spread_by_pass_rate(hits, tries, self.shapes.prompts * unit, unit)
            blocks = Grouping.by_sizes(sizes // unit)
            first = self.number_first_samples(indices)[blocks.owner] + np.int32(unit * blocks.place)
            draw = self.sample(state, *self.pick_prompts(indices[blocks.owner]), progress, first=first)
            draw = draw._replace(sizes=sizes, counts=count_sizes(sizes))
        else:
            first = self.number_first_samples(indices)
            draw = self.sample(state, *self.pick_prompts(indices), progress, first=first, index=index)
        return draw._replace(chosen=chosen), state.replace(aux=aux)

    def choose(
        self, step: int, aux: dict[str, Any], index: int = 0, count: int | None = None
    ) -> tuple[ChosenPrompts, dict[str, Any]]:
        """(the next prompts, aux with its new position); they depend on the arguments, the seed and retired prompts.

        index: how many draws the step has made before; only its first revisits retired prompts. count: how many
        prompts; None: as many as a draw has.
        """
        count = self.prompts if count is None else count
        retired = find_retired(self.options, aux, len(self.dataset.examples))
        share = 0.0 if index else self.options.revisit  # a later draw of the step would visit a retired prompt twice
        revisits = data.revisit(self.seed, step, count, retired, share)
        fresh, position = data.walk(
            self.seed, int(aux['position']), count - len(revisits), retired, self.dataset.sources
        )
        chosen = ChosenPrompts(np.concatenate([revisits, fresh]), len(revisits), int(aux['position']))
        return chosen, aux | {'position': jnp.int32(position)}

    def sample(
        self, state: TrainState, examples: list[Example], prompts: Prompts, progress: Progress, *, first: Any, index=0
    ) -> Draw:
        """The Draw of completions that the engine samples for `prompts`, whose examples these are.

        first i32[P]: the number of each prompt's first sample, on which its noise depends. index: as in draw. All
        processes must call it.
        """
        assert self.engine is not None, 'completions are sampled'
        params = fetch_reference(state) if self.options.source == 'reference' else state.params
        key = jax.random.key(self.seed)
        if index:  # a prompt may come again in a later draw of a step, and must not get the same noise
            key = jax.random.fold_in(key, index)
        reward_functions = self.reward_functions._replace(step=int(state.step))
        stream = rewards.RewardStream(
            reward_functions, examples, self.shapes.group_size, self.tokenizer, self.sampling.stop_tokens
        )
        rollout, stats = self.engine.sample(
            params, self.engine.put(prompts.replace(first=first)), key, int(state.step),
            finished=stream.add, progress=progress,
        )  # fmt: skip
        rollout = move_rows(rollout, self.mesh)  # with mesh.sampler it lies on other devices
        finish = functools.cache(lambda: processes.gather_rows(stream.rows, stream.results()))
        return Draw(examples, rollout, finish, stats=stats, streams=[stream])

    def pick_prompts(self, indices: Sequence[int] | np.ndarray) -> tuple[list[Example], Prompts]:
        """(the examples with these indices in the data set, their Prompts on the host)."""
        sampling = self.sampling
        return data.prompts(self.dataset, indices, self.shapes.queries, sampling.pad_token, sampling.thinking_start)

    def judge(self, examples: Sequence[Example], rollout: Rollout, step: int) -> rewards.Rewards:
        """The Rewards of a rollout; examples: one for each equal block of its rows. All processes must call it."""
        columns = decode_completions(self.tokenizer, rollout, self.sampling.stop_tokens)
        compute = functools.partial(rewards.compute_rewards, self.reward_functions._replace(step=step))
        rewarded = processes.by_group(compute, examples, *columns)
        if self.options.source == 'pairs':  # the data says which completion is better
            better = np.tile([1.0, 0.0], len(examples))
            rewarded = rewarded._replace(rewards=better, correct=better)
        return rewarded

    def unjudged(self, rows: int) -> rewards.Rewards:
        """Rewards for `rows` rows that are not judged yet: NaN, '' and False in place of values."""
        blanks, like = {'O': '', 'f': np.nan}, rewards.compute_rewards(self.reward_functions, [], [], [], [])
        blank = jax.tree.map(lambda x: np.full(rows, blanks.get(x.dtype.kind, 0), x.dtype), like)
        return blank._replace(lengths=np.zeros(rows, int))

    def judge_again(
        self, examples: Sequence[Example], rollout: Rollout, rewarded: rewards.Rewards, step: int
    ) -> rewards.Rewards:
        """`rewarded`, the Rewards that completions got in earlier steps, or new ones if too many of these are missing.

        Rewards may be missing since a service was out; without new ones a resumed run would end again. Other arguments:
        as in judge.
        """
        if rewards.lacks_too_much(self.reward_functions, rewarded):
            return self.judge(examples, rollout, step)
        return rewarded

    def number_first_samples(self, indices: Int[np.ndarray, ' P']) -> Int[np.ndarray, ' P']:
        """i32[P]: the number of each prompt's first sample in a draw: 0, or more if the prompt has come before in it.

        A prompt that comes twice so gets other noise the second time.
        """
        return (Grouping.by_ids(indices).place * self.shapes.prompts * self.shapes.group_size).astype(np.int32)

    def count_passes(
        self, draw: Draw, chosen: ChosenPrompts | None, aux: dict[str, Any], index: int = 0
    ) -> tuple[Draw, dict[str, Any]]:
        """(the Draw with metrics of retired prompts, aux with the draw's tries and hits added).

        Draw and aux are unchanged unless options.counts_passes. chosen: the draw's prompts; index: as in choose.
        """
        if not self.options.counts_passes:
            return draw, aux
        assert chosen is not None, 'what is counted was chosen'
        grouping, correct = draw.grouping, draw.finish_rewards().correct == 1
        hits = np.bincount(grouping.owner, correct).astype(np.int32)
        indices, counts = chosen.indices, dict(draw.counts)
        aux = aux | {'tries': aux['tries'].at[indices].add(grouping.sizes), 'hits': aux['hits'].at[indices].add(hits)}
        if self.options.retire_above:
            counts['retired'] = float(np.mean(find_retired(self.options, aux, len(self.dataset.examples))))
        if self.options.revisit and not index:  # only the step's first draw revisits
            rate = (hits[: chosen.revisits] / grouping.sizes[: chosen.revisits]).mean() if chosen.revisits else np.nan
            counts |= {'revisited': chosen.revisits, 'revisited_pass_rate': rate}
        return draw._replace(counts=counts), aux


def stack(trees: Sequence[Any]) -> Any:
    """One tree in which the rows of several trees of host arrays follow one another."""
    return jax.tree.map(lambda *rows: np.concatenate(rows), *trees)


def rows_of(tree: Any, place: int | np.integer, size: int) -> Any:
    """The `size` rows of group number `place` in each array of a tree of host arrays, as a tree."""
    return jax.tree.map(lambda x: x[place * size : (place + 1) * size], tree)


def decode_completions(
    tokenizer: Any, rollout: Rollout, stop_tokens: Sequence[int] = ()
) -> tuple[list[str], Bool[np.ndarray, ' B'], Int[np.ndarray, ' B']]:
    """(texts, truncated, lengths in tokens) of a rollout's completions, on the host; all processes must call it.

    text.completion_text makes the texts, without the run's stop_tokens.
    """
    tokens, mask, truncated = processes.fetch((rollout.tokens, rollout.completion_mask, rollout.truncated))
    tokens = tokens[:, -mask.shape[1] :]
    texts = [completion_text(tokenizer, row[own], stop_tokens) for row, own in zip(tokens, mask, strict=True)]
    return texts, truncated, mask.sum(1)


def find_retired(options: CollectOptions, aux: dict[str, Any], count: int) -> Bool[np.ndarray, ' N']:
    """Which of `count` examples are retired: their pass rate over all visits is at least retire_above (0: none).

    It is found anew at each draw, so that an example which is revisited and fails comes back.
    """
    if not options.retire_above:
        return np.zeros(count, bool)
    tries, hits = np.asarray(aux['tries']), np.asarray(aux['hits'])
    return (tries > 0) & (hits >= options.retire_above * tries)


def count_sizes(sizes: Int[np.ndarray, ' P'], seeded: int = 0) -> dict[str, float]:
    """{metric: value}: least and most completions of a prompt, and `seeded`, completions sampled after exemplars."""
    return {'group_size_least': int(sizes.min()), 'group_size_most': int(sizes.max()), 'seeded': seeded}


def draw_shapes(options: CollectOptions, shapes: batches.Shapes, prompts_per_step: int) -> batches.Shapes:
    """The Shapes of one rollout of the sampler: the groups of a step (`shapes`), and options.in_flight groups more.

    With allocation 'uncertainty' a rollout has one unit of completions for each prompt.
    """
    if options.allocation == 'uncertainty':
        return shapes._replace(prompts=prompts_per_step)
    return shapes._replace(prompts=shapes.prompts + options.in_flight)


def abstract_aux(options: CollectOptions, shapes: batches.Shapes, count: int) -> dict[str, Any]:
    """{key: ShapeDtypeStructs} of what draws keep in TrainState.aux, for `count` examples; all begin as zeros."""
    aux: dict[str, Any] = {'position': jax.ShapeDtypeStruct((), jnp.int32)}
    if options.counts_passes:
        aux |= {name: jax.ShapeDtypeStruct((count,), jnp.int32) for name in ('tries', 'hits')}
    if options.keeps_groups:
        numbers = jax.ShapeDtypeStruct((shapes.prompts,), jnp.int32)
        rollout = batches.abstract_rollout(shapes, None)
        aux['kept'] = {'rollout': rollout, 'index': numbers, 'since': numbers, 'filled': numbers}
    return aux
