"""Which config keys may change in a started run; refuses other changes, and records changes, environment and data.

A FREE key may change, and results differ at most in the last bits of floats. An AMENDABLE key may change with --amend,
and the change is recorded in events.jsonl. A FIXED key may change only in a branch. An INHERITED key never changes. The
contents of data and users' files have no key; their changes are AMENDABLE too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
import contextlib
import datetime
import importlib.metadata
import inspect
import logging
import os
import platform
import shlex
import subprocess
import sys
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from grpo_jax import PACKAGE, __version__, data, user_files
from grpo_jax.diagnose import is_command
from grpo_jax.errors import BadInput, Checks
from grpo_jax.hosts import json_file, processes
from grpo_jax.ranges import Kind
from grpo_jax.run.rows import append_event, recorded_events, rewrite_events
from grpo_jax.run.settings import kind_of
from grpo_jax.sharding import compiled

logger = logging.getLogger('grpo_jax')

ENVIRONMENT, PIECES, CONTENTS = 'environment.json', 'pieces.json', 'contents.json'  # in the workdir
OF_CONTENTS, OF_CONFIG = 'content of ', 'source of the config '  # beginnings of keys of Changes
# packages whose versions are recorded
PACKAGES = ('jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'orbax-checkpoint', 'transformers', 'numpy')
MACHINE = ('code', 'python', 'packages', 'devices')  # parts of an environment on which programs depend
MOST_NAMED = 5  # changed keys that a refusal names


class Steering(NamedTuple):
    """Which changes of its config a command may make to a started run."""

    amend: bool = False  # amendable keys may change; the run goes on in place
    branch: str = ''  # workdir of a new run that starts from the newest checkpoint; '': none
    flags: frozenset[str] = frozenset()  # keys that the command line gives, which something must read


class Change(NamedTuple):
    """A dotted config key whose value differs from the run's config.json."""

    key: str
    old: Any
    new: Any

    @property
    def kind(self) -> Kind:
        """The Kind of the change, never PARTS: new weights of the same rewards are AMENDABLE, other rewards FIXED.

        Another file for an algorithm's piece is PATH, since `piece_changes` compares the contents.
        """
        if self.key.startswith((OF_CONTENTS, OF_CONFIG)):  # changed values of a config are Changes of their own
            return Kind.AMENDABLE if self.key.startswith(OF_CONTENTS) else Kind.FREE
        if self.key == 'data.options.sources' and _weights_in(self.old) != _weights_in(self.new):
            return Kind.FIXED
        kind = kind_of(self.key)
        if self.key.startswith('algorithm.') and user_files.is_file(self.old) and user_files.is_file(self.new):
            return Kind.PATH
        if kind == Kind.PARTS:
            return Kind.AMENDABLE if _reward_names(self.old) == _reward_names(self.new) else Kind.FIXED
        return kind

    def __str__(self) -> str:
        return f'{self.key}: was {self.old!r}, now {self.new!r}'


class Contents(NamedTuple):
    """What the data and the user's files of a run hold."""

    digests: Mapping[str, Any] = MappingProxyType({})  # for contents.json
    changes: tuple[Change, ...] = ()  # from the contents.json of the workdir


NO_CONTENTS = Contents()


def _reward_names(parts):
    """The reward names in reward.parts."""
    return [name for name, _ in parts] if parts else None


def _weights_in(sources):
    """The weights of a mixture's sources, as config.json has them."""
    return [source.get('weight') for source in sources or () if isinstance(source, Mapping)]


def value_of(tree: Any, key: str) -> Any:
    """The value of a dotted key in nested mappings; None for a missing key."""
    for name in key.split('.'):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def changes(workdir: str | os.PathLike, recorded: Mapping[str, Any]) -> tuple[Change, ...]:
    """The Changes from a workdir's config.json to the config `recorded`, a dict as JSON has it; () without the file.

    The mesh where mesh.data is 0, and the steps where data.epochs sets them, are no changes: config.json has the values
    that the run chose, and `recorded` leaves them open.
    """
    if (old := recorded_config(workdir)) is None:
        return ()
    changed = differences(old, recorded)
    mesh, steps = value_of(recorded, 'mesh.data') == 0, bool(value_of(recorded, 'data.epochs'))
    left_open = ('mesh.',) * mesh + ('steps',) * steps
    return tuple(change for change in changed if not change.key.startswith(left_open))


def recorded_config(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """The config in a workdir's config.json; None without the file."""
    path = os.path.join(workdir, 'config.json')
    return json_file.read_object(path) if os.path.exists(path) else None


def piece_changes(workdir: str | os.PathLike, pieces: Mapping[str, Any]) -> list[Change]:
    """The Changes from a workdir's pieces.json to the pieces of the algorithm that is to run; [] without the file.

    pieces: see algorithms.describe_pieces. A piece whose source differs is a Change, a file that was moved is not.
    """
    return list(differences(recorded_pieces(workdir), pieces_in_words(pieces))) if recorded_pieces(workdir) else []


def recorded_pieces(workdir: str | os.PathLike) -> dict[str, str]:
    """The pieces in workdir/pieces.json, as pieces_in_words has them; {} without the file."""
    path = os.path.join(workdir, PIECES)
    try:
        return pieces_in_words(json_file.read_object(path)) if os.path.exists(path) else {}
    except (TypeError, AttributeError):
        raise BadInput('pieces of the run', path, 'is no list of them; bring it back from a copy') from None


def pieces_in_words(pieces: Mapping[str, Sequence[Mapping[str, str]]]) -> dict[str, str]:
    """{config key: the names of its pieces}; a user's piece also has its file or module and 12 digits of its digest."""

    def in_words(name, file='', module='', sha256='', **_):
        return f'{name} of {os.path.basename(file) or module}, sha256 {sha256[:12]}' if sha256 else name

    return {f'algorithm.{key}': ' and '.join(in_words(**piece) for piece in own) for key, own in pieces.items()}


def read_contents(
    workdir: str | os.PathLike,
    recorded: Mapping[str, Any],
    splits: Mapping[str, data.Dataset],
    functions: Mapping[str, Callable] | None = None,
    steered: Steering | None = None,
) -> Contents:
    """The Contents of a run's splits, of the users' files that its config names or they import, and of `functions`.

    recorded: the config as JSON has it; splits: by name; functions: rewards by name. Raises BadInput where the run in
    workdir had other contents, unless `steered` amends them; other data behind a changed path are always refused.
    """
    named = (name if name.endswith('.py') else name.rpartition(':')[0] for name in name_files(recorded))
    own, configs = (
        {file: sha256 for path in paths for file, sha256 in user_files.digests(path).items()}
        for paths in (filter(None, map(user_files.find_file, named)), user_files.CONFIG_FILES)
    )
    sources = {}
    for name, function in (functions or {}).items():
        with contextlib.suppress(OSError, TypeError):  # no file or cell may have it
            sources[name] = compiled.short_hash(inspect.getsource(inspect.unwrap(function)))
    read = {name: dataset.read for name, dataset in splits.items()}
    contents = {
        'splits': {name: data.contents_of(examples)._asdict() for name, examples in read.items()},
        'files': own,
        'configs': {file: sha256 for file, sha256 in configs.items() if file not in own},
        'functions': sources,
    }
    changed = contents_changes(workdir, contents, read)
    paths = [c for c in changes(workdir, recorded) if c.kind == Kind.PATH and c.key.startswith('data.')]
    if paths and any(change.key == f'{OF_CONTENTS}the train split' for change in changed):
        refuse(paths, str(workdir), steered)
    check(changed, str(workdir), steered)
    return Contents(contents, changed)


def name_files(value: Any) -> Iterator[str]:
    """Yields the users' files, FILE.py or FILE.py:NAME, that a config names."""
    if user_files.is_file(value):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from name_files(part)


def contents_changes(
    workdir: str | os.PathLike, recorded: Mapping[str, Any], splits: Mapping[str, Sequence] = MappingProxyType({})
) -> tuple[Change, ...]:
    """The Changes from a workdir's contents.json to `recorded`, a Contents' digests; () without the file.

    splits: Examples by split, so that a split's Change says what differs in them. Files are compared by name: a moved
    file is no Change. A new or missing file shows as a Change of the file that imports it, or of the config.
    """
    path, changed = os.path.join(workdir, CONTENTS), []
    if not recorded or not os.path.exists(path):
        return ()
    old = json_file.read_object(path)
    try:
        for split, now in recorded['splits'].items():
            then = data.Contents(**old['splits'].get(split, now))
            if then != data.Contents(**now):
                notes = data.changes_since(then, splits[split]) if split in splits else 'changed'
                new = f'{_in_words(data.Contents(**now))}: {notes}'
                changed.append(Change(f'{OF_CONTENTS}the {split} split', _in_words(then), new))
        keys = {'files': OF_CONTENTS, 'functions': f'{OF_CONTENTS}the function ', 'configs': OF_CONFIG}
        for section, key in keys.items():
            then, now = (_digests_by_name(contents[section]) for contents in (old, recorded))
            both = [name for name in now if then.get(name, now[name]) != now[name]]
            changed += [Change(key + name, f'sha256 {then[name]}', f'sha256 {now[name]}') for name in both]
    except (KeyError, TypeError, AttributeError):
        raise BadInput('contents of the run', path, 'has another form; bring it back from a copy') from None
    return tuple(changed)


def _in_words(contents):
    """A split's data.Contents in words, for a Change: how many rows, and a hash."""
    return f'{contents.rows} rows, sha256 {compiled.short_hash(repr(contents))[:12]}'


def _digests_by_name(digests):
    """{a file's name, without its folder: first digits of its digest}; files of one name have theirs side by side."""
    names = sorted((os.path.basename(path), sha256[:12]) for path, sha256 in digests.items())
    return {name: ' '.join(sha256 for other, sha256 in names if other == name) for name, _ in names}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> Iterable[Change]:
    """Yields a Change for each dotted key in which two nested dicts differ."""
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f'{prefix}{key}.')
        elif before != after:
            yield Change(prefix + key, before, after)


def check(changed: Sequence[Change], workdir: str, steering: Steering | None) -> None:
    """Logs changes that are allowed; raises BadInput that names all changes when one of them is not.

    changed: of the run in workdir; steering: None where the command has neither --amend nor --branch. Changes of kind
    PATH are allowed here: the caller compares the contents, and calls `refuse` when they differ.
    """
    allowed = (Kind.FREE, Kind.PATH, Kind.AMENDABLE) if steering and steering.amend else (Kind.FREE, Kind.PATH)
    if any(change.kind not in allowed for change in changed):
        refuse([change for change in changed if change.kind != Kind.FREE], workdir, steering)
    for change in changed:
        logger.warning('%s%s', change, ' (amended)' if change.kind == Kind.AMENDABLE else '')


def refuse(changed: Sequence[Change], workdir: str, steering: Steering | None) -> None:
    """Raises BadInput that names the changes and what the user can do. workdir, steering: as in `check`.

    The message says that workdir holds another run, unless --amend would allow all the changes.
    """
    if any(change.key == 'data.options.folder' and change.old == data.PYTHON for change in changed):
        remedy = 'go on with train.run(config, workdir, examples=...) and the same rows, or use another --workdir'
        raise BadInput('--workdir', workdir, f'holds a run whose data came from Python; {remedy}')
    fixed = [change.key for change in changed if change.kind not in (Kind.FREE, Kind.AMENDABLE)]
    inherited = [change.key for change in changed if change.kind == Kind.INHERITED]
    named = sorted(changed, key=lambda change: change.key not in (inherited or fixed))[:MOST_NAMED]
    was = ', '.join(f'{change.key} is {change.old!r} and not {change.new!r}' for change in named)
    was += f' and {len(changed) - len(named)} more keys differ' * (len(changed) > len(named))
    command = is_command(sys.orig_argv)
    amend, branch = ('--amend', '--branch=DIR') if command else ('Steering(amend=True)', 'Steering(branch=DIR)')
    workdir_flag = '--workdir' if command else 'workdir'
    branch += " to begin a new run from this one's newest checkpoint"
    if inherited:
        keys = ' and '.join(inherited[:MOST_NAMED])
        remedy = f'a run and its branches keep their adapters and cold start, and so {keys}; use the old value'
    elif steering is None:
        remedy = f'use the old value{"s" * (len(changed) > 1)}'
    elif fixed:
        remedy = f'{amend} cannot change {" or ".join(fixed[:MOST_NAMED])} in place; use {branch}'
    else:
        remedy = f'use {amend} to go on from here with the new value and record it, or {branch}'
        raise BadInput(workdir_flag, workdir, f'holds a run in which {was}; {remedy}')
    raise BadInput(workdir_flag, workdir, f'holds another run, in which {was}; {remedy}, or another {workdir_flag}')


def refuse_unread(
    unread: Mapping[str, str], recorded: Mapping[str, Any], defaults: Mapping[str, Any], workdir: str, flags: Set[str]
) -> None:
    """Raises BadInput for keys that flags give and nothing reads; warns of keys in the config that nothing reads.

    unread: see Settings.find_unread; recorded, defaults: the config and the one of configs/default.py, as JSON has
    them; flags: the keys that flags give. A flag with the default, or the value of the run in workdir, is only warned
    of.
    """
    begun = os.path.exists(os.path.join(workdir, 'config.json'))
    changed = {change.key for change in changes(workdir, recorded)} if begun else flags
    named: dict[str, list[str]] = {}
    with Checks() as check:
        for key, reader in unread.items():
            value, same = value_of(recorded, key), value_of(recorded, key) == value_of(defaults, key)
            if key in flags & changed and not same:
                check.keep(BadInput(key, value, f'nothing but {reader} reads it; choose that, or leave it out'))
            elif key in flags or not same:
                named.setdefault(reader, []).append(f'{key} = {value!r}')
    if named:
        words = [f'{" and ".join(keys)}, which only {reader} would read' for reader, keys in named.items()]
        logger.warning('has no effect: %s', '; '.join(words))


def record(workdir: str | os.PathLike, step: int, changed: Sequence[Change]) -> None:
    """Appends an event `amended` for each amendable change, in the first process; call it before writing config.json.

    Events of earlier amendments that a crash kept out of config.json are removed first.
    """
    if not processes.is_first():
        return
    rows = recorded_events(workdir)
    valid = valid_rows(rows, recorded_config(workdir) or {})
    if len(valid) < len(rows):
        rewrite_events(workdir, valid)
    for key, old, new in (change for change in changed if change.kind == Kind.AMENDABLE):
        append_event(workdir, step, 'amended', key=key, old=old, new=new)


def valid_rows(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of events.jsonl, without amendments that a crash kept out of config.json; config: what config.json has."""
    valid, settled = [], set()
    for row in reversed(rows):
        if row['event'] == 'amended' and row['key'] not in settled and not row['key'].startswith(OF_CONTENTS):
            if value_of(config, row['key']) != row['new']:
                continue
            settled.add(row['key'])
        valid.append(row)
    return valid[::-1]


def keys_amended_since(workdir: str | os.PathLike, step: int, changed: Sequence[Change]) -> set[str]:
    """The keys that were amended after a step's checkpoint: at the step or later by events, or in `changed`, now."""
    rows = valid_rows(recorded_events(workdir), recorded_config(workdir) or {})
    keys = {row['key'] for row in rows if row['event'] == 'amended' and row['step'] >= step}
    return keys | {change.key for change in changed if change.kind == Kind.AMENDABLE}


def check_programs(workdir: str, recorded: Mapping[str, Any], programs: Mapping[str, Any]) -> None:
    """Compares this start's programs with the last start's in workdir, if settings and environment are the same.

    recorded: the config; programs: Executables by name. If they differ, code outside the config has changed: raises
    BadInput where the run has users' pieces, which may call it; warns where it has none, or grpo_jax has edits.
    """
    path, entries = os.path.join(workdir, 'programs.json'), recorded_environments(workdir)
    if not (os.path.exists(path) and entries) or changes(workdir, recorded):
        return
    then, now = entries[-1], describe_environment()
    old = json_file.read_object(path)
    differ = [name for name, new in programs.items() if new.hash and old.get(name, new.hash) not in (new.hash, '')]
    if not differ or any(then.get(part) != now[part] for part in MACHINE):
        return
    text = f'differ from those of the last start in {workdir}, with the same settings, pieces, versions and machine'
    own = [piece for piece in recorded_pieces(workdir).values() if 'sha256' in piece]
    if own and not now['code'].get('edited'):
        raise BadInput('programs', differ, f'{text}; bring back what {" and ".join(own)} calls, or use --branch=DIR')
    logger.warning('programs %s %s', ' and '.join(differ), text)


def record_environment(workdir: str) -> None:
    """Appends this start to environment.json; warns when the code or jax differ from the first entry's."""
    entries, entry = recorded_environments(workdir), describe_environment()
    json_file.write(os.path.join(workdir, ENVIRONMENT), [*entries, entry])
    if not entries:
        return
    then, now = (
        {'grpo_jax': code_name(start.get('code', {})), 'jax': start.get('packages', {}).get('jax')}
        for start in (entries[0], entry)
    )
    for name in then:
        if then[name] != now[name]:
            logger.warning('%s was begun with %s %s, and goes on with %s', workdir, name, then[name], now[name])


def recorded_environments(workdir: str) -> list[dict[str, Any]]:
    """The entries of environment.json, one for each start; [] without the file, BadInput for another content."""
    path = os.path.join(workdir, ENVIRONMENT)
    if not os.path.exists(path):
        return []
    with contextlib.suppress(BadInput, TypeError):
        entries = json_file.read(path)
        if all(isinstance(entry, dict) for entry in entries):
            return entries
    raise BadInput('environment of the run', path, 'is no list of environments; move the file away')


def code_name(code: dict[str, Any]) -> str:
    """The code of an environment's entry in words, like '0.1.0 at commit 1575ff0 with edits'."""
    commit, edits = code.get('commit'), ' with edits' * bool(code.get('edited'))
    return f'{code.get("version")}' + (f' at commit {commit[:12]}{edits}' if commit else '')


def first_code_name(workdir: str) -> str:
    """The code that began a workdir's run, in words; 'of an unknown version' without an environment.json."""
    entries = recorded_environments(workdir)
    return code_name(entries[0].get('code', {})) if entries else 'of an unknown version'


def describe_environment() -> dict[str, Any]:
    """The environment of this process for JSON: time, command, code, Python, packages and devices."""
    devices, packages = jax.devices(), {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        'begun': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': shlex.join(sys.orig_argv),
        'code': {'version': __version__} | _describe_clone(os.path.dirname(PACKAGE)),
        'python': platform.python_version(),
        'cores': os.cpu_count(),
        'packages': packages,
        'devices': {
            'platform': devices[0].platform,
            'kind': devices[0].device_kind,
            'count': len(devices),
            'processes': jax.process_count(),
        },
    }


def _describe_clone(root: str) -> dict[str, Any]:
    """{'commit': of HEAD, 'edited': whether grpo_jax has edits} of the git clone at root; {} where git cannot tell."""
    if not os.path.exists(os.path.join(root, '.git')):  # an installed package may lie in a clone of something else
        return {}
    git = ['git', '-c', f'safe.directory={root}', '-C', root]
    try:
        commit = _run_command([*git, 'rev-parse', 'HEAD'])
        edits = _run_command([*git, 'status', '--porcelain', '--', 'grpo_jax', 'configs'])
    except (OSError, subprocess.SubprocessError):  # no git, or no commit
        return {}
    return {'commit': commit, 'edited': bool(edits)}


def _run_command(command):
    """What a command prints on stdout, stripped; raises SubprocessError when the command fails."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def record_origins(workdir: str, origins: Sequence[data.Origin]) -> None:
    """Writes origins to workdir/data.json, so that a resumed run reads the same data, like the same commits of the hub.

    Writes nothing when all data are generated.
    """
    if any(any(origin) for origin in origins):
        os.makedirs(workdir, exist_ok=True)
        json_file.write(os.path.join(workdir, 'data.json'), [origin._asdict() for origin in origins])


def recorded_origins(workdir: str) -> list[data.Origin]:
    """The origins in workdir/data.json; [] without the file."""
    path = os.path.join(workdir, 'data.json')
    origins = json_file.read(path) if os.path.isfile(path) else []
    try:
        return [data.Origin(**origin) for origin in origins]
    except TypeError:
        raise BadInput('origins of the data', path, 'is no list of them; bring it back from a copy') from None
