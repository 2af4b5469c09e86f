"""Pieces: plain functions whose positional parameters name the data they read.

A surrogate that reads ratio and advantages is `def mine(ratio, advantages): ...`. The caller passes the data that
parameters name, and computes no other. Keyword-only parameters are numbers: config.algorithm's key of the same name
replaces the default in the signature. Whatever else a run must know of a piece are its properties (PROPERTIES), which
the decorator `properties` sets.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import difflib
import functools
import hashlib
import inspect
import math
from types import ModuleType
from typing import Any

from jaxtyping import Float

from grpo_jax import __version__, coming_from, user_files
from grpo_jax.errors import BadInput
from grpo_jax.types import Array

Advantages = Float[Array, 'B #C']

# property of a piece -> its value for a piece that does not set it
PROPERTIES = {
    'by_token': None,  # an advantage differs by token; None: it may, if the piece reads data by token
    'alone': False,  # an advantage needs no other completion of the prompt
    'unrewarded': False,  # an advantage is the same whatever the reward, also for an unscorable completion
    'over_batch': False,  # an advantage normalizes over the groups of a batch
    'nonnegative': False,  # an advantage needs outcomes of at least 0
    'bounded': False,  # a surrogate keeps the policy near the ratio's base
    'row_mean': False,  # a ratio is exp of a row's mean; at ratio 1 its gradient equals the gradient of ratio token
    'bounds': None,  # what a correction bounds: 'token', a token's rho; 'row', a row's product; 'one': it is 1 or 0
    'margin': None,  # of a surrogate of pairs: a function of data that returns each row's pair margin, f32[B]
    'near_one': False,  # a ratio lies within some 1e-3 of 1
    'suits_weights': None,  # the weights that a ratio of whole rows is meant for
    'clamped_at': math.inf,  # value above which a KL estimator is clamped
    'acts_on': None,  # the tokens bool[B, C] that a regularizer is a mean over, as a function of data; None: all
    'zero_at_first': False,  # a regularizer is 0 while the policy is the old one
}
# data with a number for each token
BY_TOKEN = {
    'mask',
    'completion_mask',
    'tokens',
    'token_rewards',
    'step_rewards',
    'sampler_logprobs',
    'old_entropy',
    'values',
    'kl',
    'teacher_logprobs',
}


class Inputs(Mapping[str, Any]):
    """Data by name. A function without arguments stands for its value: it is called once, when the value is read."""

    def __init__(self, data: Mapping[str, Any]):
        self._data = dict(data)

    def __getitem__(self, name: str) -> Any:
        if name in self._data and callable(self._data[name]):
            self._data[name] = self._data[name]()
        return self._data[name]

    def __contains__(self, name: object) -> bool:
        return name in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __or__(self, other: Mapping[str, Any]) -> 'Inputs':
        return Inputs(self._data | dict(other))


def properties(**values: Any) -> Callable[[Callable], Callable]:
    """Returns a decorator that sets these properties of a piece. Raises TypeError for a name that PROPERTIES lacks."""

    for name in values:
        if name not in PROPERTIES:
            raise TypeError(f'{name} is no property of pieces; they are {", ".join(PROPERTIES)}')

    def write(piece):
        vars(piece).update(values)
        return piece

    return write


def property_of(piece: Callable, name: str) -> Any:
    """The value of a piece's property `name`, or its default in PROPERTIES; the piece may be a functools.partial."""
    while isinstance(piece, functools.partial):
        piece = piece.func
    return getattr(piece, name, PROPERTIES[name])


def is_by_token(advantage: Callable) -> bool:
    """Whether an advantage has a column for each token: property by_token; if None, whether it reads BY_TOKEN data."""
    by_token = property_of(advantage, 'by_token')
    return bool(BY_TOKEN & {*reads(advantage)}) if by_token is None else by_token


def compares_outcomes(advantage: Callable) -> bool:
    """Whether an advantage compares the outcomes of a group's completions, so that a dead group teaches nothing."""
    return not property_of(advantage, 'alone') and 'step_rewards' not in reads(advantage)


def choose(module: ModuleType, key: str, name: str, section: Any) -> Callable:
    """The piece `name` of a module, or FILE.py:NAME of a user, with its numbers bound to the section's keys.

    key: the config key that names the piece, for messages. Raises BadInput for an unknown name, and for a number that
    neither its signature nor the section gives.
    """
    choices = list_pieces(module)
    if user_files.is_file(name):
        piece = user_files.load_function(f'algorithm.{key}', name)
    elif name in choices:
        piece = choices[name]
    elif ':' in name:
        remedy = 'is a function without a file; pass the Algorithm as algorithm=, or write FILE.py:NAME'
        raise BadInput(f'algorithm.{key}', name, remedy)
    else:
        near = difflib.get_close_matches(name, choices, 3)
        hint = f'; did you mean {" or ".join(near)}?' if near else ''
        theirs = coming_from.explain_value(f'algorithm.{key}', str(name).lower())
        remedy = theirs or f'choose one of {", ".join(sorted(choices))}, or give FILE.py:NAME of yours{hint}'
        raise BadInput(f'algorithm.{key}', name, remedy)
    bound = {number: section[number] for number in numbers(piece) if number in section}
    if lacking := [number for number, value in (numbers(piece) | bound).items() if value is inspect.Parameter.empty]:
        raise BadInput(f'algorithm.{key}', name, f'its number {lacking[0]} has no default; give it one')
    return functools.partial(piece, **bound) if bound else piece


def list_pieces(module: ModuleType) -> dict[str, Callable]:
    """The pieces of a module by name: all public functions that it defines itself."""
    return {
        name: piece
        for name, piece in vars(module).items()
        if inspect.isfunction(piece) and piece.__module__ == module.__name__ and not name.startswith('_')
    }


def reads(piece: Callable) -> list[str]:
    """The names of the data that a piece reads, in the order of its parameters."""
    return [name for name, p in _parameters(piece).items() if p.kind is p.POSITIONAL_OR_KEYWORD]


def numbers(piece: Callable) -> dict[str, Any]:
    """A piece's numbers by name, each with the value bound to it, else its default, else inspect.Parameter.empty."""
    return {name: p.default for name, p in _parameters(piece).items() if p.kind is p.KEYWORD_ONLY}


@functools.lru_cache(1024)  # a start asks for the signatures of all pieces again and again
def _parameters(piece):
    return inspect.signature(piece).parameters


def name_of(piece: Callable) -> str:
    """The name of the piece's function, also where numbers are bound to it."""
    return getattr(piece, 'func', piece).__name__


def is_own(piece: Callable) -> bool:
    """Whether a piece is a user's function, of a file or a notebook, and not of this package."""
    return not str(getattr(getattr(piece, 'func', piece), '__module__', '')).startswith('grpo_jax.')


def describe(piece: Callable) -> dict[str, str]:
    """What a run records of a piece: its name and module or file, and for a user's piece the SHA-256 of its source.

    The SHA-256 is of the whole file if a config names the file, else of the function's source and of the plain values
    that the function reads.
    """
    function: Any = getattr(piece, 'func', piece)
    name, module = getattr(function, '__name__', type(function).__name__), str(getattr(function, '__module__', ''))
    if not is_own(piece):
        return {'name': name, 'module': module, 'version': __version__}
    function = inspect.unwrap(function)
    file = getattr(function, '__globals__', {}).get('__file__', '')
    if user_files.is_imported(file):
        return {'name': name, 'file': file, 'sha256': user_files.digest(file)}
    source, values = '', list[tuple[Any, Any]](enumerate(getattr(piece, 'args', ())))
    with contextlib.suppress(OSError, TypeError):  # no file or cell may have it
        source = inspect.getsource(function)
    if inspect.isfunction(function):
        read, code = inspect.getclosurevars(function), function.__code__
        values += sorted({**read.globals, **read.nonlocals}.items())
        values += enumerate([] if source else [code.co_code.hex(), *code.co_names, *code.co_consts])
    source += repr([(name, value) for name, value in values if isinstance(value, (int, float, str))])
    return {'name': name, 'module': module, 'sha256': hashlib.sha256(source.encode()).hexdigest()}


def full_name(piece: Callable) -> str:
    """The name of a piece in a config: NAME for a piece of this package, else FILE.py:NAME or MODULE:NAME."""
    described = describe(piece)
    place = described.get('file') or described['module']
    return f'{place}:{described["name"]}' if is_own(piece) else described['name']


def is_as_written(piece: Callable, name: str) -> bool:
    """Whether a piece is the package's own piece `name`, with all its numbers at their defaults."""
    return not is_own(piece) and name_of(piece) == name and numbers(piece) == numbers(getattr(piece, 'func', piece))


def call(piece: Callable, data: Mapping[str, Any]) -> Any:
    """Calls a piece with the data that its parameters name; raises TypeError if data lacks one of them."""
    inputs = data if isinstance(data, Inputs) else Inputs(data)
    missing = [name for name in reads(piece) if name not in inputs]
    if missing:
        raise TypeError(f'{name_of(piece)} reads {missing[0]}, and there is only {", ".join(sorted(inputs))}')
    return piece(*(inputs[name] for name in reads(piece)))
