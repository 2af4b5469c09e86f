"""Rewards that verify: a completion's reward is a weighted sum of parts, plus a term when it was truncated.

A part is a module of this package, a function FILE.py:NAME of the user's, or a function handed to train.run:

    reward(completion, example, **options) -> float | None          None: it cannot tell
    async def reward(completion, example, **options)                awaited, many at a time
    reward(completions, examples, **options) -> list                called once a step

Options are keyword-only, and bound by name to config.reward.options[part]; one that is annotated with a NamedTuple
takes the options of its fields. Four names are no options; the run supplies them: `pool`, its worker processes;
`sandbox`, for programs; `models`, the loaded reward models; `correct`, the verifier's verdict (bool or None).

The verifier decides what is correct. Its module also has extract(completion) -> str | None. With a stricter reading,
its module has strict, called like reward, and extract_strict(completion). Where answers have several spellings, it has
same(answer, other) -> bool, for majority votes. Where the gold completion is not example.answer, its module has
gold(example) -> (a right completion, wrong ones...). A module that rewards steps has steps(completion, example) -> list
of (end in characters, float), or steps(completions, examples), a list of those.
"""

from grpo_jax.rewards.build import Part, RewardFunctions, RewardOptions, build, options_of
from grpo_jax.rewards.custom import name_of
from grpo_jax.rewards.scoring import Rewards, RewardStream, advantage_inputs, compute_rewards, shape_rewards

__all__ = [
    'Part',
    'RewardFunctions',
    'RewardOptions',
    'RewardStream',
    'Rewards',
    'advantage_inputs',
    'build',
    'compute_rewards',
    'name_of',
    'options_of',
    'shape_rewards',
]
