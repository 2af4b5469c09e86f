"""Users' Python files, which a config names FILE.py or FILE.py:NAME: how they are found and loaded."""

from collections.abc import Callable
import functools
import hashlib
import os
import traceback
import types
from typing import Any

from grpo_jax import PACKAGE
from grpo_jax.errors import BadInput

DIGEST = '__sha256__'  # name in a loaded module: the SHA-256 of its file


def is_file(name: Any) -> bool:
    """Whether a config's value names a user's file, FILE.py or FILE.py:NAME."""
    return isinstance(name, str) and (name.endswith('.py') or '.py:' in name)


def import_file(path: str) -> Any:
    """The module of a Python file, which is run once in a process, and again when the file has changed."""
    return _import(os.path.abspath(path), os.stat(path).st_mtime_ns)


@functools.cache
def _import(path, changed):
    with open(path, 'rb') as file:
        source = file.read()
    module = types.ModuleType(os.path.splitext(os.path.basename(path))[0])
    vars(module).update({'__file__': path, DIGEST: hashlib.sha256(source).hexdigest()})
    exec(compile(source, path, 'exec'), vars(module))  # no import, which may take an earlier version from __pycache__
    return module


def load_function(thing: str, name: str) -> Callable:
    """The function FILE.py:NAME; FILE is looked for in the current folder and in the package.

    Raises BadInput, which calls the name `thing`, without the file or the function, and with the line of an error in
    the file.
    """
    file, _, function = name.rpartition(':')
    path = next((path for path in (file, os.path.join(PACKAGE, file)) if os.path.isfile(path)), None)
    if path is None:
        raise BadInput(thing, name, f'no file {file!r} in {os.getcwd()} or {PACKAGE}; give FILE.py:NAME')
    try:
        module = import_file(path)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(path)]
        line = getattr(error, 'lineno', None) or (lines[-1] if lines else 1)
        raise BadInput(thing, name, f'{path}, line {line}: {type(error).__name__}: {error}; mend the file') from error
    if not callable(getattr(module, function, None)):
        raise BadInput(thing, name, f'{path} has no function {function!r}; add it, or name another')
    return getattr(module, function)
