"""Writes docs/config.md, a row for each key below the text of config_notes.md, and the kinds of keys in checkpoints.md.

The field of a key gives its values, its default and its kind. The comment behind or above the field gives its meaning.

python docs/make_config.py
"""

import ast
from collections import defaultdict
from collections.abc import Mapping
import importlib
import inspect
import io
import os
import re
import sys
import textwrap
import tokenize
from typing import get_args
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, 'docs'))

from make_algorithms import table  # noqa: E402

from grpo_jax import diagnose, ranges  # noqa: E402
from grpo_jax.algorithms import pieces  # noqa: E402
from grpo_jax.algorithms.algorithm import MODULES  # noqa: E402
from grpo_jax.configs.recipes import settings as recipe_settings  # noqa: E402
from grpo_jax.ranges import Kind  # noqa: E402
from grpo_jax.rewards.build import declared_options  # noqa: E402
from grpo_jax.run import config_file, settings  # noqa: E402

DEFAULTS = os.path.join(ROOT, 'configs', 'default.py')
TARGET = os.path.join(ROOT, 'docs', 'config.md')
NOTES = os.path.join(ROOT, 'docs', 'config_notes.md')
RESULTS = os.path.join(ROOT, 'docs', 'results.md')
CHECKPOINTS = os.path.join(ROOT, 'docs', 'checkpoints.md')
PLAIN = ('a text', 'a value', 'True or False', 'a section of keys', 'a tuple, each a value')  # any value of a type


def text():
    """The whole page."""
    with open(NOTES, encoding='utf8') as file:
        notes = file.read()
    page = notes.replace('<!-- keys -->\n', keys()).replace('<!-- published -->', published())
    page = page.replace('<!-- recipes -->', recipes()).replace('<!-- experiments -->', experiments())
    return f'<!-- Written by docs/make_config.py, from the fields of the keys and config_notes.md. -->\n\n{page}'


def experiments():
    """The table of the experiments: what each is, by its docstring, and what was measured, by the line there.

    `Measured: MACHINE | TIME | FIGURE` repeats docs/results.md. Of a published run, the figure is theirs.
    """
    with open(RESULTS, encoding='utf8') as file:
        theirs = {row[1].strip(' `'): row for row in (line.split('|') for line in file) if len(row) == 9}
    rows = []
    for name in (name for name in config_file.experiments() if not name.startswith('labs/')):
        with open(os.path.join(ROOT, 'configs', f'{name}.py'), encoding='utf8') as file:
            docstring = ast.get_docstring(ast.parse(file.read()))
        measured = re.search(r'^Measured: (.*)$', docstring, re.M)
        machine, time, figure = measured[1].split(' | ') if measured else ('not run', '', '')
        if row := theirs.get(name.rpartition('/')[2]):
            figure = f'{row[3].strip()}: {row[4].strip()} {row[6].strip()}'
        purpose = docstring.partition('\n\n')[0].replace('\n', ' ')
        rows.append((f'[`{name}`](../configs/{name}.py)', purpose, machine, time, figure))
    return table('experiment | what it is | measured on | time | held-out figures, before and after', rows)


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
    """A heading and a table for each section, in the order of settings.Keys."""
    config, meanings, rows, pages = defaults().to_dict(), sentences(settings.Keys), {}, []
    marks, whole = ranges.marks_of(settings.Keys), {}
    for name, key in ranges.keys_of(settings.Keys).items():
        of_section = [mark for mark in get_args(key.annotation) if isinstance(mark, ranges.ReadWith)]
        whole |= dict.fromkeys(of_section if ranges.type_of(key.annotation) else [], name)
    for *row, meaning in rows_of(settings.Keys, config):
        key = row[0].strip('`')
        only = ' and '.join(str(mark) for mark in marks.get(key, ()) if mark not in whole)
        row = (*row, f'{meaning}. Only with {only}' if only else meaning)
        rows.setdefault(key.rpartition('.')[0].partition('.')[0], []).append(row)
    for mark, section in whole.items():
        meanings[section] = f'{meanings[section]}. Read only with {mark}.'
    rows['algorithm'] = [(*row[:3], row[3] + readers(row[0].strip('`').partition('.')[2])) for row in rows['algorithm']]
    for section, own in rows.items():
        about = meanings[section] if section else ''
        headings = 'key | default | values | meaning'
        pages += [f'## {section or "The run"}', about[:1].upper() + about[1:], table(headings, own)]
    return '\n\n'.join(filter(None, pages)) + '\n'


def rows_of(declared, section, prefix=''):
    """Yields (key, default, values, meaning) for each key of an options type and of the sections in it."""
    meanings = sentences(declared)
    for name, key in ranges.keys_of(declared).items():
        path, options = prefix + name, ranges.type_of(key.annotation)
        if options:
            yield from rows_of(options, section[name], f'{path}.')
        elif path == 'reward.options':
            listed = listed_in_defaults()  # in their order there; each reward in one row
            for reward in sorted(section[name], key=lambda reward: [*listed].index(f'reward.options.{reward}')):
                yield cells(f'{path}.{reward}', section[name][reward], Mapping, listed[f'{path}.{reward}'])
        elif path.startswith('algorithm.') and name in MODULES:
            names = ', '.join(f'`{piece}`' for piece in pieces.list_pieces(MODULES[name]))
            values = f'a tuple of {names}' if name == 'regularizers' else names
            yield f'`{path}`', f'`{section[name]!r}`', f'{values}, or FILE.py:NAME of yours', meanings[name]
        else:
            yield cells(path, section[name], key.annotation, meanings[name])
    if prefix == 'algorithm.':
        for name, (key, meaning) in numbers().items():
            if name not in ranges.keys_of(declared):
                yield cells(prefix + name, section[name], key.annotation, meaning)


def cells(path, default, annotation, meaning):
    """A row; the values are named where not all of a type will do."""
    values = ranges.in_words(annotation).replace(f' and at most {2**31 - 1}', '')
    return f'`{path}`', f'`{default!r}`', '' if values in PLAIN else values, meaning


def numbers():
    """{name: (parameter, meaning)} of the numbers of all pieces; the first piece that has a meaning gives it."""
    found = {}
    for piece in (piece for module in MODULES.values() for piece in pieces.list_pieces(module).values()):
        meanings = sentences(piece)
        for name, key in inspect.signature(piece).parameters.items():
            if key.kind is key.KEYWORD_ONLY:
                known, meaning = found.get(name, (key, ''))
                found[name] = known, meaning or meanings[name]
    return found


def readers(number):
    """The pieces that read a number of config.algorithm, behind its meaning; '' where it is none."""
    every = [piece for module in MODULES.values() for piece in pieces.list_pieces(module).items()]
    reading = [name for name, piece in every if number in {*pieces.numbers(piece), *pieces.reads(piece)} - {*MODULES}]
    return '. Read by ' + ', '.join(f'`{name}`' for name in reading) if reading else ''


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


def sentences(declared):
    """Name -> the comment behind each field of an options type, or number of a piece, or on the lines above it."""
    source = textwrap.dedent(inspect.getsource(declared))
    behind, alone = comments(source)
    (tree,) = ast.parse(source).body
    if isinstance(tree, ast.ClassDef):
        nodes = {node.target.id: node for node in tree.body if isinstance(node, ast.AnnAssign)}
    else:
        nodes = {node.arg: node for node in tree.args.kwonlyargs}
    meanings = {}
    for name, node in nodes.items():
        first, lines = node.lineno, []
        while first - 1 in alone:
            first -= 1
            lines.insert(0, alone[first])
        meanings[name] = behind.get(node.end_lineno, ' '.join(lines))
        flat = isinstance(tree, ast.ClassDef) and ranges.type_of(declared.__annotations__[name])
        if flat and name not in ranges.keys_of(declared):
            meanings = sentences(flat) | meanings
    return meanings


def comments(source):
    """(line -> comment behind code, line -> comment alone on its line)."""
    behind, alone = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            before = token.line[: token.start[1]].strip()
            (behind if before else alone)[token.start[0]] = token.string.lstrip('# ')
    return behind, alone


def listed_in_defaults():
    """Dotted key -> the comment behind it in configs/default.py, which lists common keys and all reward.options."""
    with open(DEFAULTS, encoding='utf8') as file:
        source = file.read()
    behind, _ = comments(source)
    listed = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith('config.'):
            path = ast.unparse(node.targets[0]).removeprefix('config.')
            if isinstance(node.value, ast.Call):  # a ConfigDict of sections
                entries = {
                    f'{path}.{key.value}': (key.lineno, value.end_lineno)
                    for key, value in zip(node.value.args[0].keys, node.value.args[0].values, strict=True)
                }
            else:
                entries = {path: (node.lineno, node.end_lineno)}
            for name, (first, last) in entries.items():
                listed[name] = '; '.join(behind[line] for line in range(first, last + 1) if line in behind)
    return listed


def kinds():
    """Kind -> its keys; SECTION.* stands for the keys of a section that are not named themselves."""
    found = defaultdict(list)
    _add_kinds(found, settings.Keys, '', None)
    for name in defaults().reward.options:
        for option, key in sorted(declared_options(name).items()):
            if own := ranges.kind_in(key.annotation):
                found[own].append(f'reward.options.{name}.{option}')
    found[Kind.PATH] += settings.PATH_OPTIONS
    return found


def _add_kinds(found, declared, prefix, around):
    """Adds the keys of an options type to found; around: the kind of the section, where it says one."""
    for name, key in ranges.keys_of(declared).items():
        own, options = ranges.kind_in(key.annotation), ranges.type_of(key.annotation)
        alike = options and not any(ranges.kind_in(inner.annotation) for inner in ranges.keys_of(options).values())
        if own or (around is None and (alike or not options)):
            several = options or ranges.in_words(key.annotation) == 'a section of keys'
            found[own or Kind.FIXED].append(prefix + name + '.*' * bool(several))
        if options and not alike:
            _add_kinds(found, options, f'{prefix}{name}.', own)


def checkpoints():
    """The page docs/checkpoints.md with the keys of each kind in the table of kinds."""
    with open(CHECKPOINTS, encoding='utf8') as file:
        page = file.read()
    for kind, names in kinds().items():
        begin = f'\n| **{kind.value}** | '
        assert page.count(begin) == 1, f'no row of the kind {kind.value} in {CHECKPOINTS}'
        before, after = page.split(begin)
        page = before + begin + ' '.join(f'`{name}`' for name in names) + after[after.index(' | ') :]
    return page


if __name__ == '__main__':
    for path, page in {TARGET: text(), CHECKPOINTS: checkpoints()}.items():
        with open(path, 'w', encoding='utf8') as target:
            target.write(page)
