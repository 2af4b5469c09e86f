"""Rows that go on in the next step: a step does not wait for its longest completion.

Besides the P groups that a step learns from, collection.in_flight groups are under way. In a step every unfinished row
gets equally many tokens: the least multiple of the sampler's CUT at which P groups are complete, and all groups that
were admitted collection.max_age steps ago. The step learns from the first P complete groups, in the order of admission.
The others go on in the next step, under its weights, and their tokens are prefilled anew. So which groups a step learns
from, and which policy has sampled a token, depend on the completions' lengths and the order of the data alone.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import rewards
from grpo_jax.collect.draw import ChosenPrompts, Draw, Drawer, rows_of, stack
from grpo_jax.collect.pending import Pending, PendingGroup, ended_rows, pack_groups, try_rewards, unpack_groups
from grpo_jax.hosts import processes
from grpo_jax.sampler.engine import Enough
from grpo_jax.sharding import batches
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.types import Prompts, Rollout, TrainState


class UnderWay(NamedTuple):
    """The groups that are under way when a step begins."""

    groups: list[PendingGroup]  # in the order of admission
    # () -> (the groups with rewards, the error of a reward that ends the run or None); only this call waits for the
    # rewards of rows that have ended, and a step begins before it
    settle: Callable[[], tuple[list[PendingGroup], Exception | None]]
    begun: int  # the step that admitted the run's first groups


def make_carry(drawer: Drawer) -> Callable[..., tuple[Draw, TrainState]]:
    """Makes collect(state, progress, index) -> (Draw, TrainState), which leaves unfinished groups to the next draw.

    index: how many draws the step has made before; above 0 only where it exchanges dead groups.
    """
    options, sampling, engine = drawer.options, drawer.sampling, drawer.engine
    assert engine is not None, 'completions are sampled'
    prompts, size, in_flight = drawer.prompts, drawer.shapes.group_size, options.in_flight
    examples, key = drawer.dataset.examples, jax.random.key(drawer.seed)
    order = deal(prompts, in_flight, batches.devices_along(engine.mesh, ROW_AXES))

    def collect(state, progress, index=0):
        step = int(state.step)
        carried = load_groups(state.pending, drawer, step)
        chosen, aux = drawer.choose(step, dict(state.aux), count=prompts + in_flight - len(carried.groups))
        groups = carried.groups + admit(drawer, chosen.indices, step, int(state.aux['position']), index)
        dealt = [groups[place] for place in order]
        own = [examples[group.index] for group in dealt]
        stream = rewards.RewardStream(
            drawer.reward_functions._replace(step=step), own, size, drawer.tokenizer, sampling.stop_tokens
        )
        aged = np.array([0 < options.max_age <= step - group.since for group in dealt])

        before, judged = stack([group.rollout for group in dealt]), np.concatenate([group.judged for group in dealt])
        first = np.array([group.first for group in dealt], np.int32)
        asked_for = engine.put(as_prompts(drawer, dealt).replace(first=first))
        rollout, stats = engine.go_on(
            state.params, engine.put(before), asked_for, key, step, Enough(prompts, aged),
            finished=lambda row, *ended: judged[row] or stream.add(row, *ended), progress=progress,
        )  # fmt: skip
        after, places = processes.fetch(rollout), np.argsort(order)  # the place of each group
        groups = [group._replace(rollout=rows_of(after, places[i], size)) for i, group in enumerate(groups)]

        def settle_all():
            known, failure = carried.settle()
            known = with_rewards(groups, known)
            settled, error = try_rewards(lambda: add_rewards(known, stream, places, size), known)
            return settled, failure or error

        settle = Once(settle_all)
        complete = [place for place, group in enumerate(groups) if group.complete]
        taken = complete[:prompts]
        left = [place for place in range(len(groups)) if place not in taken]

        learned = [groups[place] for place in taken]
        asked, completions = [examples[group.index] for group in learned], stack([group.rollout for group in learned])

        def finish_rewards():
            settled, failure = settle()
            if failure:
                raise failure
            rewarded = stack([settled[place].rewarded for place in taken])
            return drawer.judge_again(asked, completions, rewarded, step)

        draw = Draw(
            asked,
            batches.put_rows(completions, drawer.mesh),
            functools.cache(finish_rewards),
            counts=count_ages(learned, before, step, options.staleness, carried.begun, waiting=len(complete) - prompts),
            stats=stats,
            streams=[stream],
            chosen=ChosenPrompts(np.array([group.index for group in learned]), 0, learned[0].position),
        )

        def settle_left():
            settled, failure = settle()
            return [settled[place] for place in left], failure

        # the rewards of rows that have ended are on their way, so that the next step need not judge them
        going_on = [groups[place]._replace(judged=ended_rows(groups[place].rollout)) for place in left]
        under_way = UnderWay(going_on, settle_left, carried.begun)
        pending = Pending(lambda: {'carried': pack_groups(settle_left()[0], {'begun': carried.begun})}, under_way)
        return draw, state.replace(aux=aux, pending=pending)

    return collect


def deal(prompts: int, in_flight: int, shards: int) -> list[int]:
    """The group's number in each place of the engine: for each shard a part of the carried groups, then of new ones.

    Groups are numbered in the order of admission, so that only the first `in_flight` of them may have tokens.
    """
    order = []
    for shard in range(shards):
        order += range(shard * in_flight // shards, (shard + 1) * in_flight // shards)
        order += range(in_flight + shard * prompts // shards, in_flight + (shard + 1) * prompts // shards)
    return order


class Once:
    """Calls a function without arguments once, keeps its value, and drops the function with all that it refers to."""

    def __init__(self, function: Callable[[], Any]):
        self._function, self._value = function, None

    def __call__(self) -> Any:
        """The function's value; the first call computes it."""
        if self._function is not None:
            self._value, self._function = self._function(), None
        return self._value


def load_groups(pending: Any, drawer: Drawer, step: int) -> UnderWay:
    """The groups that are UnderWay when a step begins, from `pending`: TrainState.pending, also as a checkpoint has it.

    The step judges rows that have ended and are not judged yet.
    """
    if isinstance(pending, Pending):
        return pending.value
    if not pending:
        return UnderWay([], lambda: ([], None), step)
    groups, note = unpack_groups(pending['carried'], drawer.dataset, drawer.sampling.pad_token)
    return UnderWay(groups, lambda: (groups, None), note['begun'])


def with_rewards(groups: Sequence[PendingGroup], earlier: Sequence[PendingGroup]) -> list[PendingGroup]:
    """The groups; the first of them get the rewards of `earlier`, the same groups as the steps before left them."""
    known = [group._replace(judged=e.judged, rewarded=e.rewarded) for group, e in zip(groups, earlier, strict=False)]
    return [*known, *groups[len(known) :]]


def add_rewards(
    groups: Sequence[PendingGroup], stream: rewards.RewardStream, places: Sequence[int] | np.ndarray, size: int
) -> list[PendingGroup]:
    """The groups, with rewards for the rows that have ended in this step; waits for them. All processes must call it.

    stream: has judged these rows, by row of the engine; places: each group's place in the engine; size: a group's rows.
    """
    results = processes.gather_rows(stream.rows, stream.results())
    numbers = processes.gather_rows(stream.rows, np.array(stream.rows, int))
    settled = []
    for group, place in zip(groups, places, strict=True):
        new = np.flatnonzero(numbers // size == place)
        rows, judged = numbers[new] % size, group.judged.copy()
        rewarded = jax.tree.map(np.copy, group.rewarded)
        for whole, known in zip(jax.tree.leaves(rewarded), jax.tree.leaves(results), strict=True):
            whole[rows] = known[new]
        judged[rows] = True
        settled.append(group._replace(judged=judged, rewarded=rewarded))
    return settled


def admit(drawer: Drawer, indices: np.ndarray, step: int, position: int, index: int) -> list[PendingGroup]:
    """New PendingGroups, without tokens, for the examples of these indices, which a step admits.

    position: of the first example in the data's order. index: how many draws the step has made before, so that a prompt
    that comes again in a later draw gets noise of its own.
    """
    size, (queries, columns) = drawer.shapes.group_size, drawer.shapes[2:]
    first = drawer.number_first_samples(indices) + index * 2**16
    _, prompts = drawer.pick_prompts(indices)
    groups, unjudged = [], (np.zeros(size, bool), drawer.unjudged(size))
    for place, example in enumerate(np.asarray(indices).tolist()):
        tokens = np.full((size, queries + columns), drawer.sampling.pad_token, np.int32)
        tokens[:, :queries] = prompts.tokens[place]
        version = np.zeros((size, columns), np.int32)
        version[:, 0] = step  # which chooses the noise, and becomes the version of the first token
        rollout: Any = Rollout(
            tokens=tokens,
            prompt_mask=np.repeat(prompts.mask[place : place + 1], size, 0),
            completion_mask=np.zeros((size, columns), bool),
            forced=np.zeros((size, columns), bool),
            logprobs=np.zeros((size, columns), np.float32),
            truncated=np.ones(size, bool),
            version=version,
        )
        groups.append(PendingGroup(example, step, int(first[place]), position + place, rollout, *unjudged))
    return groups


def as_prompts(drawer: Drawer, groups: Sequence[PendingGroup]) -> Prompts:
    """The Prompts of groups under way, with the tokens that they had when the groups were admitted."""
    rollout, queries = stack([group.rollout for group in groups]), drawer.shapes.queries
    size, start = drawer.shapes.group_size, drawer.sampling.thinking_start
    examples = [drawer.dataset.examples[group.index] for group in groups]
    prompts: Any = Prompts(
        rollout.tokens[::size, :queries],
        rollout.prompt_mask[::size],
        np.array([example.id for example in examples], np.int32),
        thinking=np.array([example.begun.startswith(start) for example in examples]) if start else None,
    )
    return prompts


def count_ages(
    groups: Sequence[PendingGroup], before: Rollout, step: int, staleness: int, begun: int, *, waiting: int
) -> dict[str, float]:
    """{metric: value}: ages of the groups that a step learns from and of their tokens, and counts of carried rows.

    before: all rows under way, as they were when the step began; staleness: steps by which sampling is ahead of
    learning; begun: the step in which sampling began; waiting: complete groups that are left for later steps.
    """
    ages = np.array([step - max(group.since - staleness, begun) for group in groups])
    mask, version = (
        np.concatenate([getattr(group.rollout, name) for group in groups]) for name in ('loss_mask', 'version')
    )
    newest, token_ages = (version == step)[mask], (step - np.maximum(version - staleness, begun))[mask]
    carried = before.completion_mask.any(1) & ~ended_rows(before)
    return {
        'group_age': float(ages.mean()),
        'group_age_most': int(ages.max()),
        'token_age_most': int(token_ages.max(initial=0)),
        'carried_rows': float(carried.mean()),
        'carried_tokens': float((~newest).mean()) if len(newest) else 0.0,
        'prefilled_again': int(before.completion_mask[carried].sum()),
        'groups_waiting': waiting,
    }
