"""The options of what a step learns from: config.collection as a typed value."""

from typing import Annotated, NamedTuple

from grpo_jax import ranges, rewards
from grpo_jax.algorithms.checks import CHOICES
from grpo_jax.errors import BadInput
from grpo_jax.ranges import Natural, OneOf, PositiveShare, Range, Share

# sources that sample nothing: the fields of an example's meta that are a group's completions, the best first
READ_FROM_DATA = {'demonstrations': ('demonstration',), 'pairs': ('demonstration', 'rejected')}
SCHEDULES = ('frozen', 'hard', 'polyak')  # of the reference
ALLOCATIONS = ('equal', 'pass_rate', 'uncertainty')  # of a step's completions to its prompts


class Collection(NamedTuple):
    """What a step learns from, and which policies are beside the one that learns: config.collection."""

    source: Annotated[str, OneOf(CHOICES['source'])] = 'policy'
    gate: Annotated[str, OneOf(CHOICES['gate'])] = 'auto'
    dead_groups: Annotated[str, OneOf(CHOICES['dead_groups'])] = 'keep'
    max_draws: Annotated[int, Range(least=1, most=10_000)] = 10
    max_staleness: Natural = 0
    retire_above: Share = 0.0
    revisit: Annotated[float, Range(least=0, below=1)] = 0.0
    allocation: Annotated[str, OneOf(ALLOCATIONS)] = 'equal'
    allocation_unit: Annotated[int, Range(least=2, most=1024)] = 2
    exploration: Annotated[float, Range(least=0, most=1e6)] = 1.0
    seeding: Annotated[int, Range(least=0, most=64)] = 0
    reference: Annotated[str, OneOf(SCHEDULES)] = 'frozen'
    reference_every: Natural = 0
    reference_mix: PositiveShare = 0.6

    @classmethod
    def from_config(cls, section, *, group_size: int, corrected: bool, reward_options: rewards.RewardOptions):
        """Collection of config.collection; BadInput for what cannot work.

        corrected: the algorithm accounts for completions of other policies. A gate auto is outcome or reward then.
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
            raise BadInput('collection.gate', 'outcome', 'needs a reward.verifier to know what is correct; name one')
        if collection.retire_above and not verifier:
            raise BadInput(
                'collection.retire_above',
                collection.retire_above,
                'needs a reward.verifier to know pass rates; name one, or use 0',
            )
        if collection.revisit and not collection.retire_above:
            raise BadInput(
                'collection.revisit',
                collection.revisit,
                'gives places to retired prompts; set collection.retire_above, or use 0',
            )
        _check_allocation(collection, group_size, verifier)
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
    def counts_passes(self) -> bool:
        """Whether tries and hits of each example are counted."""
        return self.retire_above > 0 or self.allocation == 'pass_rate'

    @property
    def keeps_groups(self) -> bool:
        """Whether groups are kept from step to step."""
        return self.dead_groups in ('resample', 'replay') and self.max_staleness > 0


def _check_allocation(collection, group_size, verifier):
    """BadInput for groups of several sizes where something needs one, or where nothing says who wants more."""
    allocation, unit, seeding = collection.allocation, collection.allocation_unit, collection.seeding
    if seeding and allocation != 'uncertainty':
        raise BadInput(
            'collection.seeding', seeding, 'is of prompts that a first round has not solved; set allocation=uncertainty'
        )
    if allocation == 'equal':
        return
    if group_size % unit or group_size == unit:
        raise BadInput(
            'collection.allocation_unit',
            unit,
            f'must divide rollout.group_size = {group_size}, the mean of a step, and be smaller: a prompt gets its '
            'completions by so many',
        )
    hindered = {
        f'collection.source = {collection.source}': collection.source in READ_FROM_DATA,
        f'collection.dead_groups = {collection.dead_groups}': collection.dead_groups in ('resample', 'replay'),
    }
    for setting, hinders in hindered.items():
        if hinders:
            raise BadInput('collection.allocation', allocation, f'does not go with {setting}; use equal')
    if (allocation == 'pass_rate' or seeding) and not verifier:
        raise BadInput(
            'reward.verifier', '', f'collection.{"seeding" if seeding else "allocation"} asks what is solved; name one'
        )
