"""Reads config.data, loads and tokenizes a data set's splits, and makes batches of prompts."""

from collections.abc import Callable, Mapping, Sequence
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import re
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple
import zlib

from jaxtyping import Int
import numpy as np

from grpo_jax import ranges, user_files
from grpo_jax.data import origin
from grpo_jax.data.prompt_format import (
    PromptFormat,
    check_chats,
    encode_prompt,
    fill_columns,
    make_bound,
    render_prompts,
)
from grpo_jax.data.records import MissingSplit, Unanswered, drop_malformed, shorten
from grpo_jax.data.turns import find_begun
from grpo_jax.errors import NO_VALUE, BadInput, Checks
from grpo_jax.ranges import Amendable, Count, Flat, Free, Kind, NoKey, Range, ReadWith, Text
from grpo_jax.types import Example, Prompts

logger = logging.getLogger('grpo_jax')
MOST_READ = 1000  # prompts in which a gold answer is looked for
MOST_AT_ONCE = 10_000  # rows of a split whose prompts are all encoded before the run
MOST_SHARED = 0.5  # share of the test prompts that the train split may have too; above it, they measure memory


class DataOptions(NamedTuple):
    """config.data as plain values."""

    name: Text = 'arithmetic'  # file in grpo_jax/data, or FILE.py of yours
    # Hugging Face data set, read where data.options.folder has no file of it; '': none
    path: Annotated[str, Kind.PATH] = ''
    # commit or tag of data.path, read also where the folder has files; '': the newest
    revision: Annotated[str, Kind.PATH] = ''
    options: Mapping[str, Any] = MappingProxyType({})  # arguments of the data set's examples()
    train_split: Text = 'train'  # split, or file of the data set, to learn from
    # split or file to be evaluated on; '': none, so that prompts of train_split are evaluated
    test_split: Annotated[str, ReadWith('!.held_out', words='data.held_out=0')] = 'test'
    # share of train_split that is evaluated on in place of test_split; a hash of a prompt's id decides
    held_out: Annotated[float, Range(least=0, below=1)] = 0.0
    prompts_per_step: Amendable[Count] = 32  # P, prompts of a step
    # passes over the train split, which set the number of steps; 0: the key steps sets it
    epochs: Free[Annotated[float, Range(least=0, most=1e6)]] = 0.0
    # Q, columns of a prompt; longer prompts are left out
    max_prompt_tokens: Annotated[int, Range(least=2, most=2**31 - 1)] = 64
    prompt_format: Flat[PromptFormat] = PromptFormat()
    written: NoKey[PromptFormat] = PromptFormat()  # prompt_format with its columns, which `load` fills
    strict: Free[bool] = False  # stop at the first malformed row; else malformed rows are left out and counted
    origins: NoKey[tuple[origin.Origin, ...]] = ()  # where each source is read from; () until `locate` has chosen

    @classmethod
    def from_config(cls, section: Any) -> 'DataOptions':
        """Reads config.data as DataOptions; raises BadInput for a value with which no data set could work."""
        values = ranges.read_section(cls, section, 'data')
        prompt_format = PromptFormat(**ranges.read_section(PromptFormat, section, 'data')).with_newlines()
        prompt_format.check()
        plain = prompt_format.without_columns()
        return cls(**values | {'options': dict(section['options']), 'prompt_format': plain, 'written': prompt_format})


class Tokens(Sequence):
    """The token ids of prompts, each encoded when it is first asked for."""

    def __init__(self, ids: list[list[int] | None], encode: Callable[[int], list[int]]):
        """ids: None where they are not known yet; encode: returns the ids of the prompt at a place in `ids`."""
        self._ids, self._encode = ids, encode

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, place):
        if self._ids[place] is None:
            self._ids[place] = self._encode(place)
        return self._ids[place]

    def pick(self, places: Sequence[int] | Int[np.ndarray, ' n']) -> 'Tokens':
        """The Tokens of the prompts at these places."""
        return Tokens([self._ids[place] for place in places], lambda place: self[places[place]])


class Dataset(NamedTuple):
    """Examples and their token ids, in the same order."""

    examples: list[Example]
    tokens: Sequence[list[int]]
    sources: tuple = ()  # of a mixture: for each source (weight, its examples' indices i64[n])
    split: str = ''  # train or test; of Splits.test it is train where a run has no test split
    read: Sequence[Example] = ()  # all Examples that were read, also those that were left out


class Splits(NamedTuple):
    """The data that a run learns from (train) and is evaluated on (test)."""

    train: Dataset
    test: Dataset


def locate(options: DataOptions, recorded: Sequence[origin.Origin] = ()) -> DataOptions:
    """Chooses the folder of each data set (see origin.choose_folder); returns options with folders and origins.

    recorded: the origins that the run began with. A data set that lies in no folder is fetched from the hub. No row is
    read. Raises BadInput for an option that a data set does not have or that is out of its range, and as
    origin.choose_folder does.
    """
    module, values = _import(options.name), options.options
    _check_options(module, values)
    if not hasattr(module, 'weights'):
        values, its_origin = origin.choose_folder(module, values, options.path, options.revision, *recorded)
        return options._replace(options=values, origins=(its_origin,))
    if options.path or options.revision:
        remedy = 'each source of a mixture has its own; leave these empty'
        raise BadInput('data.path, data.revision', (options.path, options.revision), remedy)
    module.weights(**values)  # refuses what cannot be mixed
    sources, origins = [], []
    for k, source in enumerate(values['sources']):
        path, revision = source.get('path', ''), source.get('revision', '')
        _check_options(_import(source['name']), source['options'])
        located, its_origin = origin.choose_folder(
            _import(source['name']), source['options'], path, revision, *recorded[k : k + 1]
        )
        sources.append({**source, 'options': located})
        origins.append(its_origin)
    return options._replace(options={'sources': sources}, origins=tuple(origins))


def load(options: DataOptions, split: str, tokenizer: Any, needs_answer: Callable = lambda example: True) -> Dataset:
    """Loads and tokenizes a split, 'train' or 'test', from the files that options.train_split or test_split names.

    needs_answer(example): whether a row without a gold answer is malformed. Malformed rows, and prompts longer than
    max_prompt_tokens, are left out, and a warning counts them. Raises MissingSplit for a split that is not there, and
    BadInput for the first malformed row if options.strict, when most rows are malformed, when no example of the split
    or of a mixture's source is left, and for options, ids or a chat template that do not work.
    """
    if not (named := source_of(options, split)):
        raise MissingSplit('data.test_split', '', 'names no split; name one, or set data.held_out')
    rows = examples(options.name, options.options, named)
    if not rows:
        folder = options.options.get('folder')
        given = ('examples', [*folder]) if isinstance(folder, Mapping) else ('data.options', options.options)
        remedy = f'gives no example of the {split} split ({named}); name another split, or change these options'
        raise MissingSplit(*given, remedy)
    read = examples_in(rows)
    rows = [row.example if isinstance(row, Unanswered) and not needs_answer(row.example) else row for row in rows]
    rows = fill_columns(options.written, rows)
    _check_examples(options.name, [row for row in rows if not isinstance(row, BadInput)])
    check_chats(tokenizer, options.prompt_format, (row for row in rows if not isinstance(row, BadInput)))
    longest = options.max_prompt_tokens
    encoded = drop_malformed(_encode(tokenizer, rows, options.prompt_format, split, longest), options.strict, split)
    sound, tokens = map(list, zip(*encoded, strict=True))
    fitting = [i for i, prompt in enumerate(tokens) if prompt is None or len(prompt) <= longest]
    if not fitting:
        raise BadInput(
            'data.max_prompt_tokens',
            longest,
            f'leaves no prompt of {len(tokens)} in the {split} split; raise it, since the shortest has '
            f'{min(map(len, tokens))} tokens',
        )
    if len(fitting) < len(tokens):
        logger.warning(
            '%d of %d %s prompts are longer than data.max_prompt_tokens=%d and left out',
            len(tokens) - len(fitting),
            len(tokens),
            split,
            longest,
        )

    def encode(place):
        where = f'example {sound[place].id} of the {split} split'
        ids = encode_prompt(tokenizer, sound[place].prompt, options.prompt_format, (), where)
        if len(ids) > longest:  # the tokenizer writes more tokens than characters
            raise BadInput(
                'data.max_prompt_tokens', longest, f'is less than the {len(ids)} tokens of {where}; raise it'
            )
        return ids

    dataset = pick(Dataset(sound, Tokens(tokens, encode) if None in tokens else tokens, split=split), fitting)
    if options.held_out:
        dataset = _hold_out(dataset, options.held_out)
    return dataset._replace(sources=_sources(options, dataset.examples), read=read)


def source_of(options: DataOptions, split: str) -> str:
    """The split or file that 'train' or 'test' is read from; train_split for both with held_out. Else `split`."""
    test = options.train_split if options.held_out else options.test_split
    return {'train': options.train_split, 'test': test}.get(split, split)


def examples_in(rows: Sequence[Example | BadInput]) -> list[Example]:
    """The Examples of a split's rows as `examples` gives them, also those without a gold answer."""
    rows = [row.example if isinstance(row, Unanswered) else row for row in rows]
    return [row for row in rows if isinstance(row, Example)]


def _hold_out(dataset, share):
    """The part of a Dataset that data.held_out gives its split: test has the held-out examples, train has the others.

    share: how much is held out; a hash of an example's id decides what. Equal prompts go with the first of them. Raises
    BadInput where no example is left.
    """
    ids: dict[tuple, int] = {}
    first = [ids.setdefault(key_of(example), example.id) for example in dataset.examples]
    held_out = [zlib.crc32(f'{i} is held out'.encode()) / 2**32 < share for i in first]
    kept = [i for i, held in enumerate(held_out) if held == (dataset.split == 'test')]
    if not kept:
        remedy = f'leaves none of {len(ids)} prompts for the split {dataset.split}; choose another share'
        raise BadInput('data.held_out', share, remedy)
    return pick(dataset, kept)


def _check_examples(name, rows):
    """Raises BadInput for a row that is no Example, and for ids that are not distinct or not in 0..2^31-1."""
    for row in rows:
        types = str, str, int, dict
        if not isinstance(row, Example) or not all(map(isinstance, row, types)):
            fields = 'whose prompt and answer are texts, the id an integer and meta a dict'
            raise BadInput('data.name', name, f'gives {shorten(row)!r} and not Examples {fields}; mend it')
    ids = {example.id for example in rows}
    if len(ids) < len(rows) or not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
        raise BadInput('data.name', name, 'has ids that are not distinct, or not in 0..2^31-1; number them from 0')


def _encode(tokenizer, rows, prompt_format, split, longest):
    """A list with (example, its prompt's token ids) for each row, or a BadInput if row or prompt is malformed.

    Of very many prompts, those that surely have at most `longest` tokens have None in place of their ids.
    """
    fits = make_bound(tokenizer, prompt_format, longest) if len(rows) > MOST_AT_ONCE else lambda text: False
    rendered: list[Any] = [None] * len(rows)  # the chat template's texts; None without a chat template
    chats = [i for i, row in enumerate(rows) if prompt_format.chat and not isinstance(row, BadInput)]
    for i, text in zip(chats, render_prompts(tokenizer, prompt_format, [rows[i] for i in chats]), strict=True):
        rendered[i] = text
    encoded = []
    for row, text in zip(rows, rendered, strict=True):
        if isinstance(row, BadInput):
            encoded.append(row)
            continue
        if fits(row.prompt):
            encoded.append((row, None))
            continue
        where = f'example {row.id} of the {split} split'
        try:
            tokens = encode_prompt(tokenizer, row.prompt, prompt_format, row.messages, where, text)
            continued = row.messages and row.messages[-1]['role'] == 'assistant'
            words = str(row.messages[-1]['content']) if continued else ''
            encoded.append((row._replace(begun=find_begun(tokenizer, tokens, words)), tokens))
        except BadInput as error:
            encoded.append(error.with_traceback(None))
    return encoded


def key_of(example: Example) -> tuple[str, str]:
    """A key to find equal prompts: two Examples have the same key exactly if their prompts and messages are equal."""
    return example.prompt, repr(example.messages) if example.messages else ''


def warn_of_count(train: Dataset, prompts_per_step: int) -> None:
    """Warns where a step has more prompts than the train split, so that it draws some of them twice or more."""
    count = len(train.examples)
    if prompts_per_step > count:
        text = 'data.prompts_per_step = %d is more than the %d prompts of the train split: a step draws some again'
        logger.warning(text, prompts_per_step, count)


def warn_of_prompts(train: Dataset) -> None:
    """Warns of equal prompts, of prompts that end with the assistant's words, and of gold answers inside prompts."""
    examples, count = train.examples, len(train.examples)
    of = f'of {count} prompts of the train split'
    first: dict[tuple, int] = {}
    equal = [(k, i) for i, example in enumerate(examples) if (k := first.setdefault(key_of(example), i)) < i]
    if equal:
        which = [examples[i].id for i in equal[0]]
        logger.warning('%d %s repeat another one, like examples %d and %d', len(equal), of, *which)
    begun = [e.id for e in examples if e.messages and e.messages[-1]['role'] == 'assistant']
    if begun:
        remedy = 'to imitate these words, set data.options.columns.demonstration to the field of the chat'
        ends = "end with the assistant's words, which completions continue"
        logger.warning('%d %s %s, like example %d; %s', len(begun), of, ends, begun[0], remedy)
    chosen = [examples[i] for i in spread(count, MOST_READ)]
    texts = [' '.join([e.prompt, *(m['content'] for m in e.messages)]) for e in chosen]
    golds = [re.escape(e.answer.strip()) for e in chosen]
    # a gold number may stand in a prompt by chance, which the next prompt shows
    own, others = (
        [bool(gold and re.search(rf'(?<!\w){gold}(?!\w)', text)) for gold, text in zip(golds, some, strict=True)]
        for some in (texts, texts[1:] + texts[:1])
    )
    if sum(own) > max(len(own) / 2, 2 * sum(others)):
        example = chosen[own.index(True)]
        remedy = 'where it is no choice among several, take it out'
        where = f'like {example.answer[:40]!r} in example {example.id}'
        logger.warning('the gold answer stands in %d of %d prompts, %s; %s', sum(own), len(own), where, remedy)


def check_shared(train: Dataset, test: Dataset) -> None:
    """Warns of test prompts that the train split has too; raises BadInput when their share exceeds MOST_SHARED."""
    if test.split == 'train':
        return
    seen = {*map(key_of, train.examples)}
    shared = [example for example in test.examples if key_of(example) in seen]
    if not shared:
        return
    which = f'{len(shared)} of {len(test.examples)} prompts of the test split'
    where = f'are in the train split, like example {shared[0].id}'
    if len(shared) > MOST_SHARED * len(test.examples):
        remedy = 'an evaluation would measure memory; take other data for one of the two'
        raise BadInput(which, NO_VALUE, f'{where}: {remedy}')
    logger.warning('%s %s', which, where)


def examples(name: str, options: Any, split: str) -> list[Example | BadInput]:
    """A split's Examples, with a BadInput in place of each malformed row. name, options: as in config.data.

    Raises BadInput for an unknown data set, for options that it does not take, and where it cannot read the split.
    """
    module, options = _import(name), dict(options)
    _check_options(module, options, whole=True)
    if not user_files.is_file(name):
        return module.examples(split, **options)
    with user_files.naming_line('data.name', name, name):
        return list(module.examples(split, **options))


def _check_options(module, options, whole=False):
    """Raises BadInput for each option that the module's `examples` does not take, and for each one out of its range.

    whole: an option that is missing is refused too; else `folder` may be added later.
    """
    parameters = inspect.signature(module.examples).parameters
    declared = dict([*parameters.items()][1:])  # without the split
    with Checks() as check:
        for name, value in options.items():
            if not any(p.kind is p.VAR_KEYWORD for p in declared.values()):
                check(ranges.check_declared, f'data.options.{name}', value, declared)
        needed = [name for name, p in declared.items() if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
        if whole and (missing := [name for name in needed if name not in options]):
            check.keep(BadInput('data.options', NO_VALUE, f'lacks {", ".join(missing)}; add what it lacks'))
        check(ranges.check, module.examples, options, 'data.options')


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a data set's `examples`, by name; raises BadInput for an unknown data set."""
    parameters = inspect.signature(_import(name).examples).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _import(name):
    """Imports a data set's module and returns it.

    name: a file of grpo_jax/data without '.py', or the path of a user's FILE.py. Raises BadInput if there is no such
    file, or if it has no function `examples`.
    """
    ranges.check_value('data.name', name, ranges.Text)
    if user_files.is_file(name):
        with user_files.naming_line('data.name', name, name):
            module = user_files.import_file(name) if os.path.isfile(name) else None
    else:
        path = f'grpo_jax.data.{name}'
        exists = name.isidentifier() and importlib.util.find_spec(path)
        module = importlib.import_module(path) if exists else None
    if module is None:
        file, _, function = name.rpartition(':')
        if os.path.isfile(file):
            remedy = f'a data set is a whole file, with a function examples(split, **options); leave out :{function}'
            raise BadInput('data.name', name, remedy)
        place = 'file' if user_files.is_file(name) else 'file in grpo_jax/data'
        raise BadInput(
            'data.name', name, f'no such {place}; add one with examples(split, **options), or name FILE.py of yours'
        )
    if not hasattr(module, 'examples'):
        raise BadInput('data.name', name, 'has no examples(split, **options); add this function, or name a data set')
    return module


def _sources(options, examples):
    """Dataset.sources for the examples; () for a data set without weights. Raises BadInput for an empty source."""
    module = _import(options.name)
    if not hasattr(module, 'weights'):
        return ()
    names, sources = np.array([example.meta['source'] for example in examples]), []
    for name, weight in module.weights(**options.options).items():
        sources.append((weight, np.flatnonzero(names == name)))
        if not len(sources[-1][1]):
            raise BadInput(
                'data.options.sources',
                name,
                f'has no example that fits data.max_prompt_tokens={options.max_prompt_tokens}; raise that, or leave '
                'the source out',
            )
    return tuple(sources)


class Contents(NamedTuple):
    """What a split holds: its length, and a SHA-256 of each of these parts of its examples."""

    rows: int
    prompts: str  # ids, prompts and chats
    answers: str
    columns: str  # meta


def contents_of(examples: Sequence[Example]) -> Contents:
    """The Contents of a split with these Examples."""
    parts = [(e.id, e.prompt, e.messages) for e in examples], [e.answer for e in examples], [e.meta for e in examples]
    return Contents(len(examples), *map(_hash, parts))


def changes_since(old: Contents, examples: Sequence[Example]) -> str:
    """A text that says how a split with these Examples differs from one with Contents `old`; '' if they are equal."""
    added, same = len(examples) - old.rows, contents_of(examples[: old.rows])
    other = [name for name in ('prompts', 'answers', 'columns') if getattr(same, name) != getattr(old, name)]
    if added < 0:
        return f'{-added} fewer'
    if 'prompts' in other:
        return 'other prompts, or the same in another order'
    return ' and '.join([f'{added} appended'] * bool(added) + [f'other {name}' for name in other[:1]])


def _hash(values):
    """The first 16 digits of a SHA-256 over a list of values, as JSON."""
    digest = hashlib.sha256()
    for start in range(0, len(values), 4096):
        block = values[start : start + 4096]
        try:
            text = json.dumps(block, default=_to_json)
        except (TypeError, ValueError):  # keys that JSON does not have, or values that hold themselves
            text = repr(_to_json(block))
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _to_json(value):
    """A JSON form, equal in every process, of a value that JSON does not have: a list, or a text without addresses."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return value.tolist() if hasattr(value, 'tolist') else re.sub(' at 0x[0-9a-f]+', '', repr(value))


def pick(dataset: Dataset, indices: Sequence[int] | Int[np.ndarray, ' n']) -> Dataset:
    """A Dataset of the examples with these indices; sources without an example are dropped."""
    sources = ((weight, np.flatnonzero(np.isin(indices, members))) for weight, members in dataset.sources)
    return Dataset(
        [dataset.examples[i] for i in indices],
        dataset.tokens.pick(indices) if isinstance(dataset.tokens, Tokens) else [dataset.tokens[i] for i in indices],
        tuple(source for source in sources if len(source[1])),
        dataset.split,
    )


def spread(count: int, most: int) -> Int[np.ndarray, ' n']:
    """At most `most` indices below `count`, evenly spaced and rising."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def prompts(
    dataset: Dataset,
    indices: Sequence[int] | Int[np.ndarray, ' P'],
    length: int,
    pad_token: int,
    thinking_start: str = '',
) -> tuple[list[Example], Prompts]:
    """(the examples with these indices, their Prompts, which are host arrays, left-padded to `length` columns).

    thinking_start: the text that opens thinking, for Prompts.thinking, which is None for ''.
    """
    tokens = np.full((len(indices), length), pad_token, np.int32)
    mask = np.zeros((len(indices), length), bool)
    for row, index in enumerate(indices):
        prompt_tokens = dataset.tokens[index]
        tokens[row, length - len(prompt_tokens) :] = prompt_tokens
        mask[row, length - len(prompt_tokens) :] = True
    batch_examples = [dataset.examples[index] for index in indices]
    ids = np.array([example.id for example in batch_examples], np.int32)
    thinking = np.array([e.begun.startswith(thinking_start) for e in batch_examples]) if thinking_start else None
    return batch_examples, Prompts(tokens, mask, ids, thinking=thinking)  # pyright: ignore[reportArgumentType]  # host arrays
