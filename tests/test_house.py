"""The house keeps its shape: floors, places, sizes, budgets, and one word for one thing.

A failure lists every offender at once. What no test can hold counts more: that a person finds the loss, the advantage,
the sampler's loop, what a step draws and what a checkpoint holds in a few files from `train.run`.
"""

import ast
from collections import defaultdict
import contextlib
import fnmatch
import importlib
import io
import os
import re
import subprocess
import sys
import tokenize

import jax
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = os.path.join(ROOT, 'grpo_jax')

# from the ground; a module may import its own floor and those below. A place is a folder, or a module of one
FLOORS = [
    (
        *('types', 'errors', 'example', 'expressions', 'statistics', 'grouping', 'coming_from', 'ranges', 'text'),
        'user_files',
    ),
    ('hosts',),
    ('algorithms',),
    ('sharding',),
    ('models', 'workers'),
    ('data', 'sampler', 'learner'),
    ('rewards',),
    (*(f'run/{name}' for name in ('rows', 'console', 'writer', 'digest', 'checkpoint')),),
    ('collect', 'diagnose'),
    ('run',),
    ('figures', 'train', 'supervised', 'evaluate', 'sample', 'reward_model'),
    ('tools',),
    ('__main__',),
]
BATTERIES = ('rewards', 'data', 'environments', 'workers', 'diagnose')  # chosen by a file's name, or passive

# upper bounds of an honest house, which each issue moves by what it may add: lines and tokens of the core and of all
BUDGETS = {'core': (24_444, 186_664), 'all': (42_075, 313_021)}
RUN_FILES = 16
DEMO_MODULES, MINIMAL_MODULES = 156, 43  # of grpo_jax, that two steps of the demo load, and examples/minimal_loop.py

FILE_LINES, FUNCTION_LINES, PARAMETERS, LEAST_LINES = 700, 100, 8, 60
TRAIN_RUN_LINES = 60  # of code
MORE_PARAMETERS = {
    'algorithms/advantages.py:gtpo': 'a piece: it reads five arrays, and has four numbers of its own',
    'sampler/generate.py:generate': 'public, and called by keyword in notebooks; `limit` has a default',
}
# modules with one importer that are shorter than LEAST_LINES
SMALL = set()
# file names that occur twice, and where
TWINS = {
    'countdown.py': {'data', 'rewards'},  # a data set and its reward
    'advice.py': {'diagnose', 'tools/preflight'},
    'files.py': {'data', 'hosts'},
    'options.py': {'collect', 'diagnose', 'learner'},
    'programs.py': {'learner', 'sampler'},
    'reward_model.py': {'', 'learner'},
    'rollouts.py': {'data', 'tools/report'},
    'schedule.py': {'collect', 'sampler'},  # of steps, and of a rollout's batches
    'verdict.py': {'tools/preflight', 'tools/report'},
    'verifier.py': {'rewards/code', 'rewards/math'},
}
# folders that could be packages of their own: others import only what __init__ opens, and these alone stand below them
DOORS = {
    'rewards/code': {'example', 'ranges', 'workers'},
    'rewards/math': {'example', 'expressions', 'workers'},
    'workers': {'errors'},
}
# functions that take a whole Run, Settings or config, and are no builder: make_*, open_*, from_config, commands
CARRIERS = {
    'run/config_file.py:add_declared': 'completes a config before anything reads it',
    'run/config_file.py:_check_key': 'looks a key up in it',
    'run/config_file.py:_look_beside': 'the last step of read_config',
    'run/settings.py:_read_key': 'the first check of Settings.from_config',
    'run/settings.py:lock': 'the last step of default.get_config',
    'run/settings.py:recorded_form': 'what config.json has',
    'supervised.py:_supervised_config': 'makes a config of another one',
    'train.py:check': 'a command: train --check',
    'supervised.py:cold_start': 'the run of a run: it opens and trains',
}
UNIVERSE = {'Run', 'Settings', 'ConfigDict', 'Experiment'}  # types
UNIVERSAL = {'run', 'experiment', 'settings', 'config'}  # names of parameters, where no other type stands beside them
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
    *('book', 'covariance', 'layout', 'multihost', 'parts', 'placement', 'program', 'reward_scorer', 'score'),
    *('scores', 'utils', 'wave'),
}
RETIRED_NAMES = {
    *('Book', 'Layout', 'Parts', 'Program', 'Programs', 'Scored', 'Scorer', 'Scoring', 'Wave'),
    *('bank', 'ex', 'found', 'outlook', 'parked', 'said', 'told'),
}
RETIRED_PUBLIC_NAMES = {'score', 'scores', 'scored', 'layout', 'parts', 'turns'}
IPYTHONS = '_render_traceback_'  # a method that IPython looks for
OWN_WORDS = {'Plan': 'tools/preflight/', 'c': 'models/'}  # a class, a parameter -> the one folder that may have it


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


def place_of(path):
    """The place of a module, the longest that is on a floor; None without one."""
    module = path.removesuffix('.py').removesuffix('/__init__')
    places = [place for floor in FLOORS for place in floor if module == place or module.startswith(f'{place}/')]
    return max(places, key=len, default=None)


def test_every_module_has_a_place():
    none(path for path, _, _ in SOURCES if path != '__init__.py' and place_of(path) is None)


def test_imports_go_one_way():
    floor_of = {place: floor for floor, places in enumerate(FLOORS) for place in places}
    modules = {path.removesuffix('.py').removesuffix('/__init__') for path, _, _ in SOURCES}
    upward = []
    for path, _, tree in SOURCES:
        for name in imports(tree):
            package, _, rest = name.partition('.')
            if package == 'grpo_jax' and rest in ('PACKAGE', '__version__'):
                continue
            target = rest.replace('.', '/')
            target = target if target in modules else target.rpartition('/')[0]  # a name of the module
            place = place_of(f'{target}.py') if package == 'grpo_jax' and target else None
            height = len(FLOORS) if place is None else floor_of[place]  # benchmarks and tests stand above all
            own = place_of(path)
            if height > (-1 if own is None else floor_of[own]):
                upward.append(f'{path} imports {name}')
    none(upward)


def test_a_folder_with_one_door_is_entered_by_it_and_leans_on_little():
    modules = {path.removesuffix('.py') for path, _, _ in SOURCES}
    wrong = []
    for path, _, tree in SOURCES:
        for name in imports(tree):
            target = name.removeprefix('grpo_jax').lstrip('.').replace('.', '/')
            module = target if target in modules else target.rpartition('/')[0]  # a name of the module, or of a door
            for door, ground in DOORS.items():
                inside = path.startswith(f'{door}/')
                if not inside and module.startswith(f'{door}/'):
                    wrong.append(f'{path} imports {name}, and not by the door of {door}')
                if inside and module != door and not module.startswith(f'{door}/') and module not in ground:
                    wrong.append(f'{path} imports {name}, which {door} must not know')
    none(wrong)


def is_core(path):
    return path.split('/')[0] not in (*BATTERIES, 'tools')


def test_the_house_stays_within_its_budgets():
    sizes = {'core': [0, 0], 'all': [0, 0]}
    for path, text, _ in SOURCES:
        tokens = sum(1 for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip())
        for part in ('core', 'all') if is_core(path) else ('all',):
            sizes[part][0] += text.count('\n')
            sizes[part][1] += tokens
    none(
        f'{part}: {size} {unit}, at most {most}'
        for part in sizes
        for unit, size, most in zip(('lines', 'tokens'), sizes[part], BUDGETS[part], strict=True)
        if size > most
    )
    assert sum(path.startswith('run/') for path, _, _ in SOURCES) <= RUN_FILES


def test_a_module_with_one_importer_is_worth_a_file():
    """But for files that are found by their name."""
    importers, sizes = defaultdict(set), {}
    modules = {path.removesuffix('.py') for path, _, _ in SOURCES}
    for path, text, tree in SOURCES:
        sizes[path.removesuffix('.py')] = text.count('\n')
        for name in imports(tree):
            target = name.removeprefix('grpo_jax').lstrip('.').replace('.', '/')
            target = target if target in modules else target.rpartition('/')[0]
            if target in modules:
                importers[target].add(path)
    small = {module for module, paths in importers.items() if len(paths) == 1 and sizes[module] < LEAST_LINES}
    small = {module for module in small if not module.startswith(('rewards/', 'data/'))}  # registries
    none(f'{module}: {sizes[module]} lines, and one importer' for module in small - SMALL)
    none(f'{module} is no exception any more' for module in SMALL - small)


def test_a_file_name_occurs_once():
    where = defaultdict(set)
    for path, _, _ in SOURCES:
        folder, _, name = path.rpartition('/')
        if name not in ('__init__.py', '__main__.py'):
            where[name].add(folder)
    twins = {name: folders for name, folders in where.items() if len(folders) > 1}
    none(f'{name}: {sorted(folders)}' for name, folders in twins.items() if folders != TWINS.get(name))
    none(f'{name} is no exception any more' for name in TWINS.keys() - twins.keys())


def is_builder(function):
    named = ('from_config', 'run', 'main', 'is_finished')
    return function.name.startswith(('make_', 'open_')) or function.name in named


def carries_the_universe(function):
    """The parameters of a function that are a whole Run, Settings or config, by their annotation or their name."""
    for a in arguments(function):
        written = ast.unparse(a.annotation) if a.annotation else ''
        types = set(re.findall(r'\w+', written))
        if types & UNIVERSE or (a.arg in UNIVERSAL and written in ('', 'Any')):
            yield a.arg


def test_nobody_carries_the_universe():
    carriers = {
        f'{path}:{node.name}': name
        for path, node in nodes(*FUNCTIONS)
        if is_core(path) and not is_builder(node)
        for name in carries_the_universe(node)
        if not inside_a_builder(path, node)
    }
    none(f'{function} takes {name}' for function, name in carriers.items() if function not in CARRIERS)
    none(f'{function} is no exception any more' for function in CARRIERS.keys() - carriers.keys())


def inside_a_builder(path, function):
    """Whether a function is written inside of a builder, or as a helper of one in run/open.py and run/branch.py."""
    if path in ('run/open.py', 'run/branch.py') and function.name.startswith('_'):
        return True
    return any(
        is_builder(outer) and any(inner is function for inner in ast.walk(outer))
        for other, outer in nodes(*FUNCTIONS)
        if other == path
    )


def test_nobody_reaches_for_what_is_private_elsewhere():
    """Of another object or module; a class may look into others of its own kind."""
    reaching = []
    for path, _, tree in SOURCES:
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match('_[a-z]', node.attr) and isinstance(node.value, ast.Name):
                if node.value.id in imported - {'os'} and node.attr not in NAMEDTUPLE:
                    reaching.append(f'{path}: {node.value.id}.{node.attr}')
            elif isinstance(node, ast.ImportFrom) and (node.module or '').startswith('grpo_jax'):
                reaching += [f'{path}: {alias.name}' for alias in node.names if re.match('_[a-z]', alias.name)]
    none(reaching)


NAMEDTUPLE = {'_replace', '_fields', '_asdict', '_make', '_field_defaults'}


# what is slow to import, and seldom needed
LATE_IMPORTS = {'data/prompt_format.py:_render'}


def test_no_function_imports_of_this_package():
    """But registries, by a name in a config: these call importlib."""
    inner = []
    for path, function in nodes(*FUNCTIONS):
        for node in ast.walk(function):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                inner += [f'{path}:{function.name}' for name in imports(node) if 'grpo_jax' in name]
    none(set(inner) - LATE_IMPORTS)


COUNT = """
import sys
{}
print(sum(1 for name in sys.modules if name == 'grpo_jax' or name.startswith('grpo_jax.')))
"""


def count_modules(program):
    """How many modules of grpo_jax are loaded behind a program."""
    done = subprocess.run(
        [sys.executable, '-c', COUNT.format(program)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def test_the_example_of_a_minimal_loop_pulls_little():
    assert count_modules("sys.argv = ['x']; import examples.minimal_loop") <= MINIMAL_MODULES


def test_two_steps_of_the_demo_load_no_tool(tmp_path):
    program = f'from tests import tiny_run; train.run(tiny_run.config(steps=2), {str(tmp_path)!r})'
    no_tool = "assert not [name for name in sys.modules if name.startswith('grpo_jax.tools')]"
    assert count_modules(f'from grpo_jax import train; {program}; {no_tool}') <= DEMO_MODULES


def test_the_map_in_train_leads_to_what_it_names():
    text = next(text for path, text, _ in SOURCES if path == 'train.py')
    places = re.findall(r'([\w/]+\.py) \(([\w, ]+)\)', ' '.join(re.findall(r'^# +(.*)$', text, re.M)))
    assert len(places) > 40
    defined = defaultdict(set)
    for path, node in nodes(*FUNCTIONS, ast.ClassDef, ast.Assign):
        defined[path] |= {getattr(node, 'name', None), *(getattr(x, 'id', None) for x in getattr(node, 'targets', ()))}
    none(
        f'{name} is not in {path}' for path, names in places for name in names.split(', ') if name not in defined[path]
    )


def test_a_folders_door_only_opens_it():
    """__init__.py imports, and defines nothing."""
    none(
        f'{path}:{node.name}' for path, node in nodes(*FUNCTIONS, ast.ClassDef) if path.rsplit('/')[-1] == '__init__.py'
    )


def test_no_file_or_function_outgrows_the_house():
    sizes = [(path, text.count('\n'), FILE_LINES) for path, text, _ in SOURCES]
    sizes += [
        (f'{path}:{node.name}', node.end_lineno - node.lineno + 1, FUNCTION_LINES) for path, node in nodes(*FUNCTIONS)
    ]
    none(f'{name}: {lines} lines' for name, lines, limit in sizes if lines > limit)
    (train_run,) = (node for path, node in nodes(*FUNCTIONS) if (path, node.name) == ('train.py', 'run'))
    text = next(text for path, text, _ in SOURCES if path == 'train.py').splitlines()
    body = text[train_run.body[1].lineno - 1 : train_run.end_lineno]
    assert sum(1 for line in body if line.strip()) <= TRAIN_RUN_LINES


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


# where a library might do it; the objective, the sampler, the model and the loops are the project's own matter
REPLACEABLE = ('hosts', 'sharding', 'workers', 'run', 'data', 'rewards', 'tools', 'diagnose', 'models/hf')
REPLACEABLE_FILES = ('ranges.py', 'statistics.py', 'figures.py')


def test_every_module_written_by_hand_has_its_reason():
    with open(os.path.join(ROOT, 'docs', 'hand_written.md'), encoding='utf8') as file:
        named = re.findall(r'`([\w/]+(?:\*|\.py))`', file.read())
    places = (*(f'{place}/' for place in REPLACEABLE), *REPLACEABLE_FILES)
    large = [path for path, text, _ in SOURCES if path.startswith(places) and len(text.splitlines()) > 100]
    assert len(large) > 50
    without = [path for path in large if not any(fnmatch.fnmatch(path, name) for name in named)]
    none(f'{path} is not in docs/hand_written.md: which library was weighed, and why not?' for path in without)
    gone = [name for name in named if not any(fnmatch.fnmatch(path, name) for path, _, _ in SOURCES)]
    none(f'docs/hand_written.md names {name}, which is no module' for name in gone)


@pytest.mark.parametrize('name', sorted({name for _, name in unstable_uses() if name.startswith('jax.')}))
def test_what_is_unstable_still_exists_in_this_jax(name):
    with contextlib.suppress(ModuleNotFoundError):
        assert importlib.import_module(name)
        return
    owner, _, attribute = name.rpartition('.')
    owner = jax.config if owner == 'jax.config' else importlib.import_module(owner)
    assert hasattr(owner, attribute)
