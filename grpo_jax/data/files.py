"""Any data set in files: JSONL, JSON, Parquet, data sets of the hub, folders of `datasets` and tensorflow-datasets."""

from collections.abc import Iterator
import glob
import os
import re
from typing import Any

from grpo_jax.data import jsonl, tables
from grpo_jax.data.records import Unanswered, convert_rows, get_field, read_prompt, shorten, text_field
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.types import Example

READERS = {'.jsonl': jsonl.read, '.parquet': tables.parquet, '.arrow': tables.arrow, '.json': jsonl.read_list}
FILES = ''


def examples(
    split: str, *, folder: str, prompt_field: str = 'prompt', answer_field: str = 'answer', subset: str = ''
) -> list[Example | BadInput]:
    """Examples of a split of a folder, or of its subset, see rows; ids are row numbers, meta is the whole row.

    A field 'a.b' is field b of field a; the prompt may be a chat. A row without answer is Unanswered, and so are all
    rows where answer_field is ''.
    """

    def example(row, index, where):
        prompt, messages = read_prompt(row, prompt_field, where)
        try:
            return Example(prompt, text_field(row, answer_field, where), index, row, messages)
        except BadInput as error:
            if str(get_field(row, answer_field) or '').strip():
                raise
            unanswered = Unanswered(*error.args)
            unanswered.example = Example(prompt, '', index, row, messages)
            raise unanswered from None

    return convert_rows(example, rows(open_subset(folder, subset), split))


def open_subset(folder: str, subset: str, main: str = 'default') -> str:
    """The subfolder of a subset, as a data set of the hub has one for each; BadInput where there is none.

    Data sets without subsets are one, `main`: for that or '', it is the folder itself where it has no such subfolder.
    """
    inside = os.path.join(folder, subset or main)
    if os.path.isdir(inside):
        return inside
    if subset not in ('', main):
        raise BadInput('data.options.subset', subset, f'{folder} has no such subfolder, only {_subfolders(folder)}')
    return folder


def rows(folder: str, split: str, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yields (where, row) of a split, as grpo_jax.data.records says; {split} in the folder's name stands for the split.

    The folder has <prefix><split>.jsonl, .json, .parquet or .arrow, or without the prefix, or shards like
    <split>-00000-of-00002.parquet, here or in data/; or a folder <split> of files; or what `save_to_disk` wrote of a
    Dataset or a DatasetDict; or what tensorflow-datasets prepared. `folder` may also be a file, with {split} in its
    name.
    """
    place = folder.replace('{split}', split)
    if os.path.isfile(os.path.join(place, 'features.json')):
        yield from tables.prepared(place, split)
        return
    own = place != folder  # of the split alone
    if os.path.isfile(place) and not own:
        raise BadInput(
            'data.options.folder', folder, 'is one file for all splits; name a folder, or write {split} in the name'
        )
    for path in [place] if os.path.isfile(place) else _paths(place, split, prefix, own):
        reader = READERS.get(os.path.splitext(path)[1])
        if not reader:
            raise BadInput('data file', path, f'is none of {", ".join(READERS)}')
        yield from reader(path)


def has_split(folder: str, split: str) -> bool:
    """Whether a folder has files of a split by their names."""
    return bool(_named(folder, split, ''))


def _paths(folder, split, prefix, own):
    """The files of a split, in order; BadInput without any, and where they are shards and some are missing."""
    for saved in (os.path.join(folder, split), folder):
        if os.path.isfile(os.path.join(saved, 'state.json')):
            return _saved(saved, split, own or saved != folder)
    paths = _named(folder, split, prefix)
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
        f'holds no {prefix}{split}.jsonl or .parquet, no shards of it, no folder of tensorflow-datasets or '
        f'save_to_disk, only {_subfolders(folder)}; set data.options.folder or GRPO_JAX_DATA, or fetch all of it again'
        if os.path.isdir(folder)
        else 'no such folder; set data.options.folder or GRPO_JAX_DATA, or data.path to the id of a data set',
    )


def _named(folder, split, prefix):
    """The files of a split that its name tells, in order; [] without any."""
    for place in (folder, os.path.join(folder, 'data')):
        for name in (prefix + split, split, f'{split}-?????-of-?????*', f'{split}/*'):
            for extension in READERS:
                paths = sorted(glob.glob(os.path.join(glob.escape(place), name + extension)))
                if paths:
                    return paths
    return []


def _subfolders(folder):
    """Says which subfolders a folder has."""
    names = sorted(os.path.basename(path[:-1]) for path in glob.glob(os.path.join(glob.escape(folder), '*/')))
    return f'the subfolders {", ".join(names)}' if names else 'no subfolders'


def _saved(folder, split, own):
    """The files of a Dataset that save_to_disk wrote."""
    path = os.path.join(folder, 'state.json')
    state = json_file.read_object(path, 'save the data set again')
    if not own and state.get('_split') != split:
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
