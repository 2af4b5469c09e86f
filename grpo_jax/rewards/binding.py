"""Calls a user's reward with the arguments that its parameters name, for one completion or for all of them."""

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any

from grpo_jax.errors import BadInput
from grpo_jax.example import Example

# a function with one of these parameters takes a single completion
SINGLE = ('completion', 'text', 'example')
# a function with one of these parameters takes all completions at once
PLURAL = ('completions', 'texts', 'examples', 'prompts', 'answers', 'ids')
FIELDS = ('prompt', 'answer', 'id', 'meta')  # of the example; a function of all completions gets lists of them
USUAL = (['completion', 'example'], ['completions', 'examples'])  # by whether it takes all completions


def bind_names(function: Callable, thing: str) -> Callable:
    """Wraps a user's function to take (completion, example, **options), or (completions, examples, **options).

    Each positional parameter gets what it names: a name in SINGLE, PLURAL or FIELDS, or a column of the data set, which
    lies in example.meta. A parameter with a default keeps the default where the data set has no such column. `**kwargs`
    gets the prompt, the completion, answer, id and all columns that no parameter names. The result's `columns` lists
    the columns that the data set must have. A function that takes these arguments already is returned as it is.

    Raises BadInput, which calls the function `thing`, for a function without a signature and for one whose parameters
    name both a single completion and all. The returned function raises BadInput when an example lacks a column.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise BadInput('reward', thing, 'is no function with a signature; give def NAME(completion, example)') from None
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    var_keyword, options = _select(parameters, 'VAR_KEYWORD'), _select(parameters, 'KEYWORD_ONLY')
    names = [p.name for p in named]
    if (names in USUAL and not var_keyword) or (not names and _select(parameters, 'VAR_POSITIONAL')):
        return function
    single, plural = ([name for name in names if name in kind] for kind in (SINGLE, PLURAL))
    if single and plural:
        raise BadInput(
            'reward', thing, f'names one completion ({single[0]}) and all ({plural[0]}); choose one of the two'
        )
    batched = bool(plural) or (bool(var_keyword) and not single)
    named_arguments = {*names, *(p.name for p in options)}

    def arguments(completions: Any, examples: Any):
        standard = _standard_arguments(completions, examples, batched)
        values = [_argument(p, standard, examples, batched, thing) for p in named]
        return values, _unnamed_arguments(standard, examples, batched, named_arguments) if var_keyword else {}

    if is_async(function):

        @functools.wraps(function)
        async def bound_coroutine(completion, example, **options):
            values, unnamed = arguments(completion, example)
            return await function(*values, **unnamed, **options)

        bound: Any = bound_coroutine
    else:

        @functools.wraps(function)
        def bound_function(completion, example, **options):
            values, unnamed = arguments(completion, example)
            return function(*values, **unnamed, **options)

        bound: Any = bound_function
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    bound.__signature__ = inspect.Signature([*(inspect.Parameter(n, kind) for n in USUAL[batched]), *options])
    bound.columns = [p.name for p in named if p.default is p.empty and p.name not in (*SINGLE, *PLURAL, *FIELDS)]
    return bound


def is_async(function: Callable) -> bool:
    """Whether a call of the function, or of the object, must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_supplied(thing: str, columns: Sequence[str], examples: Sequence[Example]):
    """Raises BadInput where an example lacks a column that the function called `thing` must have."""
    for column in columns:
        for example in examples:
            if column not in example.meta:
                raise _missing_error(column, thing, example)


def _select(parameters, kind):
    """The parameters of a kind, given by its name in inspect, like 'KEYWORD_ONLY'."""
    return [parameter for parameter in parameters if parameter.kind.name == kind]


def _standard_arguments(completions, examples, batched):
    """The arguments that every data set has, by name: completions, examples, and fields of the examples."""
    if not batched:
        return {'completion': completions, 'text': completions, 'example': examples} | {
            name: getattr(examples, name) for name in FIELDS
        }
    fields = {name: [getattr(example, name) for example in examples] for name in FIELDS}
    plural = {f'{name}s': fields[name] for name in ('prompt', 'answer', 'id')}
    return {'completions': completions, 'texts': completions, 'examples': examples} | fields | plural


def _argument(parameter, standard, examples, batched, thing):
    """The argument for a parameter: a standard one, a column, or its default; raises BadInput where there is none."""
    name, default = parameter.name, parameter.default
    if name in standard:
        return standard[name]
    rows = examples if batched else [examples]
    if not any(name in example.meta for example in rows) and default is not parameter.empty:
        return default
    lacking = next((example for example in rows if name not in example.meta), None)
    if lacking is not None and default is parameter.empty:
        raise _missing_error(name, thing, lacking)
    values = [example.meta.get(name, default) for example in rows]
    return values if batched else values[0]


def _unnamed_arguments(standard, examples, batched, named):
    """The arguments for `**kwargs`: prompt, completion, answer, id and columns, except those in `named`.

    A column is None for an example that lacks it.
    """
    names = ('prompts', 'completions', 'answer', 'id') if batched else ('prompt', 'completion', 'answer', 'id')
    rows = examples if batched else [examples]
    columns = dict.fromkeys(key for example in rows for key in example.meta)
    lists = {name: [example.meta.get(name) for example in rows] for name in columns}
    values = lists if batched else {name: column[0] for name, column in lists.items()}
    values |= {name: standard[name] for name in names}
    return {name: value for name, value in values.items() if name not in named}


def _missing_error(name, thing, example):
    """The BadInput for a parameter `name` of the function `thing` that no column of the example's fills."""
    columns = ', '.join(sorted(map(str, example.meta))) or 'no columns'
    return BadInput(
        'reward',
        thing,
        f'has a parameter {name!r}, and example {example.id} no column of that name, only {columns:.200}, besides '
        f'completion, example, {", ".join(FIELDS)}, or their plurals for all completions; rename it, give it a '
        'default, or make it a keyword-only option',
    )
