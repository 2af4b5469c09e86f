"""Declares each setting in one place: allowed values, kind, default, and a comment with its meaning.

`chunk: Free[Natural] = 0  # tokens whose logits exist at once` is a field of an options type, a NamedTuple whose fields
are the keys of a config section. Numbers of pieces and options of rewards and data sets are keyword-only parameters in
the same form. `Annotated[float, Range(least=0)]`, or an alias like `NotNegative`, gives the allowed values; a text in
the annotation describes them in messages. Free, Amendable and Fixed give the kind; ReadWith, which other key a field
needs. Calls of such types and functions check nothing: `check` and `read_section` check a config's values.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
import dataclasses
import difflib
import enum
import functools
import inspect
import math
import operator
import re
import types
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from grpo_jax import coming_from
from grpo_jax.errors import NO_VALUE, UNMADE, BadInput, Checks

SMALLEST, LARGEST = 2.0**-126, 2.0**128 * (1 - 2.0**-24)  # normal float32 numbers: a run computes with float32
PLAIN = {int: 'a whole number', float: 'a number', str: 'a text', bool: 'True or False', type(None): 'None'}


@dataclasses.dataclass(frozen=True)
class Range:
    """An interval of numbers: `least` and `most` are inside, `above` and `below` are outside."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def holds(self, value: Any) -> bool:
        """Whether a number lies in the interval."""
        return bool(self.least <= value <= self.most and self.above < value < self.below)

    def __str__(self):
        ends = {'at least': self.least, 'above': self.above, 'at most': self.most, 'below': self.below}
        shown = {words: f'{end:g}' if isinstance(end, float) else str(end) for words, end in ends.items()}
        return ' and '.join(f'{words} {end}' for words, end in shown.items() if math.isfinite(ends[words]))


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A set of allowed values."""

    choices: Sequence[Any]

    def holds(self, value: Any) -> bool:
        """Whether a value is allowed."""
        return value in self.choices

    def __str__(self):
        *others, last = (str(choice) or "''" for choice in self.choices)
        return f'{", ".join(others)} or {last}' if others else last


@dataclasses.dataclass(frozen=True)
class Length:
    """Texts and sequences with `least` to `most` members."""

    least: int = 1
    most: float = math.inf

    def holds(self, value: Any) -> bool:
        """Whether the length of a text or sequence is allowed."""
        return self.least <= len(value) <= self.most

    def __str__(self):
        if self.least == self.most:
            return f'of {self.least}'
        return 'that is not empty' if self.most == math.inf else f'of {self.least} to {self.most}'


class Kind(enum.Enum):
    """Whether a started run may go on with another value of a key."""

    FREE = 'free'  # it goes on; floats differ in their last bits at most
    AMENDABLE = 'amendable'  # it goes on with --amend, recorded in events.jsonl
    PARTS = 'amendable in its weights, else fixed'
    PATH = 'free where it leads to the same content, else fixed'
    FIXED = 'fixed'  # only in a branch; the default kind
    INHERITED = 'fixed, in a branch too'


class Place(enum.Enum):
    """Marks a field that is no key of its section, or that stands for several keys."""

    NOWHERE = 'the field is no key: who makes the value gives it'
    HERE = "the field is an options type, whose keys stand among those of the field's own type"


@dataclasses.dataclass(frozen=True)
class ReadWith:
    """Marks a key, or all keys of a section, that a run reads only where another value allows it.

    others: one or more paths of such values, with blanks between; one value that allows it is enough. A path is
    'collection.dead_groups', '.dead_groups' in the same section, or a property of the options or of the Algorithm, like
    'algorithm.needs_values'. values: the values that allow it, or that a set must have one of. Without values, every
    value that is not empty allows it, or with a '!' before the path every empty one. words: what reads the key, for
    messages, where the path does not say it.
    """

    others: str
    values: tuple[Any, ...] = ()
    words: str = ''

    def holds(self, owners: Mapping[str, Any]) -> bool:
        """Whether the key is read; owners: {first part of a path: object with the rest}; a missing one is empty."""
        return any(self._allows(*path.removeprefix('!').partition('.'), '!' in path, owners) for path in self.paths)

    def _allows(self, owner, _, name, negated, owners):
        """Whether the value at the path `owner`.`name` allows that the key is read; negated: the path had a '!'."""
        value = operator.attrgetter(name)(owners[owner]) if owner in owners else None
        if not self.values:
            return bool(value) != negated
        return not {*(value if isinstance(value, Set) else [value])}.isdisjoint(self.values)

    @property
    def paths(self) -> list[str]:
        """The paths in `others`, as a list."""
        return self.others.split()

    def __str__(self):
        return self.words or f'{self.others}={" or ".join(map(str, self.values))}'.removesuffix('=')


T = TypeVar('T')
Free = Annotated[T, Kind.FREE]
Amendable = Annotated[T, Kind.AMENDABLE]
Fixed = Annotated[T, Kind.FIXED]
NoKey = Annotated[T, Place.NOWHERE]
Flat = Annotated[T, Place.HERE]

Natural = Annotated[int, Range(least=0, most=2**31 - 1)]  # int32 on devices
Count = Annotated[int, Range(least=1, most=2**31 - 1)]
NotNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(least=0, most=1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]
Coefficient = Annotated[float, Range(least=0, most=1e6)]  # of a term of the loss
Seconds = Annotated[float, Range(least=1e-3, most=1e7)]  # at most some months; a thread cannot wait for centuries
Gibibytes = Annotated[float, Range(least=1e-3, most=2**20)]
Text = Annotated[str, Length(1)]
Texts = Annotated[Sequence[Text], Length(1)]

_signature = functools.cache(inspect.signature)  # of options types: reading a config asks for them hundreds of times


def keys_of(declared: Callable) -> dict[str, inspect.Parameter]:
    """{key: its inspect.Parameter} of an options type: the keys that its section of the config has.

    A field marked Place.NOWHERE is left out, and a field marked Place.HERE is replaced by the keys of its own type. A
    key whose annotation is an options type is a section itself.
    """
    keys = {}
    for name, parameter in _signature(declared).parameters.items():
        place = _mark(parameter.annotation, Place)
        if place is Place.HERE:
            keys |= keys_of(type_of(parameter.annotation))
        elif place is None:
            keys[name] = parameter
    return keys


def marks_of(declared: Callable, name: str = '', outer: tuple[ReadWith, ...] = ()) -> dict[str, tuple[ReadWith, ...]]:
    """{dotted key: all ReadWiths that mark the key or a section around it}, for each key of an options type.

    declared: the options type; name: its dotted section, which paths like '.dead_groups' get at their beginning; outer:
    the ReadWiths of this section. A ReadWith does not mark the key that it looks at.
    """
    marks = {}
    for key, parameter in keys_of(declared).items():
        path, metadata = _join(name, key), get_args(parameter.annotation)[1:]
        own = [mark for mark in metadata if isinstance(mark, ReadWith)]
        own = [dataclasses.replace(mark, others=re.sub(r'(?<![^ !])\.', f'{name}.', mark.others)) for mark in own]
        own = tuple(mark for mark in (*outer, *own) if path not in mark.paths)
        options = type_of(parameter.annotation)
        marks |= marks_of(options, path, own) if options else {path: own}
    return marks


def kind_in(annotation: Any) -> Kind | None:
    """The Kind in an annotation; None without one."""
    return _mark(annotation, Kind)


def type_of(annotation: Any) -> Any:
    """The options type in an annotation, Annotated or not; None for another annotation."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return bare if hasattr(bare, '_fields') else None


def to_section(options: Any) -> dict[str, Any]:
    """The config section of an options value, as a nested dict; a function is replaced by its name."""
    section = {}
    for name, parameter in _signature(type(options)).parameters.items():
        value, place = getattr(options, name), _mark(parameter.annotation, Place)
        if place is Place.HERE:
            section |= to_section(value)
        elif place is None:
            section[name] = to_section(value) if hasattr(value, '_fields') else _to_plain(value)
    return section


def _to_plain(value):
    """A field's value in the form that configs have: names of functions, tuples for sets, dicts."""
    if callable(value):
        return value.__name__
    if isinstance(value, Set):
        return tuple(sorted(value))
    return dict(value) if isinstance(value, Mapping) else value


def read_options(declared: Callable, section: Any, name: str) -> Any:
    """Reads a section as an options type whose fields are all keys. Raises BadInput as `read_section` does."""
    return declared(**read_section(declared, section, name))


def read_section(declared: Callable, section: Any, name: str) -> dict[str, Any]:
    """{field: value} of an options type (`declared`), read from a config section and checked.

    name: the section's dotted name, for messages; '' for the whole config. Fields that are no keys, and fields that are
    sections, are left out. Raises BadInput for each missing key and each wrong value.
    """
    checked(declared, section, name, others=True)
    parameters = _signature(declared).parameters
    keys = [key for key, p in parameters.items() if _mark(p.annotation, Place) is None and not type_of(p.annotation)]
    return {key: section[key] for key in keys}


def checked(declared: Callable, section: Any, name: str, *, others: bool = False) -> Any:
    """Checks all keys of a section, and of the sections in it, and returns the section.

    declared, name: as in read_section; others: the section may have keys that its type does not declare. Raises
    BadInput for each missing key, each wrong value, and each key that is not declared.
    """
    take(section, (), name)
    keys = keys_of(declared)
    with Checks() as check:
        check(take, section, [*keys], name)
        for key, parameter in keys.items():
            if options := type_of(parameter.annotation):
                check(checked, options, section.get(key, UNMADE), _join(name, key))
            elif key in section:
                check(check_value, _join(name, key), section[key], parameter.annotation)
        for key in section if not others else ():
            check(check_declared, _join(name, key), section[key], keys)
    return section


def check_declared(path: str, value: Any, names: Iterable[str]) -> None:
    """Raises BadInput for a dotted key (path) whose last part is not in `names`; the message has the nearest name."""
    key = path.rpartition('.')[2]
    if key not in names:
        hint = coming_from.explain(path, str(value)) or nearest(key, names)
        raise BadInput(path, NO_VALUE if _is_mapping(value) else value, f'is no key; {hint}')


def nearest(name: str, names: Iterable[str]) -> str:
    """A remedy for an unknown name, as text: a question with the nearest of `names`, or all names to choose from."""
    near = difflib.get_close_matches(name, [*map(str, names)], 1)
    return f'did you mean {near[0]}?' if near else f'choose one of {", ".join(sorted(map(str, names)))}'


def take(section: Any, names: Sequence[str], name: str = '') -> dict[str, Any]:
    """{key: value} of a section's keys `names`, unchecked. Raises BadInput when section or keys are missing."""
    if not _is_mapping(section):
        raise BadInput(name or 'config', section, 'must be a section of keys')
    if missing := [_join(name, key) for key in names if key not in section]:
        are = 'are' if len(missing) > 1 else 'is'
        raise BadInput(', '.join(missing), NO_VALUE, f'{are} missing; begin with the keys of configs/default.py')
    return {key: section[key] for key in names}


def _join(name, key):
    """The dotted name of a key in the section `name`, which may be ''."""
    return f'{name}.{key}'.lstrip('.')


def check(declared: Callable, values: Any, section: str) -> None:
    """Raises BadInput for each value that the field or parameter of its name does not allow.

    declared: an options type or a function; values: {name: value}; section: its dotted name, for the message. Values
    without an annotation, or with one that only a user's file can resolve, may be anything. The fields of a parameter
    that is an options type are looked up in values too.
    """
    with Checks() as checks:
        for name, parameter in inspect.signature(declared).parameters.items():
            if options := type_of(parameter.annotation):
                checks(check, options, values, section)
            elif name in values:
                checks(check_value, f'{section}.{name}', values[name], parameter.annotation)


def check_value(key: str, value: Any, annotation: Any) -> None:
    """Raises BadInput for a value that the annotation does not allow. key: its dotted name, for the message."""
    if not _fits(value, annotation):
        raise BadInput(key, value, f'must be {in_words(annotation)}')


def check_finite(tree: Any, key: str = '') -> None:
    """Raises BadInput for each NaN and infinity in nested dicts and sequences. key: the dotted name of `tree`."""
    members: list[tuple[str, Any]] = []
    if _is_mapping(tree):
        members = [(_join(key, name), value) for name, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        members = [(key, value) for value in tree]
    with Checks() as checks:
        for path, value in members:
            checks(check_finite, value, path)
    if isinstance(tree, float) and not math.isfinite(tree):
        raise BadInput(key, tree, 'must be a finite number')


def in_words(annotation: Any) -> str:
    """The values that an annotation allows, in words, like 'a number at least 0'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, bounds = arguments[0], _bounds(arguments)
        whole = next((str(bound) for bound in bounds if isinstance(bound, (str, OneOf))), '')
        return whole or ' '.join([in_words(inner), *map(str, bounds)])
    if origin is Literal:
        return str(OneOf(arguments))
    if origin in (Union, types.UnionType):
        return ' or '.join(map(in_words, arguments))
    if origin is tuple and Ellipsis not in arguments:
        return f'a tuple ({", ".join(map(in_words, arguments))})'
    if _is_sequence(annotation):
        return 'a tuple' + (f', each {in_words(arguments[0])}' if arguments else '')
    return 'a section of keys' if _is_section(annotation) else PLAIN.get(annotation, 'a value')


def _fits(value, annotation):
    """Whether an annotation allows a value; an annotation that `in_words` does not know allows any."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _fits(value, arguments[0]) and all(isinstance(b, str) or b.holds(value) for b in _bounds(arguments))
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if _is_sequence(annotation):
        if not isinstance(value, (list, tuple, set, frozenset)):
            return False
        if origin is tuple and Ellipsis not in arguments:
            return len(value) == len(arguments) and all(map(_fits, value, arguments))
        return all(_fits(member, arguments[0]) for member in value) if arguments else True
    if _is_section(annotation):
        return _is_mapping(value)
    if annotation is float:
        if type(value) is bool or not isinstance(value, (int, float)):
            return False
        # float32 must not round it to infinity or 0
        return value == 0 or SMALLEST <= abs(value) <= LARGEST
    if annotation is int:
        return type(value) is not bool and isinstance(value, int)
    return isinstance(value, annotation) if isinstance(annotation, type) and annotation in PLAIN else True


def _bounds(arguments):
    """The arguments of an Annotated that restrict or describe values."""
    return [argument for argument in arguments[1:] if not isinstance(argument, (Kind, Place, ReadWith))]


def _mark(annotation, kind):
    """The outermost Kind or Place (`kind`: which of the two) in an annotation; None without one."""
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((mark for mark in reversed(marks) if isinstance(mark, kind)), None)


def _is_sequence(annotation):
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and kind is not str and issubclass(kind, (Sequence, list, tuple, set, frozenset))


def _is_section(annotation):
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _is_mapping(value):
    """Whether a value is a section of keys."""
    return isinstance(value, Mapping) or hasattr(value, 'items')  # a ConfigDict is no Mapping
