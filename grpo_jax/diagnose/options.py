"""When monitors speak, and what a run does then: config.diagnose."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.ranges import Count, NotNegative, OneOf, Positive, PositiveShare, Range, Share

Factor = Annotated[float, Range(least=1)]


class DiagnoseOptions(NamedTuple):
    """config.diagnose; configs/default.py says where each threshold comes from."""

    on: Annotated[str, OneOf(('say', 'save', 'stop', 'off'))] = 'say'
    window: Annotated[int, Range(least=2, most=10_000)] = 10  # steps
    patience: Annotated[int, Range(least=1, most=10_000)] = 3  # steps
    dead_share: PositiveShare = 0.9
    truncated: PositiveShare = 0.25
    entropy_share: PositiveShare = 0.05
    entropy_floor: NotNegative = 0.01  # nats
    repetitive: PositiveShare = 0.2
    language_mixed: PositiveShare = 0.1
    kl_token: Positive = 0.5  # nats
    kl_sequence: Positive = 10.0  # nats
    length_growth: Factor = 1.3
    length_correlation: Share = 0.3
    part_growth: Positive = 0.5  # standard deviations of the reward
    gain: Share = 0.02
    variance_share: PositiveShare = 0.1
    displacement: Positive = 0.1  # nats a token
    sampler_gap: Positive = 0.02  # nats
    sampler_ess: PositiveShare = 0.5
    clip_share: PositiveShare = 0.3
    gradient_spike: Factor = 10.0
    reward_failures: PositiveShare = 0.05
    evaluation_drop: PositiveShare = 0.05
    generalization_gap: PositiveShare = 0.2
    retired: PositiveShare = 0.9
    repeat_after: Count = 20  # steps

    @classmethod
    def from_config(cls, section: Any) -> 'DiagnoseOptions':
        """DiagnoseOptions of config.diagnose; BadInput for a value out of its range."""
        ranges.check_value('diagnose', section, Mapping)
        return cls(**ranges.read_section(cls, section, 'diagnose'))
