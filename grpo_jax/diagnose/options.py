"""When monitors speak, and what a run does then: config.diagnose."""

from typing import Annotated, NamedTuple

from grpo_jax.ranges import Count, NotNegative, OneOf, Positive, PositiveShare, Range, Share

Factor = Annotated[float, Range(least=1)]


class DiagnoseOptions(NamedTuple):
    """config.diagnose: the thresholds of the monitors, and where each comes from."""

    # what a diagnosis does: say; save, which also writes a checkpoint; stop; off
    on: Annotated[str, OneOf(('say', 'save', 'stop', 'off'))] = 'say'
    # steps over which a mean is taken, and compared with earlier ones
    window: Annotated[int, Range(least=2, most=10_000)] = 10
    patience: Annotated[int, Range(least=1, most=10_000)] = 3  # steps in a row that a state must last
    dead_share: PositiveShare = 0.9  # of groups; DAPO (2503.14476) shows them growing; the demo ends with 0.8
    truncated: PositiveShare = 0.25  # of completions
    entropy_share: PositiveShare = 0.05  # of the first step's entropy (2505.22617: gains end as it is used up)
    entropy_floor: NotNegative = 0.01  # nats; the larger bound of entropy_share and this one counts
    repetitive: PositiveShare = 0.2  # of completions, and twice as many as at the start
    language_mixed: PositiveShare = 0.1  # of completions, and twice as many as at the start (R1, 2501.12948)
    kl_token: Positive = 0.5  # nats a token; 1e-3 to 1e-1 is usual
    kl_sequence: Positive = 10.0  # nats a completion; lecture notes name 5 to 10
    kl_unverified: Positive = 5.0  # nats a completion, where a learned reward grows and no verifier looks (2210.10760)
    length_growth: Factor = 1.3  # factor
    length_correlation: Share = 0.3  # of reward and length within groups
    part_growth: Positive = 0.5  # of a part of the reward, in standard deviations of the reward
    gain: Share = 0.02  # of accuracy: a smaller rise is no gain
    variance_share: PositiveShare = 0.1  # of the first steps' variance of advantages, or deviation of rewards
    variance_high: Positive = 0.8  # of advantages, in units of 1 - 1/G, which division by a group's spread leaves
    distinct: Share = 0.2  # of a group's completions but the first: share that differs from all before it
    displacement: Positive = 0.1  # nats a token that right completions have lost (2410.08847, 2512.04220)
    sampler_gap: Positive = 0.02  # nats a token; bfloat16 has some 0.004, float32 below 0.001
    sampler_ess: PositiveShare = 0.5  # effective sample size of the correction's weights, as a share
    correction_bound: PositiveShare = 0.1  # of tokens whose weight is bounded, where earlier policies sampled them
    clip_share: PositiveShare = 0.3  # of tokens; GSPO has some 0.15, others two orders of magnitude less
    gradient_spike: Factor = 10.0  # in medians of the steps before
    reward_failures: PositiveShare = 0.05  # of completions whose reward died, expired or cannot be told
    evaluation_drop: PositiveShare = 0.05  # of pass@1, and more than two standard errors
    generalization_gap: PositiveShare = 0.2  # by which accuracy in training exceeds pass@1
    retired: PositiveShare = 0.9  # of prompts
    repeat_after: Count = 20  # steps for which a diagnosis must have been gone before it is said again
