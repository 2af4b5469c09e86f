"""Chooses where a data set is read from: a user's folder, or a snapshot from the Hugging Face hub."""

from collections.abc import Iterable, Mapping
import glob
import inspect
import os
import re
from types import ModuleType
from typing import Any, NamedTuple

from grpo_jax.errors import BadInput
from grpo_jax.hosts import buckets, hub

# files of a data set, in any folder of its repository
PATTERNS = ('*.parquet', '*.jsonl', '*.json', '*.arrow', '*.csv', '*.tsv')
PYTHON = 'examples of train.run'  # in place of a folder: rows that lie in no file
# names that a data set's folder holds, in the forms that files.rows reads
FORMS = ('features.json', 'state.json', 'dataset_dict.json') + tuple(
    f'{folder}{split}*' for folder in ('', '*/') for split in ('train', 'test', 'validation')
)
# files of any name that show that a folder holds a data set; a .json may be its description
TABLES = (*(pattern for pattern in PATTERNS if pattern != '*.json'), 'data/*.parquet')


class Origin(NamedTuple):
    """Where a data set is read from, as the run's data.json has it."""

    path: str  # id on the hub, data.path; '' for none
    revision: str  # data.revision, as the user gave it
    commit: str  # of the snapshot that is read; '' when the folder is read
    folder: str  # data.options.folder; '' when the snapshot is read


def choose_folder(
    module: ModuleType, options: Mapping[str, Any], path: str, revision: str, recorded: Origin | None = None
) -> tuple[dict[str, Any], Origin]:
    """Chooses where a data set's module reads from; returns (options for its `examples` with `folder` set, the Origin).

    data.options.folder is used if it holds any file of the data set. A folder that lacks a split, or has damaged files,
    is refused by `examples` and never replaced. A folder that is missing, or holds nothing of the data set, is replaced
    by the data set `path` of the hub; and so is any folder when `revision` is given. A folder that is a bucket's URL is
    downloaded. recorded: the Origin that the run began with, whose commit or folder is used again. Raises BadInput when
    hub or bucket cannot give what is needed, and for a path or revision that cannot be used.
    """
    options, name = dict(options), module.__name__.rpartition('.')[2]
    if 'folder' not in inspect.signature(module.examples).parameters:
        if path or revision:
            key, value = ('data.path', path) if path else ('data.revision', revision)
            raise BadInput(key, value, f'the data set {name} reads no files; leave path and revision empty')
        return options, Origin('', '', '', '')
    if revision and not path:
        raise BadInput(
            'data.revision', revision, 'needs a data set; name one in data.path, or leave data.revision empty'
        )
    if path and not re.fullmatch(r'[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?', path):
        remedy = 'is no id of a data set on the hub; use one like openai/gsm8k or openai/gsm8k:main'
        raise BadInput('data.path', path, f'{remedy}, and data.options.folder for files that lie here')
    repository, _, subset = path.partition(':')
    if subset:
        takes_subset = 'subset' in inspect.signature(module.examples).parameters
        if not takes_subset or options.get('subset', '') not in ('', subset):
            remedy = f'the data set {name} has no subsets, or data.options.subset names another; leave out :{subset}'
            raise BadInput('data.path', path, remedy)
        options['subset'] = subset
    given_folder = options.get('folder') or ''  # this is recorded: a bucket's URL, and not the folder of its cache
    folder = _fetch_folder(given_folder)
    options = options | {'folder': folder} if folder != given_folder else options
    held = _holds(folder, module, options)
    if recorded and (recorded.path, recorded.revision) != (path, revision):
        recorded = None
    if recorded.commit if recorded else path and (revision or not held):
        commit, missing = recorded.commit if recorded else '', '' if held else folder
        remedy = _remedy(name, revision, commit, missing)
        snapshot = hub.fetch('data.path', repository, PATTERNS, remedy, dataset=True, revision=commit or revision)
        if not os.path.isdir(snapshot):
            raise BadInput(
                'data.path', path, f'has none of {", ".join(PATTERNS)}; try data.revision=refs/convert/parquet'
            )
        commit = os.path.basename(snapshot)
        hub.announce(f'data set {name}: commit {commit} of {path}' + f', {missing} has no file of it' * bool(missing))
        return options | {'folder': snapshot}, Origin(path, revision, commit, '')
    if path and not held:
        raise BadInput('data.options.folder', folder, 'has lost the data that the run began with; bring them back')
    if path:
        hub.announce(f'data set {name}: files of {given_folder}, and not {path} of the hub')
    return options, Origin(path, revision, '', given_folder)


def list_rows(examples: Mapping[str, Iterable] | Iterable) -> dict[str, list]:
    """{split: list of rows}; examples: rows by split, or the rows of train. Raises BadInput if rows are no sequence."""
    by_split = examples if isinstance(examples, Mapping) else {'train': examples}
    for split, rows in by_split.items():
        if isinstance(rows, str) or not (hasattr(rows, '__iter__') or hasattr(rows, '__getitem__')):
            raise BadInput('examples', {split: rows}, 'have no rows; give a list of dicts or Examples for each split')
    return {split: list(rows) for split, rows in by_split.items()}


def _fetch_folder(folder):
    """The local path of a data set's folder, downloaded if it is a bucket's URL; {split} in a URL stays in the path."""
    if not buckets.is_url(folder):
        return folder
    constant = folder.partition('{split}')[0]
    root = folder if constant == folder else constant.rpartition('/')[0]
    return buckets.download('data.options.folder', root, (*PATTERNS, '*array_record*')) + folder[len(root) :]


def _remedy(name, revision, commit, missing):
    """The remedy for hub.fetch, where {hub} stands for the reason that hub.fetch fills in.

    commit: the one that the run began with, or ''; missing: the folder that lacks the data set's files, or ''.
    """
    if commit:
        return f'the run began with its commit {commit}, but {{hub}}'
    if revision:
        return f'its revision {revision} is asked for, but {{hub}}'
    return (
        f'{missing} has no file of the data set {name}, ' * bool(missing)
        + '{hub}, or name the folder of its files in data.options.folder, or the one above it in GRPO_JAX_DATA'
    )


def _holds(folder, module, options):
    """Whether a folder has a file of the module's data set; {split} in its name stands for any split.

    module.FILES is the prefix of the data set's file names, in which {name} stands for the option `name`. Without
    FILES, any existing folder counts.
    """
    pattern = glob.escape(folder).replace('{split}', '*')
    if not folder or not hasattr(module, 'FILES'):
        return bool(folder and glob.glob(pattern))
    prefix = module.FILES.replace('{name}', str(options.get('name', '')))
    names = [*FORMS, *([f'{glob.escape(prefix)}*.*'] if prefix else TABLES)]
    return os.path.isfile(folder) or any(glob.glob(os.path.join(pattern, name)) for name in names)
