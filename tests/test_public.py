"""docs/public.md has every name that notebooks, examples and pages use of grpo_jax, and each of them is there."""

import ast
import fnmatch
import importlib
import inspect
import json
import os
import re
import types

import pytest

from tests import doc_examples
from tests.doc_examples import PAGES, ROOT

ROWS = re.findall(r'^\| (`.*?`) \| .+ \|$', doc_examples.read('docs/public.md'), re.MULTILINE)
# name -> the arguments that are shown
PUBLIC = {
    name: [argument.rstrip('=') for argument in filter(None, arguments.split(', '))]
    for row in ROWS
    for name, arguments in re.findall(r'`([\w.*]+)(?:\((.*?)\))?`', row)
}


def lookup(name):
    """The module of grpo_jax, or what stands in one, by its dotted name."""
    module, _, attribute = f'grpo_jax.{name}'.rpartition('.')
    module = importlib.import_module(module)
    return getattr(module, attribute) if hasattr(module, attribute) else importlib.import_module(f'grpo_jax.{name}')


def is_module(name):
    return isinstance(lookup(name), types.ModuleType)


@pytest.mark.parametrize('name', [name for name in PUBLIC if '*' not in name])
def test_a_public_name_is_there_with_the_arguments_that_the_page_shows(name):
    value, missing = lookup(name), []
    if PUBLIC[name]:
        missing = [a for a in PUBLIC[name] if a not in inspect.signature(value).parameters]
    assert not missing and value.__doc__


def programs():
    """(place, source) of the notebooks, of the examples and of the pages."""
    for name in sorted(os.listdir(os.path.join(ROOT, 'notebooks'))):
        if name.endswith('.ipynb'):
            cells = json.loads(doc_examples.read(f'notebooks/{name}'))['cells']
            source = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
            yield name, re.sub('^%.*', '', source, flags=re.MULTILINE)
    for name in sorted(os.listdir(os.path.join(ROOT, 'examples'))):
        if name.endswith('.py'):
            yield name, doc_examples.read(f'examples/{name}')
    for page in PAGES:
        for block in doc_examples.blocks(page, 'python'):
            if not block.mark.startswith(('file: grpo_jax/', 'append: ')):  # which is the inside of the package
                yield page, block.text


def used(source):
    """The names below grpo_jax that a source uses, without modules."""
    tree, local = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'grpo_jax':
            for alias in node.names:
                local[alias.asname or alias.name] = f'{node.module}.{alias.name}'.removeprefix('grpo_jax.')

    def dotted(node):
        """The name of a module, or of what stands in one; None for any other expression."""
        if isinstance(node, ast.Name):
            return local.get(node.id)
        owner = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return f'{owner}.{node.attr}' if owner and is_module(owner) else None

    names = {*local.values(), *map(dotted, ast.walk(tree))} - {None}
    return {name for name in names if not is_module(name)}


def test_what_notebooks_examples_and_pages_use_is_public():
    uses = {(name, place) for place, source in programs() for name in used(source)}
    assert ('train.run', 'quickstart.ipynb') in uses and ('types.Example', 'docs/data.md') in uses and len(uses) > 100
    unlisted = [use for use in sorted(uses) if not any(fnmatch.fnmatchcase(use[0], pattern) for pattern in PUBLIC)]
    assert not unlisted
    idle = [name for name in PUBLIC if '*' in name and not any(fnmatch.fnmatchcase(use, name) for use, _ in uses)]
    assert not idle
