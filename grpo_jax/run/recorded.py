"""The config that a workdir records: it comes from whoever wrote the workdir, so it is checked before it is used."""

from collections.abc import Iterator, Mapping
import os
from typing import Any

from ml_collections import ConfigDict

from grpo_jax import data, rewards
from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, json_file
from grpo_jax.run import config_file


def read_recorded(workdir: str, trust: bool) -> ConfigDict:
    """The config in workdir/config.json.

    BadInput where there is none, for one without the keys of a config or with values of other types, and, unless the
    user trusts the workdir, for one that names files of Python code, which would run.
    """
    path = os.path.join(workdir, 'config.json')
    if not os.path.isfile(path):
        raise BadInput('--workdir', workdir, 'holds no run (no config.json)')
    recorded = json_file.read_object(files.inside(workdir, 'config.json'))
    known = config_file.read_config(os.path.join(config_file.CONFIGS, 'default.py'))
    _check(recorded, known.to_dict(), workdir, '')
    paths = list(dict.fromkeys(code_files(recorded)))
    if paths and not trust:
        raise BadInput(
            '--workdir',
            workdir,
            f'its config.json names code that would run: {", ".join(paths)}; read it, and add --trust if you trust it',
        )
    return ConfigDict(_with_tuples(recorded))


def code_files(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the files of Python code that a config names, as it names them: data sets and rewards of users."""
    sources = [config['data']]
    while sources:  # those of a mixture are data sets themselves
        source = sources.pop()
        if not isinstance(source, dict):
            continue
        if data.is_file(str(source.get('name'))):
            yield source['name']
        options = source.get('options')
        nested = options.get('sources') if isinstance(options, dict) else None
        sources += nested if isinstance(nested, list) else []
    by_source = config['reward'].get('by_source', {})
    judges = [config['reward'], *(own for own in by_source.values() if isinstance(own, dict))]
    every = [part for own in judges for part in own.get('parts', ()) if isinstance(part, list) and part]
    parts = [part[0] for part in every]
    for path in (*parts, config['reward']['step_rewards']):
        if rewards.is_file(str(path)):
            yield path


def _check(recorded, known, workdir, prefix):
    """BadInput where a recorded section lacks a key of the known one, or has a value of another type."""
    for key, value in known.items():
        if key not in recorded and value == {}:  # what an earlier version lacked
            continue
        if key not in recorded:
            raise BadInput(
                '--workdir',
                workdir,
                f'was begun by an earlier version, without {prefix}{key}; read it with that one, or begin a new run',
            )
        types = {tuple: list, float: (int, float)}.get(type(value), type(value))
        if value is not None and (
            not isinstance(recorded[key], types) or isinstance(recorded[key], bool) != isinstance(value, bool)
        ):
            path = os.path.join(workdir, 'config.json')
            raise BadInput(f'{prefix}{key} in {path}', recorded[key], 'is no value of a config; bring back the file')
        if isinstance(value, dict) and key != 'options':  # those are of data sets and rewards, which check them
            _check(recorded[key], value, workdir, f'{prefix}{key}.')


def _with_tuples(value):
    """What JSON gives, with tuples for lists, as configs have them."""
    if isinstance(value, dict):
        return {name: _with_tuples(part) for name, part in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
