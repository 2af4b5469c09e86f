"""Rewards of completions: a completion's reward is a weighted sum of parts, plus a constant if it was truncated.

A part is a module of this package, a user's function FILE.py:NAME, or a function handed to train.run:

    reward(completion, example, **options) -> float | None          None: it cannot tell
    async def reward(completion, example, **options)                awaited, many at a time
    reward(completions, examples, **options) -> list                called once a draw, by each process with its own

A user's function that raises an exception is called again, up to config.reward.retries times. If each call raises one,
the completion lacks the part. A function that is still running at config.reward.deadline has failed: the part counts as
config.reward.failed, 0 by default. For a slow service use the part `http`, which has time-outs of its own.

A user's function may name other arguments, see rewards.binding: `def reward(prompts, completions, **kwargs)` gets
lists of prompts and completions, and a list for each column of the data set.

Options are keyword-only arguments, and come from config.reward.options[part] by name. An argument whose annotation is
a NamedTuple takes one option for each field. The names in build.SUPPLIED are no options, since the run supplies
them: `pool`, its worker processes; `sandbox`, which runs programs; `models`, the loaded reward models; `services`, over
HTTP; `correct`, the verifier's verdict (bool or None); `truncated`, whether the budget ended it; `step` and `workdir`,
of the run; `limit`, the budget in tokens, for shaping by length.

The verifier is the part that decides whether a completion is correct. Beside reward, a module may have

    extract(completion) -> str | None                the answer that maj@n votes with
    extract_strict(completion) -> str | None         the answer by the stricter reading of `strict`
    same(answer, answer) -> bool                     whether two extracted answers are equal but for spelling
    strict(completion, example, **options)           a reward by a stricter reading
    gold(example) -> (right completion, wrong ones...)     for the self-test, where example.answer will not do
    steps(completion, example) -> list of (end in characters, float)     rewards of steps
    steps(completions, examples) -> list of such lists                   the same, of all completions at once
    measure(completion, example, **options)          called instead of reward where the part's weight is 0
    READS_ANSWERS = False                            it judges without a gold answer
    COLUMNS = ('numbers', ...)                       columns of example.meta that it reads
"""

from grpo_jax.rewards.build import Part, RewardFunctions, RewardOptions, build, check_parameters, options_of
from grpo_jax.rewards.custom import RewardError, name_of
from grpo_jax.rewards.scoring import (
    Rewards,
    RewardsMissing,
    RewardStream,
    advantage_inputs,
    check_missing,
    compute_rewards,
    lacks_too_much,
    list_terms,
    service_counts,
    shape_rewards,
)

__all__ = [
    'Part',
    'RewardError',
    'RewardFunctions',
    'RewardOptions',
    'RewardStream',
    'Rewards',
    'RewardsMissing',
    'advantage_inputs',
    'build',
    'check_missing',
    'check_parameters',
    'compute_rewards',
    'lacks_too_much',
    'list_terms',
    'name_of',
    'options_of',
    'service_counts',
    'shape_rewards',
]
