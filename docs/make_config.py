"""Writes docs/config.md: the keys of configs/default.py with their defaults and comments, below config_notes.md.

python docs/make_config.py
"""

import ast
import importlib
import inspect
import io
import os
import sys
import tokenize
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, 'docs'))

from make_algorithms import table  # noqa: E402

from grpo_jax import diagnose, ranges  # noqa: E402
from grpo_jax.algorithms import pieces  # noqa: E402
from grpo_jax.algorithms.algorithm import MODULES, Algorithm  # noqa: E402
from grpo_jax.configs.recipes import settings as recipe_settings  # noqa: E402
from grpo_jax.learner import Learning, Optimization  # noqa: E402
from grpo_jax.models.lora import LoraOptions  # noqa: E402
from grpo_jax.run import settings  # noqa: E402
from grpo_jax.sampler import sampling  # noqa: E402
from grpo_jax.sharding.mesh import AXES  # noqa: E402

SOURCE = os.path.join(ROOT, 'configs', 'default.py')
TARGET = os.path.join(ROOT, 'docs', 'config.md')
TYPES = {  # section -> the types that read it
    '': [settings.Settings],
    'model': [settings.ModelSource],
    'model.lora': [LoraOptions],
    'data': [settings.DataOptions],
    'rollout': [settings.Sampling, settings.Settings],
    'reward': [settings.RewardOptions],
    'collection': [settings.Collection],
    'reference': [settings.ReferenceSource],
    'teacher': [settings.TeacherSource],
    'algorithm': [Algorithm, Learning],
    'learner': [Learning],
    **{name: [Optimization] for name in ('optimizer', 'critic_optimizer', 'supervised.optimizer')},
    'supervised': [settings.Supervised],
    'reward_model': [settings.RewardModelOptions],
    'evaluation': [settings.Evaluation],
    'checkpoint': [settings.Cadence],
    'log': [settings.Cadence],
    'diagnose': [settings.DiagnoseOptions],
}
ELSEWHERE = {  # keys that no field has under their name
    **{f'mesh.{axis}': ranges.Count for axis in AXES},
    'rollout.cache_gib': sampling.CACHE_GIB,
    'rollout.thinking_end': str,
    'checkpoint.every': settings.Cadence.__annotations__['checkpoint'],
}
NOTES = os.path.join(ROOT, 'docs', 'config_notes.md')


def text():
    """The whole page."""
    with open(NOTES, encoding='utf8') as file:
        notes = file.read()
    page = notes.replace('<!-- keys -->\n', keys()).replace('<!-- published -->', published())
    page = page.replace('<!-- recipes -->', recipes())
    return f'<!-- Written by docs/make_config.py, from configs/default.py and config_notes.md. -->\n\n{page}'


def published():
    """The table of published settings."""
    rows = [(f'`{p.setting}`', p.values, p.methods, p.models, p.sources) for p in diagnose.PUBLISHED]
    return table('setting | published | for | models | sources', rows)


def recipes():
    """The table of the recipes' settings: what a paper says; in parentheses what it does not, and the recipe chose."""
    rows = []
    for row, config in zip(recipe_settings.ROWS, recipe_settings.configs(), strict=True):
        numbers = {key: f'{recipe_settings.read(config, key):g}' for key in recipe_settings.COLUMNS.values()}
        cells = [n if key in row.values else f'({n})' if key in row.chosen else '' for key, n in numbers.items()]
        elsewhere = []
        for said in row.said:
            others = [f'`{key}={value}`' for key, value in said.values.items() if key not in numbers]
            elsewhere.append(': '.join(filter(None, [said.where, ', '.join(others)])))
        file = f'[{row.recipe}](../configs/recipes/{row.recipe}.py)'
        source = f'[{row.paper}](https://arxiv.org/abs/{row.paper}), {"; ".join(elsewhere)}'
        rows.append((f'{file} {row.stage}'.strip(), *cells, source))
    return table(' | '.join(['recipe', *recipe_settings.COLUMNS, 'source']), rows)


def keys():
    """A heading and a table for each section, in the order of configs/default.py."""
    meanings, sections = read_comments(), {}
    order = {path: number for number, path in enumerate(meanings)}
    for path, value in sorted(leaves(defaults().to_dict()), key=lambda leaf: order.get(leaf[0], len(order))):
        section, _, key = path.rpartition('.')
        meaning = meanings.get(path, meanings.get(f'_optimizer.{key}', ''))
        if section == 'algorithm' and key in MODULES:
            meaning = '; '.join(filter(None, [f'a function of `{file_of(MODULES[key])}`', meaning]))
        row = (f'`{path}`', f'`{value!r}`', values_of(path), meaning)
        sections.setdefault(section.partition('.')[0], []).append(row + (readers(key),) * (section == 'algorithm'))
    pages = []
    for section, rows in sections.items():
        headings = 'key | default | values | meaning' + ' | read by' * (section == 'algorithm')
        pages += [f'## {section or "The run"}', meanings.get(section, '').capitalize(), table(headings, rows)]
    return '\n\n'.join(filter(None, pages)) + '\n'


def defaults():
    """The config before any preset."""
    module = importlib.import_module('grpo_jax.configs.default')
    with mock.patch.object(module, '_apply'):
        return module.get_config()


def leaves(tree, prefix=''):
    """(dotted key, value) of all keys; the options of a reward stand in one row."""
    for key, value in tree.items():
        if isinstance(value, dict) and value and prefix != 'reward.options.':
            yield from leaves(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value


def read_comments():
    """Dotted key -> the comment behind it in configs/default.py, with the lines below that only go on with it."""
    with open(SOURCE, encoding='utf8') as file:
        source = file.read()
    behind, below = {}, {}  # line -> comment: behind code, and alone on its line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            (below if alone else behind)[token.start[0]] = token.string.lstrip('# ')
    meanings = {}
    for first, last, path in sorted(places(ast.parse(source))):
        meaning = '; '.join(behind[line] for line in range(first, last + 1) if line in behind)
        while meaning and last + 1 in below:
            last += 1
            meaning += f' {below[last]}'
        meanings[path] = meaning
    return meanings


def places(tree):
    """(first line, last line, dotted key) of each key: of an assignment to config, or of a dict in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith('config.'):
            path = ast.unparse(node.targets[0]).removeprefix('config.')
            entries = next((value for value in ast.walk(node.value) if isinstance(value, ast.Dict)), None)
            yield from [(node.lineno, node.end_lineno, path)] if entries is None else items(entries, path)
        if isinstance(node, ast.FunctionDef) and node.name == '_optimizer':
            yield from items(next(value for value in ast.walk(node) if isinstance(value, ast.Dict)), node.name)


def items(node, path):
    """The places of a dict's keys."""
    for key, value in zip(node.keys, node.values, strict=True):
        yield key.lineno, value.end_lineno, f'{path}.{key.value}'


def readers(number):
    """The names of the pieces that read a number of config.algorithm."""
    every = [piece for module in MODULES.values() for piece in pieces.named(module).items()]
    reading = [name for name, piece in every if number in {*pieces.numbers(piece), *pieces.reads(piece)} - {*MODULES}]
    return ', '.join(f'`{name}`' for name in reading)


def values_of(path):
    """What a key's values may be, in words; '' where any of its type do."""
    section, _, key = path.rpartition('.')
    annotation = ELSEWHERE.get(path)
    every = [piece for module in MODULES.values() for piece in pieces.named(module).values()]
    for reader in [*TYPES.get(section, []), *(every if section == 'algorithm' else [])]:
        parameter = inspect.signature(reader).parameters.get(key)
        if annotation is None and parameter and (parameter.kind is parameter.KEYWORD_ONLY or reader not in every):
            annotation = parameter.annotation
    words = ranges.in_words(annotation or str).replace(f' and at most {2**31 - 1}', '')
    plain = ('a text', 'a value', 'True or False', 'a section of keys', 'a tuple, each a value')
    return '' if words in plain else words


def file_of(module):
    """The name of a module's file."""
    return os.path.basename(module.__file__)


if __name__ == '__main__':
    with open(TARGET, 'w', encoding='utf8') as target:
        target.write(text())
