"""Calls a user's reward with the arguments that its parameters name, for one completion or for all of them."""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
from typing import Any

from grpo_jax.errors import BadInput
from grpo_jax.example import Example

# a function with one of these parameters takes a single completion
SINGLE = ('completion', 'text', 'example', 'solution_str')
# a function with one of these parameters takes all completions at once
PLURAL = ('completions', 'texts', 'examples', 'prompts', 'answers', 'ids', 'solution_strs')
FIELDS = ('prompt', 'answer', 'id', 'meta')  # of an example; a function of all completions gets lists of these
# names that verl has for a parameter, of one completion and of all, where the data set has no column of that name
ALIASES = {
    **{'solution_str': 'completion', 'ground_truth': 'answer', 'solution_strs': 'completions'},
    **{'ground_truths': 'answers', 'data_sources': 'data_source', 'extra_infos': 'extra_info'},
}
EMPTY = {'extra_info': {}}  # verl's value for a parameter whose column is missing
USUAL = (['completion', 'example'], ['completions', 'examples'])  # parameters for one completion, and for all


def bind_names(function: Callable, thing: str) -> Callable:
    """Wraps a user's function to take (completion, example, **options), or (completions, examples, **options).

    Each positional parameter gets what it names: a name in SINGLE, PLURAL or FIELDS, `truncated` (whether the budget
    ended before a stop token), or a column of the data set, which lies in example.meta; verl's names are ALIASES. A
    parameter with a default keeps the default where the data set has no such column. `**kwargs` gets the prompt, the
    completion, answer, id and all columns that no parameter names. The result's `columns` lists the columns that the
    data set must have. A function that takes these arguments already is returned as it is.

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
            'reward', thing, f'has parameters for one completion ({single[0]}) and for all ({plural[0]}); keep one kind'
        )
    batched = bool(plural) or (bool(var_keyword) and not single)
    named_arguments = {*names, *(p.name for p in options)}
    positional = [name for name in names if name == 'truncated']  # which the run supplies as a keyword
    result = _take_scores if {'solution_str', 'solution_strs'} & named_arguments else lambda value: value

    def arguments(completions: Any, examples: Any, known: dict[str, Any]):
        standard = _standard_arguments(completions, examples, batched) | known
        values = [_argument(p, standard, examples, batched, thing) for p in named]
        return values, _unnamed_arguments(standard, examples, batched, named_arguments) if var_keyword else {}

    if is_async(function):

        @functools.wraps(function)
        async def bound_coroutine(completion, example, **options):
            known = {name: options.pop(name) for name in positional}
            values, unnamed = arguments(completion, example, known)
            return result(await function(*values, **unnamed, **options))

        bound: Any = bound_coroutine
    else:

        @functools.wraps(function)
        def bound_function(completion, example, **options):
            known = {name: options.pop(name) for name in positional}
            values, unnamed = arguments(completion, example, known)
            return result(function(*values, **unnamed, **options))

        bound: Any = bound_function
    kind, supplied = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    own = [*(inspect.Parameter(n, kind) for n in USUAL[batched]), *(inspect.Parameter(n, supplied) for n in positional)]
    bound.__signature__ = inspect.Signature([*own, *options])
    needed = [ALIASES.get(p.name, p.name) for p in named if p.default is p.empty]
    bound.columns = [name for name in needed if name not in (*SINGLE, *PLURAL, *FIELDS, *EMPTY, *positional)]
    return bound


def _take_scores(value):
    """The score in a result of verl's compute_score: a dict's 'score', else the result; a list for a list."""
    if isinstance(value, (list, tuple)):
        return [_take_scores(member) for member in value]
    return value['score'] if isinstance(value, Mapping) and 'score' in value else value


def with_messages(function: Callable) -> Callable:
    """Wraps a reward so that it gets lists of messages instead of texts, as in TRL.

    function: of (completion, example), or of all completions and examples. A completion becomes one message of the
    assistant. An example's prompt becomes its messages, or one message of the user.
    """

    def as_messages(value):
        if isinstance(value, str):
            return [{'role': 'assistant', 'content': value}]
        if isinstance(value, Example):
            chat: Any = list(value.messages) or [{'role': 'user', 'content': value.prompt}]
            return value._replace(prompt=chat)
        return [as_messages(member) for member in value]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine_of_messages(completion, example, **options):
            return await function(as_messages(completion), as_messages(example), **options)

        return coroutine_of_messages

    @functools.wraps(function)
    def function_of_messages(completion, example, **options):
        return function(as_messages(completion), as_messages(example), **options)

    return function_of_messages


def is_async(function: Callable) -> bool:
    """Whether a call must be awaited: the function, or the object's __call__, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_supplied(thing: str, columns: Sequence[str], examples: Sequence[Example], own: bool = True):
    """Raises BadInput where an example lacks a column that the function called `thing` must have.

    own: whether `thing` is a function of the user's, which the message then asks to change.
    """
    for column in columns:
        for example in examples:
            if column in example.meta:
                continue
            if own:
                raise _missing_error(column, thing, example)
            lacking = f'reads the column {column!r} of the data, and example {example.id} has {_list_columns(example)}'
            raise BadInput('reward.parts', thing, f'{lacking}; choose a reward for these data, or data that have it')


def _select(parameters, kind):
    """The parameters of a kind, given by its name in inspect, like 'KEYWORD_ONLY'."""
    return [parameter for parameter in parameters if parameter.kind.name == kind]


def _standard_arguments(completions, examples, batched):
    """The arguments that need no column of the data, by name: completions, examples, and the examples' FIELDS."""
    if not batched:
        return {'completion': completions, 'text': completions, 'example': examples} | {
            name: getattr(examples, name) for name in FIELDS
        }
    fields = {name: [getattr(example, name) for example in examples] for name in FIELDS}
    plural = {f'{name}s': fields[name] for name in ('prompt', 'answer', 'id')}
    return {'completions': completions, 'texts': completions, 'examples': examples} | fields | plural


def _argument(parameter, standard, examples, batched, thing):
    """The argument for a parameter: from `standard`, a column or the default; raises BadInput without any of these."""
    name, default = parameter.name, parameter.default
    rows = examples if batched else [examples]
    if name in ALIASES and not all(name in example.meta for example in rows):
        name = ALIASES[name]
    if name in standard:
        return standard[name]
    if name in EMPTY and default is parameter.empty:
        default = EMPTY[name]
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
    """The BadInput which says that the example has no column for the parameter `name` of the function `thing`."""
    return BadInput(
        'reward',
        thing,
        f'has a parameter {name!r}, and example {example.id} no column of that name, only {_list_columns(example)}, '
        f'besides completion, example, {", ".join(FIELDS)}, or their plurals for all completions; rename it, give it a '
        'default, or make it a keyword-only option',
    )


def _list_columns(example):
    """The names of an example's columns as a text, shortened."""
    return f'{", ".join(sorted(map(str, example.meta))) or "no columns":.200}'
