"""A user's own reward, FILE.py:NAME: plain functions run in worker processes, which are killed at a deadline.

An error in the file becomes BadInput that names the file's line.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
import contextlib
import functools
import inspect
import math
import os
from types import SimpleNamespace
from typing import Any

from grpo_jax import PACKAGE, user_files
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.rewards.binding import bind_names, is_async
from grpo_jax.workers import Pool

LEARNED = ('model', 'process')  # names of rewards that are reward models
COUNTED = (RecursionError, MemoryError, TimeoutError)  # these fail one completion and not the run: see rewards.scoring


class RewardError(BadInput):
    """Raised for an exception in a user's reward, and for a result that is no reward.

    At a run's first step the exit status is the one for bad input. Later it is AGAIN, since a service may have failed,
    and launchers then start the run again.
    """

    AGAIN = 47


class WrongResult(Exception):
    """Raised for a result that is no reward, no answer or no list of steps."""


def name_of(path: str) -> str:
    """A part's name in metrics and options: NAME for FILE.py:NAME, else the path itself."""
    return path.rpartition(':')[2]


def load_file(path: str, pool: Pool) -> SimpleNamespace:
    """Loads a user's file FILE.py:NAME; returns a namespace with reward, and with extract and steps if it has them.

    The reward runs in the pool's processes, unless it is asynchronous or takes all completions at once. Raises BadInput
    when the file cannot be imported or lacks the function. The returned functions raise BadInput for an exception in
    the file and for a result of the wrong type.
    """
    file, _, name = path.rpartition(':')
    file = user_files.find_file(file)
    if file is None:
        where = f'{os.getcwd()}, nor beside the config, nor in {PACKAGE}'
        raise BadInput('reward.parts', path, f'no such file in {where}; give FILE.py:NAME')
    with naming_line(path, file):
        module = user_files.import_file(file)
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput('reward.parts', path, f'{file} has no function {name}; add it, or name another')
    function = bind_names(function, path)
    guard = functools.partial(_guard, path=path, file=file)
    checks = {'extract': _check_answer, 'steps': _check_steps}
    extras = {key: guard(getattr(module, key), check) for key, check in checks.items() if hasattr(module, key)}
    batched = 'completions' in inspect.signature(function).parameters
    if batched or is_async(function):
        return SimpleNamespace(reward=guard(function, _check_numbers if batched else _check_number), **extras)

    @functools.wraps(function)
    def reward(completion, example, **options):
        return pool.call(run, path, os.path.abspath(file), (completion, example), options)

    return SimpleNamespace(reward=reward, **extras)


def run(path: str, file: str, arguments: tuple, options: dict) -> float | None:
    """Computes a user's reward in a worker process, which calls this function.

    path: FILE.py:NAME as the user gave it; file: the file's absolute path; arguments: (completion, example).
    """
    with naming_line(path, file):
        function = bind_names(getattr(_import_once(file), name_of(path)), path)
    guarded: Any = _guard(function, _check_number, path, file)
    return guarded(*arguments, **options)


def _guard(function, check, path, file, kinds=(Exception, SystemExit)) -> Callable:
    """Wraps a function: exceptions of `kinds` become RewardError (see naming_line), and check converts the result.

    check: (result, arguments) -> result, which may raise WrongResult.
    """
    if is_async(function):

        @functools.wraps(function)
        async def guarded_coroutine(*arguments, **options):
            with naming_line(path, file, function, kinds, arguments[1:]):
                return check(await function(*arguments, **options), arguments)

        return guarded_coroutine

    @functools.wraps(function)
    def guarded(*arguments, **options):
        with naming_line(path, file, function, kinds, arguments[1:]):
            return check(function(*arguments, **options), arguments)

    return guarded


def check_results(function: Callable, name: str) -> Callable:
    """Wraps a part's function: a result that is no reward raises RewardError, which names the function's first line.

    Exceptions of the function itself pass unchanged. name: of the part, for the message.
    """
    batched = 'completions' in inspect.signature(function).parameters
    code = getattr(inspect.unwrap(function), '__code__', None)
    file = code.co_filename if code else 'a function without a file'
    return _guard(function, _check_numbers if batched else _check_number, name, file, kinds=WrongResult)


@contextlib.contextmanager
def naming_line(
    path: str,
    file: str,
    function: Callable | None = None,
    kinds: Any = (Exception, SystemExit),
    judged: Sequence[Any] = (),
) -> Iterator[None]:
    """Inside this context, an exception of `kinds` becomes a RewardError that names the line of the user's file.

    Exceptions in COUNTED, and BadInput, pass unchanged. path: FILE.py:NAME as the user gave it; file: the file of the
    function; function: its first line is named when no user's file is in the traceback; judged: the Example that it
    was called with, which is named too.
    """
    try:
        yield
    except (*COUNTED, BadInput):
        raise
    except kinds as error:
        code = getattr(inspect.unwrap(function), '__code__', None) if function else None
        first = getattr(code, 'co_firstlineno', None)
        if isinstance(error, WrongResult):
            line = ': '.join([f'{file}, line {first}' if first else file, str(error)])
        else:
            source = user_files.place_of(error, file, first)[2][: user_files.LONGEST]
            line = user_files.explain(error, file, first) + f', in `{source}`' * bool(source)
        line += ''.join(f' (example {example.id})' for example in judged if isinstance(example, Example))
        is_message = isinstance(error, TypeError) and 'string indices' in line
        remedy = "completions are texts: set reward.completions='messages'" if is_message else 'mend the file'
        raise RewardError('reward', path, f'{line}; {remedy}') from error


def _check_number(value, _) -> float | None:
    """A reward as a float, or None; NaN passes. Raises WrongResult for an infinity and for anything but a number."""
    if value is None:
        return None
    with contextlib.suppress(Exception):  # whatever a user's class raises
        # float() would accept texts, arrays of one number, and the real part of a complex number
        scalar = not isinstance(value, (str, bytes, bytearray)) and getattr(value, 'ndim', 0) == 0
        if scalar and 'complex' not in str(getattr(value, 'dtype', '')) and not math.isinf(number := float(value)):
            return number
    raise WrongResult(f'returned {_describe(value)}, and a reward is a finite number, or None where it cannot tell')


def _check_numbers(values, arguments) -> list[float | None]:
    """The rewards as floats or None; raises WrongResult unless there is one for each completion in arguments[0]."""
    count = len(arguments[0])
    with contextlib.suppress(TypeError):
        if len(values) == count and not isinstance(values, (str, bytes, Mapping, Set)):
            return [_check_number(value, ()) for value in values]
    raise WrongResult(f'returned {_describe(values)}, and not a list of {count} rewards, one a completion')


def _check_answer(answer, _) -> str | None:
    """An extracted answer, unchanged; raises WrongResult for anything but text and None."""
    if answer is None or isinstance(answer, str):
        return answer
    raise WrongResult(f'returned {_describe(answer)}, and an answer is a text, or None where there is none')


def _check_steps(steps, arguments) -> list:
    """The pairs (end, reward) of one completion's steps, or a list of such pairs for each completion.

    Raises WrongResult for anything else. arguments: of the call that gave `steps`; completions are the first.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(arguments[0], str):
            return [_check_steps(row, [text]) for text, row in zip(arguments[0], steps, strict=True)]
        pairs = [(int(end), float(value)) for end, value in steps]
        if all(math.isfinite(value) for _, value in pairs):
            return pairs
    raise WrongResult(f'returned {_describe(steps)}, and steps have pairs (end in characters, finite reward)')


def _describe(value):
    """The first 80 characters of repr(value); its type where repr fails."""
    with contextlib.suppress(Exception):
        return f'{value!r:.80}'
    return f'a {type(value).__name__}'


_import_once = functools.cache(user_files.import_file)  # a worker keeps the file as it first read it
