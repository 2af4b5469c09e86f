"""What a run was begun with, and went on with: code, packages, devices and command, in environment.json."""

import contextlib
import datetime
import importlib.metadata
import logging
import os
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax

from grpo_jax import PACKAGE, __version__
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file

logger = logging.getLogger('grpo_jax')
FILE = 'environment.json'
# those of them that are installed
PACKAGES = ('jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'orbax-checkpoint', 'transformers', 'numpy')


def record(workdir: str) -> None:
    """Adds this process to the list in workdir/environment.json, which has an entry for each time that the run began.

    A warning names what differs from the first entry in code or jax.
    """
    path = os.path.join(workdir, FILE)
    entries = _read(path) if os.path.exists(path) else []
    entry = describe()
    json_file.write(path, [*entries, entry])
    if entries:
        for name, then, now in _differences(entries[0], entry):
            logger.warning('%s was begun with %s %s, and goes on with %s', workdir, name, then, now)


def _read(path):
    with contextlib.suppress(BadInput, TypeError):
        entries = json_file.read(path)
        if all(isinstance(entry, dict) for entry in entries):
            return entries
    raise BadInput('environment of the run', path, 'is no list of environments; move the file away')


def _differences(first, now):
    """(name, value then, value now) of the code and of jax, where they differ."""
    for name, read in [
        ('grpo_jax', lambda entry: code_name(entry.get('code', {}))),
        ('jax', lambda entry: entry.get('packages', {}).get('jax')),
    ]:
        if read(first) != read(now):
            yield name, read(first), read(now)


def code_name(code: dict[str, Any]) -> str:
    """Version, commit and edits of an entry's code, in words."""
    commit, edits = code.get('commit'), ' with edits' * bool(code.get('edited'))
    return f'{code.get("version")}' + (f' at commit {commit[:12]}{edits}' if commit else '')


def describe() -> dict[str, Any]:
    """The environment of this process, as JSON takes it."""
    devices = jax.devices()
    return {
        'begun': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': shlex.join(sys.orig_argv),
        'code': {'version': __version__} | _commit(os.path.dirname(PACKAGE)),
        'python': platform.python_version(),
        'packages': {name: version for name in PACKAGES if (version := _version(name))},
        'devices': {
            'platform': devices[0].platform,
            'kind': devices[0].device_kind,
            'count': len(devices),
            'processes': jax.process_count(),
        },
    }


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
