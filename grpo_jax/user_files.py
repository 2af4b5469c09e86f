"""Users' Python files, which a config names FILE.py or FILE.py:NAME: how they are found, imported and compared."""

from collections.abc import Callable, Iterator
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import modulefinder
import os
import sys
import sysconfig
import traceback
from typing import Any

from grpo_jax import PACKAGE
from grpo_jax.errors import BadInput

CONFIGS = os.path.realpath(os.path.join(PACKAGE, 'configs'))
LIBRARIES = (sysconfig.get_path(name) for name in ('stdlib', 'platstdlib', 'purelib', 'platlib'))
# beginnings of paths that are not a user's, and names of folders into which packages are installed
FOREIGN = ('<', *(os.path.join(place, '') for place in (PACKAGE, CONFIGS, *LIBRARIES)))
INSTALLED = ('site-packages', 'dist-packages')
CONFIG_FILES = set[str]()  # paths of the configs that the command was started with
PACKAGE_KIND = 5  # of modulefinder, for a folder
LONGEST = 300  # characters of an exception's text
_modules = dict[str, str]()  # path of an imported file -> the name of its module
_stamps = dict[str, tuple]()  # path of an imported file, also one that another imported -> its time and size then


def is_file(name: Any) -> bool:
    """Whether a config's value names a user's file, FILE.py or FILE.py:NAME."""
    return isinstance(name, str) and (name.endswith('.py') or '.py:' in name)


def find_file(file: str) -> str | None:
    """The path of a user's FILE.py, which lies in the current folder or in the package; None without it."""
    return next((path for path in (file, os.path.join(PACKAGE, file)) if os.path.isfile(path)), None)


def is_imported(path: str) -> bool:
    """Whether import_file has imported the file of this absolute path."""
    return path in _modules


def import_file(path: str) -> Any:
    """The module of a Python file, which is imported once in a process, and again when it or its imports have changed.

    As with `python FILE.py`, its imports are looked for in its folder first; later that folder stands behind the
    standard library in sys.path. sys.modules has the module under a name by which other processes find it.
    """
    path = os.path.abspath(path)
    if path.startswith(os.path.join(PACKAGE, '')):
        return importlib.import_module(os.path.relpath(path, os.path.dirname(PACKAGE))[:-3].replace(os.sep, '.'))
    edited = any(stamp != _stamp(file) for file, stamp in _stamps.items() if os.path.exists(file))
    module = sys.modules.get(_modules.get(path, ''))
    if getattr(module, '__file__', None) == path and not edited:
        return module
    _forget(os.path.dirname(path), edited)
    folder, name = _find_package(path)
    while _is_taken(name.partition('.')[0], folder) and folder != os.path.dirname(folder):
        folder, above = os.path.split(folder)
        name = f'{above}.{name}'
    folders = [*dict.fromkeys([os.path.dirname(path), folder])]
    sys.path[:0] = folders
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it hides an edit of the same second and size
    try:
        importlib.invalidate_caches()
        module = _load(name, path)
    finally:
        sys.dont_write_bytecode = bytecode
        for folder in folders:
            sys.path.remove(folder)
            if folder not in sys.path:  # in front of installed packages, and never of the standard library
                installed = (i for i, place in enumerate(sys.path) if place.endswith('-packages'))
                sys.path.insert(next(installed, len(sys.path)), folder)
        _stamps.update((file, _stamp(file)) for file in digests(path))
    _modules[path] = name
    return module


def _load(name, path):
    """Runs the file at `path` as the module `name`, after the packages in this name, and returns the module."""
    parent, _, child = name.rpartition('.')
    package = importlib.import_module(parent) if parent else None
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(spec.loader.source_to_code(spec.loader.get_data(path), path), vars(module))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    if package and not hasattr(package, child):
        setattr(package, child, module)
    return module


def _forget(folder, edited):
    """Drops users' modules from sys.modules: all if one was edited, else other folders' that hide one in `folder`."""
    for name, module in list(sys.modules.items()):
        file, beside = getattr(module, '__file__', None), os.path.join(folder, name.partition('.')[0])
        elsewhere = file not in _modules and not str(file).startswith(os.path.join(folder, ''))
        hides = elsewhere and (os.path.exists(f'{beside}.py') or os.path.isdir(beside))
        if file in _stamps and (edited or hides):
            del sys.modules[name]
    if edited:
        _stamps.clear()


def _find_package(path):
    """(folder, dotted name) of the file at `path`: with the folder in sys.path, `import name` imports the file."""
    folder, name = os.path.split(path.removesuffix('.py'))
    while os.path.isfile(os.path.join(folder, '__init__.py')):
        folder, package = os.path.split(folder)
        name = f'{package}.{name}'
    return folder, name


def _is_taken(name, folder):
    """Whether `import name` finds another module than the folder's."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return True
    places = [spec.origin or '', *(spec.submodule_search_locations or ())] if spec else []
    return bool(spec) and os.path.realpath(folder) not in {os.path.dirname(os.path.realpath(p)) for p in places if p}


def _stamp(path):
    """(modification time in ns, size) of a file, which tell whether it was edited."""
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


def _is_foreign(path):
    """Whether a file or folder is not a user's, but Python's, this package's or an installed package's."""
    return os.path.join(path, '').startswith(FOREIGN) or not set(INSTALLED).isdisjoint(path.split(os.sep))


class _Finder(modulefinder.ModuleFinder):
    """A ModuleFinder that also enters folders without __init__.py, as an import does."""

    def find_module(self, name, path, parent=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path or self.path)
        if spec and spec.loader is None and spec.submodule_search_locations:
            return None, next(iter(spec.submodule_search_locations)), ('', '', PACKAGE_KIND)
        return super().find_module(name, path, parent)

    def load_package(self, fqname, pathname):
        try:
            return super().load_package(fqname, pathname)
        except ImportError:  # there is no __init__.py
            return self.modules[fqname]


def digest(path: str) -> str:
    """The SHA-256 of one file."""
    with open(path, 'rb') as opened:
        return hashlib.sha256(opened.read()).hexdigest()


def digests(path: str) -> dict[str, str]:
    """{path: SHA-256} of a user's file, and of users' files that it imports, directly or through others."""
    folder, name = _find_package(os.path.abspath(path))
    folders = [os.path.dirname(os.path.abspath(path)), folder, *map(os.path.abspath, sys.path)]
    own = [place for place in folders if not _is_foreign(place)]
    finder = _Finder(own, excludes=['grpo_jax', 'configs'])
    with contextlib.suppress(ImportError, SyntaxError, ValueError):  # which is said where it is imported
        finder.import_hook(name)
    hashes = {}
    for file in [os.path.abspath(path), *(vars(module)['__file__'] for module in finder.modules.values())]:
        if file and os.path.isfile(file) and not _is_foreign(file):
            hashes[file] = digest(file)
    return hashes


def place_of(error: BaseException, path: str, first: int | None = None) -> tuple[str, int | None, str]:
    """(file, line, text of the line) where an exception left a user's code: the innermost line of a user's file.

    path: of the file that was called, which is named as it is given; first: its line that is named where the exception
    has no line of a user's.
    """
    frames = [(frame.filename, frame.lineno, frame.line or '') for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or '', error.lineno, ''))
    whole = os.path.abspath(path)
    own = [frame for frame in frames if frame[0] == whole or (frame[0] and not _is_foreign(frame[0]))]
    file, line, text = own[-1] if own else (whole, first, '')
    return path if file == whole else file, line, text


def explain(error: BaseException, path: str, first: int | None = None) -> str:
    """An exception in a user's file in words: FILE, line N: TYPE: what it says. path, first: as in place_of."""
    file, line, _ = place_of(error, path, first)
    text = 'which cannot be printed'
    with contextlib.suppress(Exception):  # a user's exception may fail to say what it is
        text = ' '.join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:LONGEST]
    return ': '.join(filter(None, [f'{file}, line {line}' if line else file, type(error).__name__, text]))


@contextlib.contextmanager
def naming_line(thing: str, name: str, path: str) -> Iterator[None]:
    """A context that raises an exception in a user's file as a BadInput on `thing = name` that names the line."""
    try:
        yield
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise BadInput(thing, name, f'{explain(error, path)}; mend the file') from error


def load_function(thing: str, name: str) -> Callable:
    """The function FILE.py:NAME; FILE is looked for as `find_file` does.

    Raises BadInput(thing, name) without the file or the function, and with the line of an error in the file.
    """
    file, _, function = name.rpartition(':')
    path = find_file(file)
    if path is None:
        places = f'{os.getcwd()} and {PACKAGE}'
        raise BadInput(thing, name, f'names no file; FILE.py of FILE.py:NAME is looked for in {places}')
    with naming_line(thing, name, path):
        module = import_file(path)
    if not callable(getattr(module, function, None)):
        raise BadInput(thing, name, f'{path} has no function {function!r}; add it, or name another')
    return getattr(module, function)
