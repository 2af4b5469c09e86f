"""What a run was begun with, its config, environment and data: which keys may change, and the record of changes.

Free: the run goes on, with floats that differ in their last bits at most. Amendable: with --amend, recorded in
events.jsonl. Fixed: in a branch alone, but for adapters, which a branch inherits.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import datetime
import importlib.metadata
import logging
import os
import platform
import shlex
import subprocess
import sys
from typing import Any, NamedTuple

import jax

from grpo_jax import PACKAGE, __version__, data
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.ranges import Kind
from grpo_jax.run.rows import append_event, recorded_events, rewrite_events
from grpo_jax.run.settings import kind_of
from grpo_jax.sharding import compiled

logger = logging.getLogger('grpo_jax')

ENVIRONMENT = 'environment.json'  # in the workdir
# the record names the versions of those that are installed
PACKAGES = ('jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'orbax-checkpoint', 'transformers', 'numpy')


class Steering(NamedTuple):
    """What a command may do with a run that is begun, besides going on with it."""

    amend: bool = False  # amendable changes are recorded, and the run goes on in place
    branch: str = ''  # the workdir of a new run, which begins from the newest checkpoint


class Change(NamedTuple):
    """A key of a config that is not as the run's config.json has it."""

    key: str
    old: Any
    new: Any

    @property
    def kind(self) -> Kind:
        """FREE, AMENDABLE, FIXED, INHERITED, or PATH where the content decides."""
        kind = kind_of(self.key)
        if kind == Kind.PARTS:
            return Kind.AMENDABLE if _names(self.old) == _names(self.new) else Kind.FIXED
        return kind

    def __str__(self) -> str:
        return f'{self.key}: was {self.old!r}, now {self.new!r}'


def _names(parts):
    """The names of reward.parts."""
    return [name for name, _ in parts] if parts else None


def value_of(tree: Any, key: str) -> Any:
    """The value of a dotted key in nested mappings; None where there is none."""
    for name in key.split('.'):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def changes(workdir: str | os.PathLike, recorded: Mapping[str, Any]) -> tuple[Change, ...]:
    """The Changes of a config, as config.json gives it back, to that of a workdir; () for one that is not begun."""
    path = os.path.join(workdir, 'config.json')
    return tuple(differences(json_file.read_object(path), recorded)) if os.path.exists(path) else ()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> Iterable[Change]:
    """Yields a Change for each dotted key in which two nested dicts differ."""
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f'{prefix}{key}.')
        elif a != b:
            yield Change(prefix + key, a, b)


def check(changed: Sequence[Change], workdir: str, steering: Steering | None) -> None:
    """BadInput for changes that a run in workdir cannot go on with, which names them all; others are logged.

    Those of kind PATH pass: who knows their content judges them, by `refuse`. steering None: nothing can be steered.
    """
    allowed = (Kind.FREE, Kind.PATH, Kind.AMENDABLE) if steering and steering.amend else (Kind.FREE, Kind.PATH)
    if any(change.kind not in allowed for change in changed):
        refuse([change for change in changed if change.kind != Kind.FREE], workdir, steering)
    for change in changed:
        logger.warning('%s%s', change, ' (amended)' if change.kind == Kind.AMENDABLE else '')


def refuse(changed: Sequence[Change], workdir: str, steering: Steering | None) -> None:
    """Raises the BadInput of changes, in one line with what can be done."""
    (key, old, new), *others = changed
    was = f'was {old!r} in {workdir}'
    was += ''.join(f', {change.key} = {change.new!r} was {change.old!r}' for change in others)
    fixed = [change.key for change in changed if change.kind not in (Kind.FREE, Kind.AMENDABLE)]
    branch = "--branch=DIR begins a new run from this one's newest checkpoint"
    inherited = [change.key for change in changed if change.kind == Kind.INHERITED]
    if inherited:
        keys = ' and '.join(inherited)
        remedy = f'a run and its branches keep their adapters, and so {keys}; use what was, or another --workdir'
    elif steering is None:
        remedy = f'use {"that" if not others else "those"}, or another --workdir'
    elif fixed:
        remedy = f'--amend cannot change {" or ".join(fixed)} in place; {branch}, or use another --workdir'
    else:
        remedy = f'--amend goes on with it from here and records the change, {branch}'
    raise BadInput(key, new, f'{was}; {remedy}')


def record(workdir: str | os.PathLike, step: int, changed: Sequence[Change]) -> None:
    """Appends an event for each amended key, before config.json is written, which makes them true.

    Events that a crash has left without their config.json are dropped first.
    """
    if not processes.is_first():
        return
    path = os.path.join(workdir, 'config.json')
    rows, recorded = recorded_events(workdir), json_file.read_object(path) if os.path.exists(path) else {}
    true = true_rows(rows, recorded)
    if len(true) < len(rows):
        rewrite_events(workdir, true)
    for key, old, new in (change for change in changed if change.kind == Kind.AMENDABLE):
        append_event(workdir, step, 'amended', key=key, old=old, new=new)


def true_rows(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of events.jsonl without amendments that config, of config.json, does not have: a crash came between."""
    true, settled = [], set()
    for row in reversed(rows):
        if row['event'] == 'amended' and row['key'] not in settled:
            if value_of(config, row['key']) != row['new']:
                continue
            settled.add(row['key'])
        true.append(row)
    return true[::-1]


def amended_since(workdir: str | os.PathLike, step: int, changed: Sequence[Change]) -> set[str]:
    """The keys amended at a step or later, and those that are about to be: the checkpoint of that step lacks them."""
    path = os.path.join(workdir, 'config.json')
    recorded = json_file.read_object(path) if os.path.exists(path) else {}
    rows = true_rows(recorded_events(workdir), recorded)
    keys = {row['key'] for row in rows if row['event'] == 'amended' and row['step'] >= step}
    return keys | {change.key for change in changed if change.kind == Kind.AMENDABLE}


def record_environment(workdir: str) -> None:
    """Adds this process to the list in workdir/environment.json, which has an entry for each time that the run began.

    A warning names what differs from the first entry in code or jax.
    """
    path = os.path.join(workdir, ENVIRONMENT)
    entries = _read_environments(path) if os.path.exists(path) else []
    entry = describe_environment()
    json_file.write(path, [*entries, entry])
    if not entries:
        return
    then, now = (
        {'grpo_jax': code_name(one.get('code', {})), 'jax': one.get('packages', {}).get('jax')}
        for one in (entries[0], entry)
    )
    for name in then:
        if then[name] != now[name]:
            logger.warning('%s was begun with %s %s, and goes on with %s', workdir, name, then[name], now[name])


def _read_environments(path):
    with contextlib.suppress(BadInput, TypeError):
        entries = json_file.read(path)
        if all(isinstance(entry, dict) for entry in entries):
            return entries
    raise BadInput('environment of the run', path, 'is no list of environments; move the file away')


def code_name(code: dict[str, Any]) -> str:
    """Version, commit and edits of an entry's code, in words."""
    commit, edits = code.get('commit'), ' with edits' * bool(code.get('edited'))
    return f'{code.get("version")}' + (f' at commit {commit[:12]}{edits}' if commit else '')


def begun_with(workdir: str) -> str:
    """The code that began the run in workdir, in words; 'of an unknown version' where nothing tells it."""
    path = os.path.join(workdir, ENVIRONMENT)
    entries = _read_environments(path) if os.path.exists(path) else []
    return code_name(entries[0].get('code', {})) if entries else 'of an unknown version'


def describe_environment() -> dict[str, Any]:
    """The environment of this process, as JSON takes it."""
    devices, packages = jax.devices(), {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        'begun': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': shlex.join(sys.orig_argv),
        'code': {'version': __version__} | _commit(os.path.dirname(PACKAGE)),
        'python': platform.python_version(),
        'packages': packages,
        'devices': {
            'platform': devices[0].platform,
            'kind': devices[0].device_kind,
            'count': len(devices),
            'processes': jax.process_count(),
        },
    }


def _commit(root: str) -> dict[str, Any]:
    """The commit of the clone at root, and whether package or configs were edited since; {} where there is no clone."""
    if not os.path.exists(os.path.join(root, '.git')):  # an installed package may lie in a clone of something else
        return {}
    git = ['git', '-c', f'safe.directory={root}', '-C', root]
    try:
        commit = _output([*git, 'rev-parse', 'HEAD'])
        edits = _output([*git, 'status', '--porcelain', '--', 'grpo_jax', 'configs'])
    except (OSError, subprocess.SubprocessError):  # no git, or no commit
        return {}
    return {'commit': commit, 'edited': bool(edits)}


def _output(command):
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def record_origins(workdir: str, origins: Sequence[data.Origin]) -> None:
    """Writes workdir/data.json, so that what goes on in there reads the same data: the same commits of the hub.

    Nothing is written of data that are made and not read.
    """
    if any(any(origin) for origin in origins):
        os.makedirs(workdir, exist_ok=True)
        rows = [origin._asdict() for origin in origins]
        rows = [{name: value for name, value in row.items() if value or name != 'digest'} for row in rows]
        json_file.write(os.path.join(workdir, 'data.json'), rows)


def recorded_origins(workdir: str) -> list[data.Origin]:
    """The origins that record_origins wrote; [] for a workdir without."""
    path = os.path.join(workdir, 'data.json')
    origins = json_file.read(path) if os.path.isfile(path) else []
    try:
        return [data.Origin(**origin) for origin in origins]
    except TypeError:
        raise BadInput('origins of the data', path, 'is no list of them; bring it back from a copy') from None


def with_digests(origins: Sequence[data.Origin], train: data.Dataset, workdir: str) -> list[data.Origin]:
    """The origins; those that are folders with the digest of the examples that the workdir's run began with."""
    if not any(origin.folder for origin in origins):
        return list(origins)
    began = {origin.digest for origin in recorded_origins(workdir)} - {''}
    known = min(began) if began else digest_of(train)
    return [origin._replace(digest=known) if origin.folder else origin for origin in origins]


def digest_of(dataset: data.Dataset) -> str:
    """A digest of the examples, their order, and the weights of their sources."""
    examples = [(e.id, e.prompt, e.answer, e.messages, e.meta) for e in dataset.examples]
    return compiled.hashed(repr((examples, [weight for weight, _ in dataset.sources])))


def are_same_data(origins: Sequence[data.Origin], train: data.Dataset, workdir: str) -> bool:
    """Whether the data are the ones that a workdir's data.json names: the hub's commits decide, else the examples."""
    began = recorded_origins(workdir)
    if len(origins) == len(began) and all(
        now.commit and now.commit == then.commit for now, then in zip(origins, began, strict=True)
    ):
        return True
    digests = {origin.digest for origin in began} - {''}
    return len(digests) == 1 and digests == {digest_of(train)}
