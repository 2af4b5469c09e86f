"""Rewards that verify: a completion's reward is a weighted sum of parts, plus a term when it was truncated.

A part is a module of this package, a function FILE.py:NAME of the user's, or a function handed to train.run:

    reward(completion, example, **options) -> float | None          None: it cannot tell
    async def reward(completion, example, **options)                awaited, many at a time
    reward(completions, examples, **options) -> list                called once a draw, by each process with its own

A user's function may name other things, see rewards.binding: `def reward(prompts, completions, **kwargs)` gets these as
lists, and each column of the data set.

Options are keyword-only, and bound by name to config.reward.options[part]; one that is annotated with a NamedTuple
takes the options of its fields. Four names are no options; the run supplies them: `pool`, its worker processes;
`sandbox`, for programs; `models`, the loaded reward models; `correct`, the verifier's verdict (bool or None).

The verifier decides what is correct. Its module may have extract(completion) -> str | None, what maj@n votes with, and
same(answer, answer) -> bool, for two spellings of one answer. With a stricter reading,
its module has strict, called like reward. Where the gold completion is not example.answer, its module has
gold(example) -> (a right completion, wrong ones...). One that judges without a gold answer has READS_ANSWERS = False.
A module that rewards steps has steps(completion, example) -> list
of (end in characters, float), or steps(completions, examples), a list of those. A module may have measure, called
like reward, which stands in its place where the part's weight is 0.
"""

from grpo_jax.rewards.build import Part, RewardFunctions, RewardOptions, build, check_parameters, options_of
from grpo_jax.rewards.custom import is_file, name_of
from grpo_jax.rewards.scoring import Rewards, RewardStream, advantage_inputs, compute_rewards, shape_rewards

__all__ = [
    'Part',
    'RewardFunctions',
    'RewardOptions',
    'RewardStream',
    'Rewards',
    'advantage_inputs',
    'build',
    'check_parameters',
    'compute_rewards',
    'is_file',
    'name_of',
    'options_of',
    'shape_rewards',
]
