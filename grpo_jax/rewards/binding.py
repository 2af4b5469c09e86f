"""Rewards of a user bind by name: a positional parameter gets what it names, of one completion or of all."""

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any

from grpo_jax.errors import BadInput
from grpo_jax.example import Example

ONE = ('completion', 'text', 'example')  # that make a function one of a completion
ALL = ('completions', 'texts', 'examples', 'prompts', 'answers', 'ids')  # that make it one of all completions
FIELDS = ('prompt', 'answer', 'id', 'meta')  # of the example; in a function of all completions, lists of them
USUAL = (['completion', 'example'], ['completions', 'examples'])


def bind_names(function: Callable, thing: str) -> Callable:
    """The function as one of (completion, example), or of (completions, examples) with options by keyword.

    Its positional parameters get what they name: those of ONE, ALL and FIELDS, and columns of the data set, which lie
    in example.meta. `**kwargs` gets the prompt, the completion and all columns that no parameter names. A parameter
    with a default keeps it where there is no such column. BadInput, which calls the function `thing`, for a function
    of one completion and of all, and for one without a signature; when it is called, for a column that is not there.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise BadInput('reward', thing, 'is no function with a signature; give def NAME(completion, example)') from None
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest, options = _kinds(parameters, 'VAR_KEYWORD'), _kinds(parameters, 'KEYWORD_ONLY')
    names = [p.name for p in named]
    if (names in USUAL and not rest) or (not names and _kinds(parameters, 'VAR_POSITIONAL')):
        return function
    one, several = ([name for name in names if name in kind] for kind in (ONE, ALL))
    if one and several:
        raise BadInput(
            'reward', thing, f'names one completion ({one[0]}) and all ({several[0]}); choose one of the two'
        )
    batched = bool(several) or (bool(rest) and not one)

    def arguments(completions: Any, examples: Any):
        known = _known(completions, examples, batched)
        values = [_value(p, known, examples, batched, thing) for p in named]
        return values, _remaining(known, examples, batched, {*names, *(p.name for p in options)}) if rest else {}

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def bound_coroutine(completion, example, **given):
            values, others = arguments(completion, example)
            return await function(*values, **others, **given)

        bound: Any = bound_coroutine
    else:

        @functools.wraps(function)
        def bound_function(completion, example, **given):
            values, others = arguments(completion, example)
            return function(*values, **others, **given)

        bound: Any = bound_function
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    bound.__signature__ = inspect.Signature([*(inspect.Parameter(n, kind) for n in USUAL[batched]), *options])
    bound.columns = [p.name for p in named if p.default is p.empty and p.name not in (*ONE, *ALL, *FIELDS)]
    return bound


def check_supplied(thing: str, columns: Sequence[str], examples: Sequence[Example]):
    """BadInput where an example lacks a column that the function called `thing` must have."""
    for column in columns:
        for example in examples:
            if column not in example.meta:
                raise _missing(column, thing, example)


def _kinds(parameters, kind):
    return [parameter for parameter in parameters if parameter.kind.name == kind]


def _known(completions, examples, batched):
    """What names mean whatever the data set: texts, examples, and fields of the examples."""
    if not batched:
        return {'completion': completions, 'text': completions, 'example': examples} | {
            name: getattr(examples, name) for name in FIELDS
        }
    fields = {name: [getattr(example, name) for example in examples] for name in FIELDS}
    plural = {f'{name}s': fields[name] for name in ('prompt', 'answer', 'id')}
    return {'completions': completions, 'texts': completions, 'examples': examples} | fields | plural


def _value(parameter, known, examples, batched, thing):
    """What a parameter gets."""
    name, default = parameter.name, parameter.default
    if name in known:
        return known[name]
    rows = examples if batched else [examples]
    if not any(name in example.meta for example in rows) and default is not parameter.empty:
        return default
    lacking = next((example for example in rows if name not in example.meta), None)
    if lacking is not None and default is parameter.empty:
        raise _missing(name, thing, lacking)
    values = [example.meta.get(name, default) for example in rows]
    return values if batched else values[0]


def _remaining(known, examples, batched, taken):
    """What `**kwargs` gets: prompt, completion, answer and id, and the columns, None where an example lacks one."""
    names = ('prompts', 'completions', 'answer', 'id') if batched else ('prompt', 'completion', 'answer', 'id')
    rows = examples if batched else [examples]
    columns = dict.fromkeys(key for example in rows for key in example.meta)
    lists = {name: [example.meta.get(name) for example in rows] for name in columns}
    values = lists if batched else {name: column[0] for name, column in lists.items()}
    values |= {name: known[name] for name in names}
    return {name: value for name, value in values.items() if name not in taken}


def _missing(name, thing, example):
    columns = ', '.join(sorted(map(str, example.meta))) or 'no columns'
    return BadInput(
        'reward',
        thing,
        f'parameter {name!r} names nothing: example {example.id} has {columns:.200}, besides completion, example, '
        f'{", ".join(FIELDS)}, or the plurals of these for all completions; rename it, give it a default, or make it '
        'a keyword-only option',
    )
