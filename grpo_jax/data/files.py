"""Any data set in files: JSONL, JSON, Parquet, data sets of the hub, folders of `datasets` and tensorflow-datasets."""

from collections.abc import Iterator, Mapping, Sequence
import glob
import os
import re
from typing import Any

from grpo_jax.data import jsonl, tables
from grpo_jax.data.origin import PYTHON
from grpo_jax.data.records import Unanswered, convert_rows, get_field, read_prompt, shorten, text_field
from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.hosts import json_file
from grpo_jax.types import Example

READERS = {'.jsonl': jsonl.read, '.parquet': tables.read_parquet, '.arrow': tables.read_arrow, '.json': jsonl.read_list}
FILES = ''


def examples(
    split: str,
    *,
    folder: str | Mapping[str, Sequence],
    prompt_field: str = 'prompt',
    answer_field: str = 'answer',
    subset: str = '',
) -> list[Example | BadInput]:
    """Reads a split from a folder, or from its subset (see rows); ids are row numbers, meta is the whole row.

    folder: also the rows themselves by split, dicts or Examples.
    prompt_field, answer_field: 'a.b' is field b of field a; the prompt may be a chat. A row without answer becomes
    Unanswered, and so does every row where answer_field is ''.
    """

    def example(row, index, where):
        if isinstance(row, Example):
            return row
        prompt, messages = read_prompt(row, prompt_field, where)
        try:
            return Example(prompt, text_field(row, answer_field, where), index, row, messages)
        except BadInput as error:
            if str(get_field(row, answer_field) or '').strip():
                raise
            unanswered = Unanswered(*error.args)
            unanswered.example = Example(prompt, '', index, row, messages)
            raise unanswered from None

    return convert_rows(example, rows(folder if isinstance(folder, Mapping) else open_subset(folder, subset), split))


def open_subset(folder: str, subset: str, main: str = 'default') -> str:
    """The subfolder of a subset; raises BadInput where there is none.

    A data set without subsets counts as the single subset `main`: for `main` or '', the folder itself is returned if it
    has no subfolder of that name.
    """
    inside = os.path.join(folder, subset or main)
    if os.path.isdir(inside):
        return inside
    if subset not in ('', main):
        raise BadInput(
            'data.options.subset', subset, f"{folder} has {_subfolders(folder)}; use one that is there, or ''"
        )
    return folder


def rows(folder: str | Mapping[str, Sequence], split: str, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yields (where, row) for each row of a split, as grpo_jax.data.records says.

    {split} in `folder` stands for the split's name. The folder has one of
    - <prefix><split>.jsonl, .json, .parquet or .arrow, or the same without the prefix, in it or in data/
    - shards like <split>-00000-of-00002.parquet, in it or in data/
    - a folder <split> of such files
    - a Dataset or DatasetDict that `save_to_disk` wrote
    - files that tensorflow-datasets prepared
    `folder` may also be a file with {split} in its name. Raises BadInput where the split is not there.
    """
    if isinstance(folder, Mapping):
        yield from _rows_of_python(folder, split)
        return
    if folder == PYTHON:
        remedy = 'came from Python: call train.run(config, workdir, examples=...) with them, or name a folder with them'
        raise BadInput('the rows of the run', NO_VALUE, remedy)
    path_of_split = folder.replace('{split}', split)
    if os.path.isfile(os.path.join(path_of_split, 'features.json')):
        yield from tables.read_prepared(path_of_split, split)
        return
    has_split_in_name = path_of_split != folder
    if os.path.isfile(path_of_split) and not has_split_in_name:
        raise BadInput(
            'data.options.folder', folder, 'is one file for all splits; name a folder, or write {split} in the name'
        )
    whole_file = os.path.isfile(path_of_split)
    for path in [path_of_split] if whole_file else _paths(path_of_split, split, prefix, has_split_in_name):
        reader = READERS.get(os.path.splitext(path)[1])
        if not reader:
            raise BadInput('data file', path, f'is none of {", ".join(READERS)}; convert it to one of these')
        yield from reader(path)


def _rows_of_python(examples, split):
    """Yields (where, row) for each row of a split that was handed to train.run."""
    if split not in examples:
        raise BadInput('examples', [*examples], f'have no split {split!r}; add its rows')
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


def _paths(folder, split, prefix, one_split):
    """The paths of a split's files, in order; raises BadInput without any, and where shards are missing.

    one_split: whether the folder's name has the split's in it, so that a Dataset in it may record another split's name.
    """
    for saved in (os.path.join(folder, split), folder):
        if os.path.isfile(os.path.join(saved, 'state.json')):
            return _saved_paths(saved, split, one_split or saved != folder)
    paths = _paths_by_name(folder, split, prefix)
    if paths:
        shards = re.search(r'-of-(\d{5})', os.path.basename(paths[0]))
        if shards and int(shards[1]) != len(paths):
            raise BadInput(
                'data file', paths[0], f'is one of {int(shards[1])} shards, but {len(paths)} are there; fetch all'
            )
        return paths
    raise BadInput(
        'data.options.folder',
        folder,
        f'holds no {prefix}{split}.jsonl or .parquet, no shards of it, no folder of tensorflow-datasets or save_to_disk'
        f' (it has {_subfolders(folder)}); set data.options.folder or GRPO_JAX_DATA, or fetch all of it again'
        if os.path.isdir(folder)
        else 'no such folder; set data.options.folder or GRPO_JAX_DATA, or data.path to the id of a data set',
    )


def _paths_by_name(folder, split, prefix):
    """The paths of files that are named after the split, in order; [] without any."""
    for parent in (folder, os.path.join(folder, 'data')):
        for name in (prefix + split, split, f'{split}-?????-of-?????*', f'{split}/*'):
            for extension in READERS:
                paths = sorted(glob.glob(os.path.join(glob.escape(parent), name + extension)))
                if paths:
                    return paths
    return []


def _subfolders(folder):
    """A text that lists the folder's subfolders: 'the subfolders a, b', or 'no subfolders'."""
    names = sorted(os.path.basename(path[:-1]) for path in glob.glob(os.path.join(glob.escape(folder), '*/')))
    return f'the subfolders {", ".join(names)}' if names else 'no subfolders'


def _saved_paths(folder, split, one_split):
    """The paths of the files of a Dataset that save_to_disk wrote.

    Raises BadInput where state.json names no files, or another split unless one_split.
    """
    path = os.path.join(folder, 'state.json')
    state = json_file.read_object(path, 'save the data set again')
    if not one_split and state.get('_split') != split:
        raise BadInput(
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
