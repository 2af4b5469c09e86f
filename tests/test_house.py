"""The house keeps its shape: floors, sizes, and one word for one thing. A failure lists every offender at once."""

import ast
from collections import defaultdict
import contextlib
import importlib
import os
import re

import jax
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = os.path.join(ROOT, 'grpo_jax')

# from the ground; a module may import its own floor and those below
FLOORS = [
    ('types', 'errors', 'example', 'statistics', 'grouping', 'activity', 'ranges', 'text', 'expressions'),
    ('hosts',),
    ('algorithms',),
    ('sharding',),
    ('models', 'workers'),
    ('data', 'sampler', 'learner'),
    ('rewards',),
    ('run', 'diagnose'),
    (
        *('train', 'supervised', 'evaluate', 'sample', 'reward_model', 'iterate', 'pipeline', 'sweep', 'export'),
        *('show', 'prepare', 'report', 'provenance', 'preflight', 'replay_bad', 'notebook', '__main__'),
    ),
]

FILE_LINES, FUNCTION_LINES, CLASS_LINES, PARAMETERS = 400, 60, 150, 8
LONGER = {'train.py:run': 'the main loop, which tests/test_train.py holds to a screen and a half'}
MORE_PARAMETERS = {
    'algorithms/advantages.py:gtpo': 'a piece: it reads five arrays, and has four numbers of its own',
    'sampler/generate.py:generate': 'public, and called by keyword in notebooks; `limit` has a default',
}
# public functions that are called by keyword with the model's config as `c`
PUBLIC_C = ('sampler/generate.py', 'learner/logprobs.py')

# the contracts of files that are chosen by name: rewards, verifiers, data sets; and the words that each command has
SHARED_NAMES = {
    'run',
    'main',
    'make',
    'from_config',
    'check',
    'reward',
    'extract',
    'steps',
    'strict',
    'gold',
    'examples',
}

# docs/glossary.md has what they mean, or what is said in their place
RETIRED_MODULES = {
    *('book', 'covariance', 'layout', 'multihost', 'parts', 'placement', 'program', 'reward_scorer', 'rows', 'score'),
    *('scores', 'utils', 'wave'),
}
RETIRED_NAMES = {
    *('Book', 'Layout', 'Parts', 'Program', 'Programs', 'Scored', 'Scorer', 'Scoring', 'Wave'),
    *('bank', 'ex', 'found', 'outlook', 'parked', 'said', 'told'),
}
RETIRED_PUBLIC_NAMES = {'score', 'scores', 'scored', 'layout', 'parts', 'turns'}
IPYTHONS = '_render_traceback_'  # a method that IPython looks for
OWN_WORDS = {'Plan': 'preflight/', 'c': 'models/'}  # a class, a parameter -> the one folder that may have it


def sources():
    """(path below the package, text, tree) of every module."""
    for folder, _, files in os.walk(PACKAGE):
        for name in sorted(files):
            if name.endswith('.py'):
                path = os.path.join(folder, name)
                with open(path, encoding='utf8') as file:
                    text = file.read()
                yield os.path.relpath(path, PACKAGE).replace(os.sep, '/'), text, ast.parse(text)


SOURCES = sorted(sources())
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def none(offenders):
    """Fails with all of them, a line each."""
    offenders = sorted(set(offenders))
    if offenders:
        pytest.fail(f'{len(offenders)} of them:\n' + '\n'.join(offenders), pytrace=False)


def nodes(*kinds):
    """(path, node) of every syntax node of these kinds."""
    return ((path, node) for path, _, tree in SOURCES for node in ast.walk(tree) if isinstance(node, kinds))


def arguments(function):
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]


def imports(tree):
    """The modules of grpo_jax that a module imports, as paths below the package; '' for the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f'{"." * node.level}{node.module or ""}.{alias.name}' for alias in node.names]
        else:
            continue
        for name in names:
            if name.split('.')[0] in ('grpo_jax', 'benchmarks', 'tests', 'launch', ''):
                yield name


def test_every_module_has_a_floor():
    rooms = {room for floor in FLOORS for room in floor}
    none(path for path, _, _ in SOURCES if '__init__' != (room := room_of(path)) and room not in rooms)


def test_no_import_goes_up():
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    outside = len(FLOORS)  # benchmarks and tests stand above all; a relative import has no floor
    upward = []
    for path, _, tree in SOURCES:
        for name in imports(tree):
            package, _, rest = name.partition('.')
            target = rest.split('.')[0]
            if (package, target) in (('grpo_jax', 'PACKAGE'), ('grpo_jax', '__version__')):
                continue
            height = floor_of.get(target, outside) if package == 'grpo_jax' else outside
            if height > floor_of.get(room_of(path), -1):
                upward.append(f'{path} imports {name}')
    none(upward)


def room_of(path):
    return path.removesuffix('.py').split('/')[0]


def test_a_folders_door_only_opens_it():
    """__init__.py imports, and defines nothing."""
    none(
        f'{path}:{node.name}' for path, node in nodes(*FUNCTIONS, ast.ClassDef) if path.rsplit('/')[-1] == '__init__.py'
    )


def test_no_file_function_or_class_outgrows_the_house():
    sizes = [(path, text.count('\n'), FILE_LINES) for path, text, _ in SOURCES]
    for path, node in nodes(*FUNCTIONS, ast.ClassDef):
        limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
        sizes.append((f'{path}:{node.name}', node.end_lineno - node.lineno + 1, limit))
    none(f'{name}: {lines} lines' for name, lines, limit in sizes if lines > limit and name not in LONGER)


def test_no_function_has_more_than_eight_parameters():
    many = {
        f'{path}:{getattr(node, "name", "lambda")}': count
        for path, node in nodes(*FUNCTIONS, ast.Lambda)
        if (count := len([a for a in arguments(node) if a.arg not in ('self', 'cls')])) > PARAMETERS
    }
    none(f'{name}: {count} parameters' for name, count in many.items() if name not in MORE_PARAMETERS)
    assert set(MORE_PARAMETERS) <= set(many), 'an exception that is none'


def test_retired_words_are_gone():
    words = [f'{path}: module' for path, _, _ in SOURCES if path.rsplit('/')[-1].removesuffix('.py') in RETIRED_MODULES]
    for path, node in nodes(ast.Name, ast.arg, ast.Attribute, ast.keyword, ast.ClassDef, *FUNCTIONS):
        name = next(getattr(node, key) for key in ('id', 'arg', 'attr', 'name') if hasattr(node, key))
        if name in RETIRED_NAMES or (name and re.search('^of_|[^_]_$', name) and name != IPYTHONS):
            words.append(f'{path}: {name}')
    words += [f'{path}: {name}' for path, name in public_names() if name in RETIRED_PUBLIC_NAMES]
    none(words)


def test_a_word_of_one_folder_is_used_nowhere_else():
    named = [(path, node.name) for path, node in nodes(ast.ClassDef)]
    named += [(path, a.arg) for path, node in nodes(*FUNCTIONS) for a in arguments(node)]
    none(
        f'{path}: {name}'
        for path, name in named
        if name in OWN_WORDS and not path.startswith(OWN_WORDS[name]) and (name != 'c' or path not in PUBLIC_C)
    )


def test_no_public_name_is_defined_in_more_than_two_modules():
    where = defaultdict(set)
    for path, name in public_names():
        where[name].add(path)
    none(f'{name}: {", ".join(sorted(paths))}' for name, paths in where.items() if len(paths) > 2)


def public_names():
    """(path, name) of every function and class at a module's top level, but for names that files share by contract."""
    for path, _, tree in SOURCES:
        for node in tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name[0] != '_' and node.name not in SHARED_NAMES:
                yield path, node.name


# what has no promise of stability, as it stands in a source: a private or experimental module, or a compiler option
UNSTABLE = re.compile(r'jax\._src[\w.]*|jax\.experimental[\w.]*|xla_\w+|jax\.config\.jax_threefry\w+')
PAGE = os.path.join(ROOT, 'docs', 'what_breaks_with_jax.md')


def unstable_uses():
    """{(path, name)} of what leans on jax beyond its promises; a module's name ends with what is imported from it."""
    for path, text, tree in SOURCES:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or '').startswith(('jax._src', 'jax.experimental')):
                yield from ((path, f'{node.module}.{alias.name}') for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((path, a.name) for a in node.names if a.name.startswith(('jax._src', 'jax.experimental')))
        lines = [line for line in text.splitlines() if not line.startswith(('from ', 'import '))]
        yield from ((path, name) for name in UNSTABLE.findall('\n'.join(lines)))


def listed():
    """{(path, name)} of the rows of the page's tables."""
    with open(PAGE, encoding='utf8') as file:
        rows = [re.findall(r'`([^`]+)`', line) for line in file if line.startswith('| `')]
    return {(path, row[0]) for row in rows for path in row[1:] if path.endswith('.py')}


def test_the_page_lists_every_use_of_unstable_jax_and_no_other():
    uses = set(unstable_uses())
    none(f'{path}: {name} is not in docs/what_breaks_with_jax.md' for path, name in uses - listed())
    unstable = {(path, name) for path, name in listed() if UNSTABLE.fullmatch(name)}
    none(f'{path} does not use {name}, which docs/what_breaks_with_jax.md lists' for path, name in unstable - uses)


@pytest.mark.parametrize('name', sorted({name for _, name in unstable_uses() if name.startswith('jax.')}))
def test_what_is_unstable_still_exists_in_this_jax(name):
    with contextlib.suppress(ModuleNotFoundError):
        assert importlib.import_module(name)
        return
    owner, _, attribute = name.rpartition('.')
    owner = jax.config if owner == 'jax.config' else importlib.import_module(owner)
    assert hasattr(owner, attribute)
