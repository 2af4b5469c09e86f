"""Reads configs: from the file that --config=NAME[:PRESET] names, and from the config.json of a workdir.

Data sets and rewards declare options of their own: one that the command line overrides is added to the config as a key.
A config.json may come from anybody, so it is checked before it is used.
"""

import ast
from collections.abc import Mapping, Sequence
import contextlib
import difflib
import functools
import importlib
import importlib.util
import os
import re
import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_dict

from grpo_jax import PACKAGE, coming_from, data, ranges, rewards, user_files
from grpo_jax.algorithms import file_numbers
from grpo_jax.algorithms.algorithm import MODULES
from grpo_jax.errors import NO_VALUE, BadInput, Checks
from grpo_jax.hosts import files, json_file
from grpo_jax.run import steering

CONFIGS = os.path.join(PACKAGE, 'configs')
OVERRIDE = re.compile(r'--?(?:no)?config\.([\w.]+)(?:=(.*))?', re.DOTALL)
HINT = re.compile(r'Did you mean \\?"(.+?)\\?" instead of \\?"(.+?)\\?"')  # of ml_collections, about a misspelt key
MISSING = re.compile(r'(?:\W*Key )?\W*([\w.]+)\W*(?: (?:does not exist|cannot be set) .*)?$')  # of ml_collections
# a value of each type
EMPTY = {str: '', int: 0, float: 0.0, bool: False, tuple: (), Sequence: (), dict: {}, Mapping: {}}


class Parser(flags.ArgumentParser):
    """absl's parser of --config: makes a locked config that has a key for each override on the command line.

    An overridden key need not be in the experiment's file, if the chosen data set or reward declares it as an option.
    """

    def __init__(self, argv: Sequence[str] | None = None):
        self._argv = argv  # None: sys.argv at the time of parsing

    def parse(self, argument: str) -> ConfigDict:
        """The config of NAME[:PRESET]; raises BadInput for a missing file, an error in it, and an unknown key."""
        file, _, preset = argument.partition(':')
        path = locate(file)
        config = read_config(path, *([preset] if preset else []))
        user_files.CONFIG_FILES.add(os.path.abspath(path))
        overrides: dict[str, str | None] = {}  # dotted key -> value; None when the value is the next argument
        for text in sys.argv if self._argv is None else self._argv:
            if match := OVERRIDE.fullmatch(text):
                overrides[match[1]] = match[2]
        with config.unlocked():
            add_declared(config, overrides)
        with Checks() as check:
            for key, value in overrides.items():
                check(_check_key, config, key, value)
        return config.lock()

    def flag_type(self) -> str:
        """The name of the flag's type, for absl."""
        return 'config file'


def locate(name: str) -> str:
    """The path of a config file: `name` itself, or the experiment of that name in configs/; else raises BadInput."""
    shipped = [os.path.join(CONFIGS, f'{name}.py'), os.path.join(PACKAGE, name)]
    for path in (name, *shipped):
        if os.path.isfile(path):
            return path
    near = difflib.get_close_matches(name.lower().removesuffix('.py'), experiments(), 1)
    hint = f'did you mean {near[0]}?' if near else f'choose one of {", ".join(experiments())}'
    raise BadInput('--config', name, f'no such file, and no experiment in configs/; {hint}')


def experiments() -> list[str]:
    """The names of the experiments in configs/: the files whose get_config() needs no argument."""
    names = []
    for folder in ('', 'labs/', 'recipes/', 'reproduce/'):
        for name in os.listdir(os.path.join(CONFIGS, folder)):
            if name.endswith('.py') and name != 'default.py':
                with open(os.path.join(CONFIGS, folder, name), encoding='utf8') as file:
                    names += [folder + name[:-3]] if 'def get_config(preset=' in file.read() else []
    return sorted(names)


def read_config(path: str, *preset: str) -> ConfigDict:
    """The ConfigDict that get_config(*preset) of the config file at `path` returns; BadInput as in call_function.

    A FILE.py that is the preset, or that the config names, may also lie beside the config file.
    """
    folder = os.path.dirname(path)
    config = call_function(path, 'get_config', *(_place(name, folder) for name in preset))
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise BadInput(path, NO_VALUE, f'returns a value of type {kind} from get_config(); return that of default.py')
    with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):  # Settings refuse values of wrong types
        _look_beside(config, folder)
    return config


def _look_beside(config, folder):
    """Changes each FILE.py that a config names as data set, reward or piece to its path in `folder`, see `_place`."""
    place = functools.partial(_place, folder=folder)
    config.data.name = place(config.data.name)
    config.reward.step_rewards = place(config.reward.step_rewards)
    for section in (config.reward, *config.reward.by_source.values()):
        section['parts'] = tuple((place(path), weight) for path, weight in section['parts'])
    for key in MODULES:
        value = config.algorithm[key]
        config.algorithm[key] = tuple(map(place, value)) if isinstance(value, tuple) else place(value)


def _place(name, folder):
    """name with `folder` before it if its FILE.py is there, but not in the current folder or the package; else name."""
    if not user_files.is_file(name):
        return name
    file = name if name.endswith('.py') else name.rpartition(':')[0]
    first = any(os.path.isfile(os.path.join(home, file)) for home in ('', PACKAGE))
    return name if first or not os.path.isfile(os.path.join(folder, file)) else os.path.join(folder, name)


def call_function(path: str, name: str, *arguments: Any) -> Any:
    """Imports the config file at `path`, calls its function `name` with the arguments, and returns the result.

    Any error is raised as BadInput, which names the innermost line in this file or in another file of the user's.
    """
    # a config file may say `from configs import ...`, unless the user has another package of that name
    spec = importlib.util.find_spec('configs')
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if spec is None or [os.path.realpath(place) for place in places] == [os.path.realpath(CONFIGS)]:
        sys.modules['configs'] = importlib.import_module('grpo_jax.configs')
    try:
        return getattr(user_files.import_file(path), name)(*arguments)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        file, line, _ = user_files.place_of(error, path)
        thing = f'{file}, line {line}' if line else file
        raise BadInput(thing, NO_VALUE, f'{_explain(error)}; mend it') from None


def _explain(error):
    """The exception that a config file raised, in words: for an unknown key, what may be meant in its place.

    ml_collections' own message would list all other keys too, and is cut.
    """
    text = ' '.join(str(error).replace('\\n', ' ').split())
    key = MISSING.match(text) if isinstance(error, (AttributeError, KeyError)) else None
    if key and (meant := coming_from.explain(key[1])):
        return f'names the key {key[1]}, which is not there: {meant}'
    if isinstance(error, TypeError) and (meant := coming_from.explain_targets(text)):
        return f"names matrices as PEFT does: {meant}, and one text names all of them, like 'w[qv]'"
    if hint := HINT.search(text):
        return f'names the key {hint[2]}, which is not there: did you mean {hint[1]}?'
    return f'fails with {type(error).__name__}: {text.partition(" Other fields present:")[0]}'


def add_declared(config: Any, overrides: Mapping[str, str | None]) -> None:
    """Adds overridden options of the chosen data set, rewards and pieces to a config, with their declared defaults.

    The overrides themselves are applied later, by the flag's parser. config: an unlocked ConfigDict, which is changed;
    overrides: {dotted key: text} of the command line. When data.name is overridden, options that the new data set does
    not declare are dropped. Raises BadInput for a wrong reward.parts.
    """
    section = config.algorithm
    for key in (key for key in MODULES if overrides.get(f'algorithm.{key}')):
        with contextlib.suppress(SyntaxError, ValueError, TypeError):  # which the flag's own parser reports
            text = overrides[f'algorithm.{key}']
            section[key] = ast.literal_eval(text or '') if key == 'regularizers' else text
    section.update({number: default for number, default in file_numbers(section).items() if number not in section})
    default_name = config.data.name
    name = overrides.get('data.name') or default_name
    if name != default_name or any(key.startswith('data.options.') for key in overrides):
        declared = data.options_of(name)
        if name != default_name:
            config.data.options = {key: value for key, value in config.data.options.items() if key in declared}
        _add_overridden(config.data.options, 'data.options.', declared, overrides)
    for key in (key for key in overrides if key.startswith('data.chat_template_kwargs.')):
        if (name := key.rpartition('.')[2]) not in config.data.chat_template_kwargs:
            config.data.chat_template_kwargs[name] = config_dict.placeholder(object)
    parts, text = config.reward.parts, overrides.get('reward.parts')
    if text is not None:
        try:
            parts = ast.literal_eval(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise BadInput('--config.reward.parts', text, "write it like (('numeric', 1.0), ('format', 0.5))") from None
    ranges.check_value('reward.parts', parts, rewards.RewardOptions.__annotations__['parts'])
    for path, _ in parts:
        prefix = f'reward.options.{rewards.name_of(path)}.'
        if any(key.startswith(prefix) for key in overrides):
            if rewards.name_of(path) not in config.reward.options:
                config.reward.options[rewards.name_of(path)] = {}
            _add_overridden(config.reward.options[rewards.name_of(path)], prefix, rewards.options_of(path), overrides)


def _add_overridden(section, prefix, declared, overrides):
    """Adds each declared option that `overrides` has under `prefix` to a section, as its default or an empty value."""
    for name, parameter in declared.items():
        inside = f'{prefix}{name}.'  # --config.data.options.columns.level=difficulty adds a key to columns
        if keys := [key.removeprefix(inside) for key in overrides if key.startswith(inside)]:
            section[name] = ConfigDict(dict.fromkeys(keys, '') | dict(section.get(name, {})))
        if prefix + name not in overrides or name in section:
            continue
        value = parameter.default
        if value in (parameter.empty, None):  # a value of the right type; the command line's value replaces it
            kind = getattr(parameter.annotation, '__origin__', parameter.annotation)
            value = EMPTY.get(kind, config_dict.placeholder(object))
        section[name] = value


def _check_key(config, key, value):
    """Raises BadInput when a config does not have a dotted key; the message names the nearest key that it has."""
    section, names = config, key.split('.')
    for i, name in enumerate(names):
        if not isinstance(section, ConfigDict):
            return  # an index of a tuple, which ml_collections checks
        try:
            section = section[name]
        except KeyError:
            where = '.'.join(['config', *names[:i]])
            hint = coming_from.explain(key, value) or ranges.nearest(name, section.keys())
            raise BadInput(f'--config.{key}', value, f'{where} has no {name}; {hint}') from None


def read_defaults() -> ConfigDict:
    """The config of configs/default.py."""
    return importlib.import_module('grpo_jax.configs.default').get_config()


def read_recorded(workdir: str, trust: bool) -> ConfigDict:
    """The config in workdir/config.json.

    trust: whether the config may name Python files, which would run, and services, which would get completions and a
    key. Raises BadInput when the file is missing, lacks keys, has values of wrong types, or names what is not trusted.
    """
    path = os.path.join(workdir, 'config.json')
    if not os.path.isfile(path):
        raise BadInput('--workdir', workdir, 'holds no run (no config.json); name the folder of a run')
    recorded = json_file.read_object(files.path_inside(workdir, 'config.json'))
    _check_recorded(recorded, read_defaults().to_dict(), workdir, '')
    paths = list(dict.fromkeys(steering.name_files([recorded['data'], recorded['reward']])))
    if paths and not trust:
        raise BadInput(
            '--workdir',
            workdir,
            f'its config.json names code that would run: {", ".join(paths)}; read it, and add --trust if you trust it',
        )
    options = recorded['reward']['options'].values()
    if (
        urls := [str(values['url']) for values in options if isinstance(values, dict) and 'url' in values]
    ) and not trust:
        asked = f'its config.json names services that would be asked: {", ".join(urls)}'
        raise BadInput('--workdir', workdir, f'{asked}, with a key of yours; add --trust if you trust them')
    return ConfigDict(_replace_lists(recorded))


def _check_recorded(recorded, defaults, workdir, prefix):
    """Raises BadInput when a section of a workdir's config.json lacks a default's key, or has a value of another type.

    prefix: the section's dotted name with a dot at its end, '' for the whole config.
    """
    for key, value in defaults.items():
        if key not in recorded:
            raise BadInput(
                '--workdir',
                workdir,
                f'was begun by grpo_jax {steering.first_code_name(workdir)}, without {prefix}{key}; use that version, '
                'or begin a new run',
            )
        types = {tuple: list, float: (int, float)}.get(type(value), type(value))
        if value is not None and (
            not isinstance(recorded[key], types) or isinstance(recorded[key], bool) != isinstance(value, bool)
        ):
            path = os.path.join(workdir, 'config.json')
            raise BadInput(f'{prefix}{key} in {path}', recorded[key], 'is of a wrong type; bring back the file')
        if isinstance(value, dict) and key != 'options':  # data sets and rewards check their own options
            _check_recorded(recorded[key], value, workdir, f'{prefix}{key}.')


def _replace_lists(value):
    """A value that JSON gave, with tuples in place of lists, as configs have."""
    if isinstance(value, dict):
        return {name: _replace_lists(part) for name, part in value.items()}
    return tuple(map(_replace_lists, value)) if isinstance(value, list) else value
