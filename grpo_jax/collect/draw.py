"""What a step draws: its next prompts, their completions, and rewards that are on their way.

A Drawer draws once. What it moves on between steps lies in TrainState.aux, so that a resumed run draws the same:
position, how many prompts were visited, and tries and hits of each example, for the curriculum and the sizes of groups.
Loops around a draw are in select.py and xrpo.py.
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
from grpo_jax.collect.options import Collection
from grpo_jax.example import Example
from grpo_jax.hosts import processes
from grpo_jax.learner.programs import fetch_reference
from grpo_jax.sampler.engine import Engine, Stats
from grpo_jax.sharding import batches
from grpo_jax.types import Prompts, Rollout, TrainState

Progress = Callable[[int, int, int], Any]  # see sampler.engine


class Draw(NamedTuple):
    """Completions of prompts."""

    examples: list[Example]  # one per equal block of rows; blocks of one prompt are adjacent
    rollout: Rollout
    finish_rewards: Callable[[], rewards.Rewards]  # waits for those that are still being computed
    counts: dict[str, float] = {}  # what it took, by name
    sizes: Int[np.ndarray, ' P'] | None = None  # of the groups; None: each block is one
    stats: Stats | None = None  # of the sampler's last rollout; None: completions were read from the data
    streams: Sequence[rewards.RewardStream] = ()  # that judged what was sampled

    @property
    def grouping(self) -> Grouping:
        """Which rows are a group."""
        blocks, rows = len(self.examples), len(self.rollout.truncated)
        return Grouping.by_sizes(np.full(blocks, rows // blocks) if self.sizes is None else self.sizes)

    @property
    def prompts(self) -> list[Example]:
        """The example of each group."""
        rows = len(self.rollout.truncated) // len(self.examples)
        return [self.examples[row // rows] for row in np.flatnonzero(self.grouping.place == 0)]

    def fetch_tokens(self):
        """(tokens i32[B, T], completion_mask bool[B, C]) on the host."""
        return processes.fetch((self.rollout.tokens, self.rollout.completion_mask))


class Chosen(NamedTuple):
    """The prompts of a draw, as indices of the data set's examples; the first `revisits` are retired ones."""

    indices: Int[np.ndarray, ' P']
    revisits: int


@dataclasses.dataclass(frozen=True)
class Drawer:
    """Draws completions of a step's next prompts: sampled, or read from the data. It remembers nothing."""

    options: Collection
    dataset: data.Dataset
    completions: list[list[list[int]]] | None  # token ids of the data's own completions; None: they are sampled
    engine: Engine | None  # None: completions are read from the data
    shapes: batches.Shapes  # of a step
    prompts: int  # that are visited at once: P, or fewer where a prompt's group is made of several blocks
    seed: int
    mesh: jax.sharding.Mesh
    tokenizer: Any
    pad_token: int
    reward_functions: rewards.RewardFunctions

    def draw(
        self, state: TrainState, aux: dict[str, Any], index: int, progress: Progress
    ) -> tuple[Draw, dict[str, Any]]:
        """(Draw of the next prompts, aux that is moved on); index: of a step's draws.

        Rewards are computed while other rows still decode. progress is called as the sampler says.
        """
        chosen, aux = self.choose(int(state.step), aux, index)
        indices = chosen.indices
        if self.completions is not None:
            examples, prompts = self._prompts(indices)
            completions = [self.completions[index] for index in indices]
            rollout = demonstrations.as_rollout(prompts, completions, self.shapes, self.pad_token)
            judge = functools.partial(self.judge, examples, rollout)
            draw = Draw(examples, batches.put_rows(rollout, self.mesh), judge)
        elif self.options.allocation == 'pass_rate':
            tries, hits = (np.asarray(aux[name])[indices] for name in ('tries', 'hits'))
            unit = self.shapes.group_size
            sizes = allocate.spread_by_pass_rate(hits, tries, self.shapes.prompts * unit, unit)
            blocks = Grouping.by_sizes(sizes // unit)
            first = self.earlier_samples(indices)[blocks.owner] + np.int32(unit * blocks.place)
            draw = self.sample(state, *self._prompts(indices[blocks.owner]), progress, first=first)
            draw = draw._replace(sizes=sizes, counts=count_sizes(sizes))
        else:
            first = self.earlier_samples(indices)
            draw = self.sample(state, *self._prompts(indices), progress, first=first, index=index)
        return self.count_passes(draw, chosen, aux, index)

    def choose(self, step: int, aux: dict[str, Any], index: int = 0) -> tuple[Chosen, dict[str, Any]]:
        """(the next prompts, aux with its position moved on): a function of seed, step, position and the retired."""
        retired = find_retired(self.options, aux, len(self.dataset.examples))
        share = 0.0 if index else self.options.revisit  # drawn again, a step would visit a retired prompt twice
        revisits = data.revisit(self.seed, step, self.prompts, retired, share)
        fresh, position = data.walk(
            self.seed, int(aux['position']), self.prompts - len(revisits), retired, self.dataset.sources
        )
        return Chosen(np.concatenate([revisits, fresh]), len(revisits)), aux | {'position': jnp.int32(position)}

    def sample(
        self, state: TrainState, examples: list[Example], prompts: Prompts, progress: Progress, *, first: Any, index=0
    ) -> Draw:
        """The Draw of sampled completions; first i32[P]: the number of each prompt's first sample."""
        assert self.engine is not None, 'completions are sampled'
        params = fetch_reference(state) if self.options.source == 'reference' else state.params
        key = jax.random.key(self.seed)
        if index:  # a prompt may come again in a later draw of a step; its noise must not
            key = jax.random.fold_in(key, index)
        stream = rewards.RewardStream(self.reward_functions, examples, self.shapes.group_size, self.tokenizer)
        rollout, stats = self.engine.sample(
            params, batches.put_rows(prompts, self.mesh).replace(first=first), key, int(state.step),
            finished=stream.add, progress=progress,
        )  # fmt: skip
        finish = functools.cache(lambda: processes.gather_rows(stream.rows, stream.results()))
        return Draw(examples, rollout, finish, stats=stats, streams=[stream])

    def _prompts(self, indices):
        """(examples, Prompts on the host) of these indices."""
        return data.prompts(self.dataset, indices, self.shapes.queries, self.pad_token)

    def judge(self, examples: Sequence[Example], rollout: Rollout) -> rewards.Rewards:
        """The Rewards of a rollout on the host."""
        columns = decode_completions(self.tokenizer, rollout)
        compute = functools.partial(rewards.compute_rewards, self.reward_functions)
        rewarded = processes.by_group(compute, examples, *columns)
        if self.options.source == 'pairs':  # the data says which is better
            better = np.tile([1.0, 0.0], len(examples))
            rewarded = rewarded._replace(rewards=better, correct=better)
        return rewarded

    def earlier_samples(self, indices: Int[np.ndarray, ' P']) -> Int[np.ndarray, ' P']:
        """The number of each place's first sample; a prompt's second place counts on, so that no noise repeats."""
        return (Grouping.by_ids(indices).place * self.shapes.prompts * self.shapes.group_size).astype(np.int32)

    def count_passes(
        self, draw: Draw, chosen: Chosen, aux: dict[str, Any], index: int = 0
    ) -> tuple[Draw, dict[str, Any]]:
        """(draw with the counts of the curriculum, aux with the tries and hits of its prompts), where they count."""
        if not self.options.counts_passes:
            return draw, aux
        grouping, correct = draw.grouping, draw.finish_rewards().correct == 1
        hits = np.bincount(grouping.owner, correct).astype(np.int32)
        indices, counts = chosen.indices, dict(draw.counts)
        aux = aux | {'tries': aux['tries'].at[indices].add(grouping.sizes), 'hits': aux['hits'].at[indices].add(hits)}
        if self.options.retire_above:
            counts['retired'] = float(np.mean(find_retired(self.options, aux, len(self.dataset.examples))))
        if self.options.revisit and not index:  # of the step's first rollout, which alone revisits
            rate = (hits[: chosen.revisits] / grouping.sizes[: chosen.revisits]).mean() if chosen.revisits else np.nan
            counts |= {'revisited': chosen.revisits, 'revisited_pass_rate': rate}
        return draw._replace(counts=counts), aux


def decode_completions(
    tokenizer: Any, rollout: Rollout
) -> tuple[list[str], Bool[np.ndarray, ' B'], Int[np.ndarray, ' B']]:
    """(texts, truncated, lengths in tokens) of a rollout's completions, on the host; special tokens are not shown."""
    tokens, mask, truncated = processes.fetch((rollout.tokens, rollout.completion_mask, rollout.truncated))
    tokens = tokens[:, -mask.shape[1] :]
    texts = tokenizer.batch_decode(
        [row[in_completion] for row, in_completion in zip(tokens, mask, strict=True)], skip_special_tokens=True
    )
    return texts, truncated, mask.sum(1)


def find_retired(options: Collection, aux: dict[str, Any], count: int) -> Bool[np.ndarray, ' N']:
    """Those of `count` examples whose pass rate over all their visits is at least options.retire_above; 0: none."""
    if not options.retire_above:
        return np.zeros(count, bool)
    tries, hits = np.asarray(aux['tries']), np.asarray(aux['hits'])
    return (tries > 0) & (hits >= options.retire_above * tries)


def count_sizes(sizes: Int[np.ndarray, ' P'], seeded: int = 0) -> dict[str, float]:
    """The least and the most completions of a prompt, and those asked for behind solved prompts, by name."""
    return {'group_size_least': int(sizes.min()), 'group_size_most': int(sizes.max()), 'seeded': seeded}


def draw_shapes(options: Collection, shapes: batches.Shapes, prompts_per_step: int) -> batches.Shapes:
    """Shapes of what is sampled at once for a step of these shapes: all of it, or one block of each prompt."""
    return shapes._replace(prompts=prompts_per_step) if options.allocation == 'uncertainty' else shapes


def abstract_aux(options: Collection, shapes: batches.Shapes, count: int) -> dict[str, Any]:
    """ShapeDtypeStructs of what the draws of `count` examples have in TrainState.aux, zeros at the start."""
    aux: dict[str, Any] = {'position': jax.ShapeDtypeStruct((), jnp.int32)}
    if options.counts_passes:
        aux |= {name: jax.ShapeDtypeStruct((count,), jnp.int32) for name in ('tries', 'hits')}
    if options.keeps_groups:
        numbers = jax.ShapeDtypeStruct((shapes.prompts,), jnp.int32)
        rollout = batches.abstract_rollout(shapes, None)
        aux['kept'] = {'rollout': rollout, 'index': numbers, 'since': numbers, 'filled': numbers}
    return aux
