"""The options of what a step learns from: config.collection as a typed value."""

from typing import Annotated, NamedTuple

from grpo_jax import ranges, rewards
from grpo_jax.algorithms.checks import CHOICES
from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.ranges import Amendable, Natural, OneOf, PositiveShare, Range, ReadWith, Share

# sources that sample nothing: the fields of an example's meta that are a group's completions, the best first
READ_FROM_DATA = {'demonstrations': ('demonstration',), 'pairs': ('demonstration', 'rejected')}
EXCHANGED = ('resample', 'replay')  # what happens to dead groups, where other groups take their places
SCHEDULES = ('frozen', 'hard', 'polyak')  # of the reference
ALLOCATIONS = ('equal', 'pass_rate', 'uncertainty')  # of a step's completions to its prompts
UNEQUAL = ReadWith('.allocation', ALLOCATIONS[1:])
KEPT = ReadWith('algorithm.keeps_reference log.kl_every', words='a reference (algorithm.kl, or log.kl_every)')


class CollectOptions(NamedTuple):
    """What a step learns from, and which policies are beside the one that learns: config.collection."""

    # of completions: policy, reference (a frozen sampler), or read from the data: demonstrations, pairs
    source: Annotated[str, OneOf(CHOICES['source'])] = 'policy'
    # a group is dead, so that it teaches nothing, by reward: all its rewards are equal; outcome: also if all are right
    # or all are wrong; none: never
    gate: Annotated[str, OneOf(CHOICES['gate'])] = 'reward'
    # dead groups: keep (advantage 0), drop (also from the weights), reweight (the others by B / (B - M)), resample,
    # replay
    dead_groups: Annotated[str, OneOf(CHOICES['dead_groups'])] = 'keep'
    # completions that the budget of tokens cut off: keep, or drop, which takes their tokens out of the loss and its
    # denominators (DAPO's overlong filter) and leaves their rewards in the statistics of their groups
    truncated: Amendable[Annotated[str, OneOf(('keep', 'drop'))]] = 'keep'
    # rollouts that resample may draw in a step
    max_draws: Annotated[Amendable[int], Range(least=1, most=10_000), ReadWith('.dead_groups', ('resample',))] = 10
    # steps that groups left over by resample, or of replay, may be old
    max_staleness: Annotated[Amendable[Natural], ReadWith('.dead_groups', EXCHANGED)] = 0
    # groups that are under way besides those that a step learns from: a step ends when enough of all are complete, and
    # the others go on in the next step; 0: a step waits for all its completions
    in_flight: Natural = 0
    # age in steps from which a step waits for a group under way; 0: no step waits
    max_age: Annotated[Amendable[Natural], ReadWith('.in_flight')] = 8
    staleness: Natural = 0  # steps by which sampling is ahead: so much older is the policy whose completions are used
    retire_above: Amendable[Share] = 0.0  # pass rate over all its visits from which a prompt retires; 0: none
    # share of a step's places that go to retired prompts again
    revisit: Amendable[Annotated[float, Range(least=0, below=1)]] = 0.0
    # completions of each prompt: equal, rollout.group_size; or unequal, with that mean: pass_rate, most for those that
    # then get both right and wrong ones; uncertainty, in rounds, most for prompts whose mean reward is unsure (XRPO)
    allocation: Annotated[str, OneOf(ALLOCATIONS)] = 'equal'
    # completions that a prompt gets at a time, unless allocation is equal
    allocation_unit: Annotated[int, Range(least=2, most=1024), UNEQUAL] = 2
    # weight of a bonus for prompts with few completions, beside their uncertainty
    exploration: Annotated[Amendable[float], Range(least=0, most=1e6), ReadWith('.allocation', ('uncertainty',))] = 1.0
    # solved prompts of a step that are written, with their answers, before an unsolved one
    seeding: Amendable[Annotated[int, Range(least=0, most=64)]] = 0
    # frozen, hard (the policy, every reference_every steps) or polyak (a share of it)
    reference: Annotated[str, OneOf(SCHEDULES), KEPT] = 'frozen'
    # steps between two renewals of the reference; of hard and polyak
    reference_every: Annotated[Amendable[Natural], KEPT] = 0
    # share of the policy in polyak
    reference_mix: Annotated[Amendable[PositiveShare], ReadWith('.reference', ('polyak',)), KEPT] = 0.6

    @classmethod
    def from_config(cls, section, *, group_size: int, corrected: bool, reward_options: rewards.RewardOptions):
        """Reads config.collection as CollectOptions. Raises BadInput for choices that cannot work.

        corrected: whether the algorithm accounts for completions of other policies. reward_options: the run's.
        """
        collection, verifier = cls(**ranges.read_section(cls, section, 'collection')), reward_options.verifies_all
        if (collection.reference == 'frozen') != (collection.reference_every == 0):
            raise BadInput(
                'collection.reference_every',
                collection.reference_every,
                f'does not fit collection.reference={collection.reference!r}: '
                'use 0 with frozen, and 1 or more steps with hard and polyak',
            )
        if collection.gate == 'outcome' and not verifier:
            raise BadInput(
                'collection.gate', 'outcome', 'needs a reward.verifier to know what is correct; name one, or use reward'
            )
        if collection.retire_above and not verifier:
            remedy = 'needs a reward.verifier to know pass rates; name one, or use 0'
            raise BadInput('collection.retire_above', collection.retire_above, remedy)
        if collection.revisit and not collection.retire_above:
            remedy = 'gives places to retired prompts; set collection.retire_above, or use 0'
            raise BadInput('collection.revisit', collection.revisit, remedy)
        _check_allocation(collection, group_size, verifier)
        if collection.dead_groups == 'replay' and collection.max_staleness < 1:
            raise BadInput(
                'collection.max_staleness',
                collection.max_staleness,
                "must be at least 1 for collection.dead_groups='replay', which takes groups of earlier steps; raise it",
            )
        stale = {'max_staleness': collection.keeps_groups, 'in_flight': collection.in_flight}
        for name, lets_in in (stale | {'staleness': collection.staleness}).items():
            if lets_in and not corrected:
                raise BadInput(
                    f'collection.{name}',
                    getattr(collection, name),
                    'lets in completions of older policies, and nothing accounts for them; add '
                    '--config.algorithm.correction=truncated, or --config.algorithm.ratio_base=sampler',
                )
        _check_asynchronous(collection)
        return collection

    @property
    def counts_passes(self) -> bool:
        """Whether the run counts how many completions of each example were sampled (tries) and were right (hits)."""
        return self.retire_above > 0 or self.allocation == 'pass_rate'

    @property
    def is_asynchronous(self) -> bool:
        """Whether steps do not wait for all their completions, so that earlier policies have sampled some tokens."""
        return self.in_flight > 0 or self.staleness > 0

    @property
    def keeps_groups(self) -> bool:
        """Whether TrainState.aux['kept'] keeps groups for later steps, which resample or replay take from it."""
        return self.dead_groups in EXCHANGED and self.max_staleness > 0


def _check_asynchronous(collection):
    """Raises BadInput for settings that do not go with in_flight or staleness."""
    for name in ('in_flight', 'staleness'):
        hindered = {
            f'collection.source = {collection.source}': collection.source != 'policy',
            f'collection.allocation = {collection.allocation}': collection.allocation != 'equal',
            f'collection.revisit = {collection.revisit:g}': collection.revisit > 0,
        }
        for setting, hinders in hindered.items():
            if getattr(collection, name) and hinders:
                remedy = f'does not go with {setting}; change one of the two'
                raise BadInput(f'collection.{name}', getattr(collection, name), remedy)


def _check_allocation(collection, group_size, verifier):
    """Raises BadInput for an allocation of unequal sizes that other settings forbid, or that lacks a verifier."""
    allocation, unit, seeding = collection.allocation, collection.allocation_unit, collection.seeding
    if seeding and allocation != 'uncertainty':
        raise BadInput('collection.seeding', seeding, "needs collection.allocation='uncertainty'; set that, or use 0")
    if allocation == 'equal':
        return
    if group_size % unit or group_size == unit:
        raise BadInput(
            'collection.allocation_unit',
            unit,
            f'must divide rollout.group_size = {group_size}, the completions that a prompt gets on average, and be '
            'smaller: a prompt gets them in such units; lower it, or raise rollout.group_size',
        )
    hindered = {
        f'collection.source = {collection.source}': collection.source in READ_FROM_DATA,
        f'collection.dead_groups = {collection.dead_groups}': collection.dead_groups in EXCHANGED,
    }
    for setting, hinders in hindered.items():
        if hinders:
            raise BadInput('collection.allocation', allocation, f'does not go with {setting}; use equal')
    if (allocation == 'pass_rate' or seeding) and not verifier:
        name = 'seeding' if seeding else 'allocation'
        raise BadInput(
            'reward.verifier', NO_VALUE, f'is empty, and collection.{name} must know what is correct; name one'
        )
