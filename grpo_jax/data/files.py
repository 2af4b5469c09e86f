"""Any data set in files: JSONL, JSON, CSV, Parquet, data sets of the hub, of `datasets` and of tensorflow-datasets."""

from collections.abc import Iterator, Mapping, Sequence
import glob
import os
import re
from types import MappingProxyType
from typing import Any

from grpo_jax.data import jsonl, tables
from grpo_jax.data.origin import PYTHON
from grpo_jax.data.records import (
    MissingSplit,
    Unanswered,
    chat_prompt,
    convert_rows,
    get_field,
    read_answer,
    read_completion,
    read_prompt,
    shorten,
)
from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.hosts import json_file
from grpo_jax.types import Example

READERS = {
    '.jsonl': jsonl.read,
    '.parquet': tables.read_parquet,
    '.arrow': tables.read_arrow,
    '.json': jsonl.read_list,
    '.csv': tables.read_csv,
    '.tsv': tables.read_csv,
}
FILES = ''
RECORDS = re.compile(r'(dataset_infos?|dataset_dict|state|features|config|README)\.\w+')  # files beside the data


def examples(
    split: str,
    *,
    folder: str | Mapping[str, Sequence],
    prompt_field: str = 'prompt',
    answer_field: str = 'answer',
    subset: str = '',
    columns: Mapping[str, str] = MappingProxyType({}),
    only: Mapping[str, Any] = MappingProxyType({}),
    without: Mapping[str, Any] = MappingProxyType({}),
) -> list[Example | BadInput]:
    """Reads a split from a folder, or from its subset (see rows); ids are row numbers, meta is the whole row.

    folder: also the rows themselves by split, dicts or Examples. prompt_field, answer_field: paths, see
    records.get_field; the prompt may be a chat, and is '' for prompt_field=''. A row without answer becomes Unanswered,
    and so does every row where answer_field is ''. columns: {name: path} of further columns, which rewards, `only` and
    `without` read. If the path of demonstration leads to a chat, its last message is the demonstration; if it is
    prompt_field too, the messages before are the prompt. only, without: {column: values} of rows to read, and of rows
    to leave out; values are a list, or a text like a|b.
    """

    def example(row, index, where):
        if isinstance(row, Example):
            return row
        meta = row | {name: get_field(row, path) for name, path in columns.items()}
        if not all(_matches(meta, *item) for item in only.items()) or any(_matches(meta, *i) for i in without.items()):
            return None
        prompt, messages = read_prompt(row, prompt_field, where) if prompt_field else ('', ())
        if path := columns.get('demonstration', ''):
            before, meta['demonstration'] = read_completion(row, path, where)
            if path == prompt_field and before:
                prompt, messages = chat_prompt(before, path, where)
        try:
            return Example(prompt, read_answer(row, answer_field, where), index, meta, messages)
        except BadInput as error:
            if str(get_field(row, answer_field) or '').strip():
                raise
            unanswered = Unanswered(*error.args)
            unanswered.example = Example(prompt, '', index, meta, messages)
            raise unanswered from None

    read = [row for row in convert_rows(example, rows(folder, split, subset=subset)) if row is not None]
    for name, path in columns.items():
        examples = [row.example if isinstance(row, Unanswered) else row for row in read]
        metas = [example.meta for example in examples if isinstance(example, Example)]
        if metas and all(meta[name] is None for meta in metas):
            raise BadInput(f'data.options.columns.{name}', path, f'is in no row; name one of {", ".join(metas[0])}')
    return read


def _matches(row, column, values):
    """Whether a row's value in a column is one of `values`, as texts."""
    values = values.split('|') if isinstance(values, str) else values if isinstance(values, (list, tuple)) else [values]
    return str(row.get(column)) in map(str, values)


def open_subset(folder: str, subset: str) -> str:
    """The path of a subset's subfolder; raises BadInput where there is none.

    A data set without subsets counts as the single subset `main` or `default`: for these and '', the folder itself is
    returned if it has no such subfolder.
    """
    for name in [subset] if subset else ['main', 'default']:
        if os.path.isdir(os.path.join(folder, name)):
            return os.path.join(folder, name)
    if subset not in ('', 'main', 'default'):
        raise BadInput(
            'data.options.subset', subset, f"{folder} has {_contents(folder)}; use a subfolder that is there, or ''"
        )
    return folder


def rows(
    folder: str | Mapping[str, Sequence], split: str, prefix: str = '', subset: str = ''
) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) for each row of a split: its place in words, and a dict or, if malformed, a BadInput.

    {split} in `folder` stands for the split's name. subset: a configuration of the hub, a subfolder. The folder has
    - <prefix><split>.jsonl, .json, .csv, .tsv, .parquet or .arrow, or the same without the prefix, in it or in data/
    - shards like <split>-00000-of-00002.parquet, in it or in data/
    - a folder <split> of such files
    - a Dataset or DatasetDict that `save_to_disk` wrote
    - files that tensorflow-datasets prepared
    - without prefix, one file or set of shards with the split's name in its own; or the only one, for the split train
    `split` may also be the name of a file in it, and `folder` a file: with {split} in its name, or the split train.
    A mapping has the rows of each split. Raises MissingSplit where the split is not there.
    """
    if isinstance(folder, Mapping):
        yield from _rows_of_python(folder, split)
        return
    if folder == PYTHON:
        takers = 'train.run, evaluate.open_subject, sample.run and sweep.run'
        remedy = f'came from Python: give them again as examples=, which {takers} take, or name a folder with them'
        raise BadInput('the rows of the run', NO_VALUE, remedy)
    path_of_split = folder.replace('{split}', split)
    if os.path.isfile(os.path.join(path_of_split, 'features.json')):
        yield from tables.read_prepared(path_of_split, split)
        return
    for path in _paths(path_of_split, split, prefix, path_of_split != folder, subset):
        reader = READERS.get(os.path.splitext(path)[1])
        if not reader:
            raise BadInput('data file', path, f'is none of {", ".join(READERS)}; convert it to one of these')
        yield from reader(path)


def _rows_of_python(examples, split):
    """Yields (where, row) for each row of a split that was handed to train.run."""
    if split not in examples:
        raise MissingSplit('examples', [*examples], f'have no split {split!r}; add its rows')
    for index, row in enumerate(examples[split]):
        where = f'examples[{split!r}][{index}]'
        if isinstance(row, Mapping):
            row = tables.to_plain(dict(row))
        elif not isinstance(row, Example):
            remedy = "must be a dict or an Example; for a DataFrame give frame.to_dict('records')"
            row = BadInput(where, shorten(row), remedy)
        yield where, row


def has_split(folder: str, split: str) -> bool:
    """Whether a folder has files whose names say that they belong to the split."""
    return bool(_paths_by_name(folder, split, ''))


def _paths(folder, split, prefix, one_split, subset):
    """The paths of a split's files, in order; raises MissingSplit without any, and BadInput where shards are missing.

    one_split: whether the folder's name has the split's in it, so that a Dataset in it may record another split's name.
    """
    if os.path.isfile(folder):
        if one_split or split in ('train', os.path.basename(folder)):
            return [folder]
        remedy = f'is one file for all splits, which is read as train, not {split}; name a folder, or write {{split}}'
        raise MissingSplit('data.options.folder', folder, remedy)
    folder = open_subset(folder, subset)
    for saved in (os.path.join(folder, split), folder):
        if os.path.isfile(os.path.join(saved, 'state.json')):
            return _saved_paths(saved, split, one_split or saved != folder)
    if os.path.isfile(os.path.join(folder, split)):
        return [os.path.join(folder, split)]
    if paths := _paths_by_name(folder, split, prefix) or ([] if prefix else _paths_by_word(folder, split)):
        shards = re.search(r'-of-(\d{5})', os.path.basename(paths[0]))
        if shards and int(shards[1]) != len(paths):
            raise BadInput(
                'data file', paths[0], f'is one of {int(shards[1])} shards, but {len(paths)} are there; fetch all'
            )
        return paths
    if not os.path.isdir(folder):
        where = f'no such folder in {os.getcwd()}; go where it is, or ' * (not os.path.isabs(folder))
        where = where or 'no such folder; ' if folder else 'names none; hand rows to train.run(examples=...), or '
        remedy = 'set data.options.folder or GRPO_JAX_DATA, or data.path to the id of a data set'
        raise BadInput('data.options.folder', folder, where + remedy)
    raise MissingSplit(
        'data.options.folder',
        folder,
        f'holds no {prefix}{split}.jsonl or .parquet, no shards of it, no folder of tensorflow-datasets or save_to_disk'
        f' (it has {_contents(folder)}); set data.options.folder or GRPO_JAX_DATA, name another split or file in '
        'data.train_split or data.test_split, or fetch all of it again',
    )


def _paths_by_word(folder, split):
    """The paths of the one file, or the one set of shards, whose name has the split as a word, like math-train.jsonl.

    Where no name has the word train, the split train is the only file or set of shards that names no other split. []
    where there is none; raises MissingSplit where several may be the split.
    """
    named = {}  # {name without shard and extension: paths}
    for parent in (folder, os.path.join(folder, 'data')):
        for path in sorted(glob.glob(os.path.join(glob.escape(parent), '*.*'))):
            stem, extension = os.path.splitext(os.path.basename(path))
            if extension in READERS and not RECORDS.fullmatch(os.path.basename(path)):
                named.setdefault(re.sub(r'-\d{5}-of-\d{5}.*', '', stem), []).append(path)
    words = {name: set(re.split(r'[\W_]+', name.lower())) for name in named}
    fitting = [name for name in named if split.lower() in words[name]]
    if not fitting and split == 'train':
        fitting = [name for name in named if not words[name] & {'test', 'validation', 'valid', 'val', 'dev', 'eval'}]
    if len(fitting) > 1:
        key = 'data.test_split' if split == 'test' else 'data.train_split'
        remedy = f'{", ".join(sorted(fitting))} may each be its split {split}; name one in {key}'
        raise MissingSplit('data.options.folder', folder, remedy)
    return named[fitting[0]] if fitting else []


def _paths_by_name(folder, split, prefix):
    """The paths of files that are named after the split, in order; [] without any."""
    for parent in (folder, os.path.join(folder, 'data')):
        for name in (prefix + split, split, f'{split}-?????-of-?????*', f'{split}/*'):
            for extension in READERS:
                paths = sorted(glob.glob(os.path.join(glob.escape(parent), name + extension)))
                if paths:
                    return paths
    return []


def _contents(folder):
    """A text that lists what is in a folder: its subfolders, and the first of its files."""
    names = sorted(os.listdir(folder))
    folders = [name for name in names if os.path.isdir(os.path.join(folder, name))]
    files = [name for name in names if name not in folders]
    text = f'the subfolders {", ".join(folders)}' if folders else 'no subfolders'
    return f'{text}, and {", ".join(files[:5])}{", ..." * (len(files) > 5)}' if files else text


def _saved_paths(folder, split, one_split):
    """The paths of the files of a Dataset that save_to_disk wrote.

    Raises BadInput where state.json names no files, or another split unless one_split.
    """
    path = os.path.join(folder, 'state.json')
    state = json_file.read_object(path, 'save the data set again')
    if not one_split and state.get('_split') != split:
        raise MissingSplit(
            'data.options.folder',
            folder,
            f'holds the split {state.get("_split")}, not {split}; save a DatasetDict, or write {{split}} in the name',
        )
    entries, names = state.get('_data_files'), []
    for entry in entries if isinstance(entries, list) else []:
        names.append(entry.get('filename') if isinstance(entry, dict) else None)
    if not names or not all(isinstance(name, str) for name in names):
        raise BadInput(path, shorten(entries), 'its _data_files must name the files; save the data set again')
    return [os.path.join(folder, str(name)) for name in names]
