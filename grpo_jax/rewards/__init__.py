"""Rewards that verify: score = weighted sum of parts, plus a term for truncated completions.

A part is a module of this package, a function FILE.py:NAME of the user's, or a function handed to train.run:

    reward(completion, example, **options) -> float | None          None: unscorable
    async def reward(completion, example, **options)                awaited, many at a time
    reward(completions, examples, **options) -> list                called once a step

Options are config.reward.options[name], bound by name. `pool` asks for the run's worker processes, `correct` for what
the verifier said (a bool, or None). The verifier, which decides what is correct, also has extract(completion) -> str |
None; one with a stricter reading has strict, called like reward; one whose gold is not example.answer has
gold(example) -> (completion that is right, one that is wrong). A module that rewards steps has steps(completion,
example) -> list of (end in characters, float), or steps(completions, examples), a list of those.
"""

from collections.abc import Callable
import functools
import importlib
import inspect
from types import SimpleNamespace
from typing import NamedTuple

from grpo_jax.errors import BadInput
from grpo_jax.rewards import custom, gold, length
from grpo_jax.rewards.scoring import Rewards, RewardStream, compute_rewards, known, score, shaped
from grpo_jax.workers import pool as pools

__all__ = ['Part', 'RewardFunctions', 'RewardStream', 'Rewards', 'compute_rewards', 'known', 'make', 'score', 'shaped']


class Part(NamedTuple):
    """A reward with its options bound."""

    function: Callable
    weight: float
    asynchronous: bool = False
    batched: bool = False  # takes all completions at once
    reads_correct: bool = False  # asks what the verifier said


class RewardFunctions(NamedTuple):
    """The rewards of a run."""

    parts: dict[str, Part]
    truncated: float  # added to a completion that ran out of budget
    verifier: str  # the part that decides correct (reward >= 1), or ''
    extract: Callable | None  # the verifier's answer extraction
    strict: Callable | None = None  # (completion, example) -> float | None, where the verifier has it
    gold: Callable = gold.of_answer  # (example) -> (completion that is right, one that is wrong)
    steps: Callable | None = None  # rewards of a completion's steps
    length: Callable | None = None  # (lengths, correct) -> shaping, of rewards.length
    length_weight: float = 1.0
    failed: float = 0.0  # of a part that ran out of time or memory
    deadline: float = 30.0  # seconds that an asynchronous part may take
    threads: int = 1


def make(section, max_tokens, functions=None):
    """Scorer of a config section, for completions of up to max_tokens; BadInput for a reward that cannot work.

    functions: rewards by name, beside those of this package.
    """
    pool = pools.Pool(section['workers'], deadline=section['deadline'], memory_gib=section['memory_gib'])
    find = functools.partial(_find, functions=functions or {}, pool=pool)
    bind = functools.partial(_bind, options=section['options'], pool=pool)
    if not section['parts']:
        raise BadInput('reward.parts', section['parts'], 'name at least one reward')
    found = {custom.name_of(path): (find(path), weight) for path, weight in section['parts']}
    parts = {name: _part(bind(name, source.reward), weight) for name, (source, weight) in found.items()}
    verifier = section['verifier']
    if verifier and verifier not in parts:
        raise BadInput('reward.verifier', verifier, f'must be one of reward.parts: {sorted(parts)}')
    if verifier and not hasattr(found[verifier][0], 'extract'):
        raise BadInput('reward.verifier', verifier, "has no extract(completion); name another part, or '' for none")
    for name, part in parts.items():
        if part.reads_correct and (
            not verifier or name == verifier or parts[verifier].asynchronous or parts[verifier].batched
        ):
            raise BadInput('reward.verifier', verifier, f'must be a plain function, which {name} asks what is correct')
    steps = section['step_rewards'] and find(section['step_rewards'])
    if steps and not hasattr(steps, 'steps'):
        raise BadInput(
            'reward.step_rewards', section['step_rewards'], "has no steps(completion, example); use calculator, or ''"
        )
    source = found[verifier][0] if verifier else SimpleNamespace()
    return RewardFunctions(
        parts,
        section['truncated_reward'],
        verifier,
        getattr(source, 'extract', None),
        strict=bind(verifier, source.strict) if hasattr(source, 'strict') else None,
        gold=getattr(source, 'gold', gold.of_answer),
        steps=_of_all(bind(custom.name_of(section['step_rewards']), steps.steps)) if steps else None,
        length=_shaping(section, max_tokens),
        length_weight=section['length_shaping_weight'],
        failed=section['failed'],
        deadline=section['deadline'],
        threads=section['workers'],
    )


def _find(path, functions, pool):
    """What holds a part's functions."""
    if path in functions:
        return SimpleNamespace(reward=functions[path])
    if '.py' in path:
        return custom.load(path, pool)
    try:
        return importlib.import_module(f'grpo_jax.rewards.{path}')
    except ModuleNotFoundError as error:
        if error.name != f'grpo_jax.rewards.{path}':
            raise
        raise BadInput(
            'reward.parts',
            path,
            'no such file in grpo_jax/rewards; add one with reward(completion, '
            'example), give FILE.py:NAME, or hand the function to train.run',
        ) from None


def _bind(name, function, options, **run):
    """The function with those options and things of the run that it declares; BadInput when an option lacks."""
    declared = inspect.signature(function).parameters
    given = dict(options.get(name, {})) | run
    wanted = {key for key, parameter in declared.items() if parameter.kind is parameter.KEYWORD_ONLY}
    missing = {key for key in wanted - given.keys() - {'correct'} if declared[key].default is inspect.Parameter.empty}
    if missing:
        raise BadInput(f'reward.options.{name}', dict(options.get(name, {})), f'lacks {", ".join(sorted(missing))}')
    return functools.partial(function, **{key: given[key] for key in wanted & given.keys()})


def _part(function, weight):
    named = inspect.signature(function).parameters
    return Part(
        function,
        float(weight),
        asynchronous=inspect.iscoroutinefunction(function),
        batched='completions' in named,
        reads_correct='correct' in named,
    )


def _of_all(steps):
    """steps(completions, examples), of a function of one completion too."""
    if 'completions' in inspect.signature(steps).parameters:
        return steps
    return lambda completions, examples: [steps(*row) for row in zip(completions, examples, strict=True)]


def _shaping(section, max_tokens):
    """The shaping by length of a config section, or None."""
    name = section['length_shaping']
    if not name:
        return None
    shapes = {key: shape for key, shape in vars(length).items() if inspect.isfunction(shape)}
    if name not in shapes:
        raise BadInput('reward.length_shaping', name, f"choose {', '.join(shapes)}, or ''")
    shape = _bind(name, shapes[name], section['options'], limit=max_tokens)
    margin = shape.keywords.get('margin', 1)
    if not 0 < margin < max_tokens:
        raise BadInput(
            f'reward.options.{name}.margin', margin, f'must lie between 0 and rollout.max_tokens = {max_tokens}'
        )
    return shape
