"""The pages of docs/ are what the code says, and what they name exists."""

import ast
import os
import re
import runpy

import pytest

from grpo_jax import algorithms, sweep
from grpo_jax.algorithms import pieces

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DOCS = os.path.join(ROOT, 'docs')
PAGES = sorted(name for name in os.listdir(DOCS) if name.endswith('.md'))
# presets that no paper describes: a textbook method, a trainer's defaults, and this project's own choice
WITHOUT_PAPER = {'sft', 'reinforce', 'olmo3_like', 'default_rlvr'}


@pytest.fixture(scope='module')
def script():
    return runpy.run_path(os.path.join(DOCS, 'make_algorithms.py'))


def page(name):
    with open(os.path.join(DOCS, name), encoding='utf8') as file:
        return file.read()


def test_the_page_of_algorithms_is_what_the_script_makes(script):
    assert page('algorithms.md') == script['text'](), 'run: python docs/make_algorithms.py'


def test_every_test_that_a_page_names_exists():
    there = set()
    for folder, _, files in os.walk(os.path.join(ROOT, 'tests')):
        for name in (name for name in files if name.endswith('.py')):
            with open(os.path.join(folder, name), encoding='utf8') as file:
                there |= {
                    (name, node.name) for node in ast.walk(ast.parse(file.read())) if isinstance(node, ast.FunctionDef)
                }
    named = {pair for name in PAGES for pair in re.findall(r'`(test_\w+\.py)::(test_\w+)`', page(name))}
    assert len(named) > 30 and named <= there, named - there


@pytest.mark.parametrize('name', PAGES)
def test_links_to_files_lead_somewhere(name):
    for target in re.findall(r'\]\(([^)]+)\)', page(name)):
        if not target.startswith(('http', '#')):
            assert os.path.exists(os.path.join(DOCS, target)), target


def test_advice_is_for_presets_and_a_preset_needs_none(script, monkeypatch):
    assert {*script['ADVICE']} <= {*sweep.choose('all')}
    monkeypatch.delitem(script['ADVICE'], 'cispo')
    assert '| [2506.13585](https://arxiv.org/abs/2506.13585) |  |  |' in script['advice']()
    assert {grade for grade, _ in script['ADVICE'].values()} <= set('PRSW')


def test_presets_after_papers_name_their_arxiv_number(script):
    for line in script['advice']().splitlines()[2:]:
        name = line.split('`')[1]
        assert ('](https://arxiv.org/abs/' in line) == (name not in WITHOUT_PAPER), name
    # the names that several papers claim
    assert '[2505.18086](' in script['advice']() and '[2508.03772](' in script['advice']()


def test_the_tables_of_pieces_hold_every_piece_that_a_preset_takes(script):
    section, tables = script['importlib'].import_module('grpo_jax.configs.default').get_config, script['all_pieces']()
    for preset in sweep.choose('all'):
        method = algorithms.make(section(preset).algorithm)
        for key in script['MODULES']:
            chosen = getattr(method, key)
            for piece in chosen if key == 'regularizers' else (chosen,):
                assert f'| `{pieces.name_of(piece)}` |' in tables, (preset, key)


def test_bounds_in_the_table_are_those_of_the_config(script):
    rows = {line.split('`')[1]: line for line in script['composition']().splitlines()[2:]}
    assert '| `clip` 0.2 / 0.28 |' in rows['dapo'] and '| resample |' in rows['dapo']
    assert '| `clip` 0.0003 / 0.0004 |' in rows['gspo']
    assert '| `k3` in loss, 0.04 |' in rows['grpo'] and rows['grpo'].endswith('| frozen |')
    assert '| `k1` in reward by token, 0.05 |' in rows['ppo']
    assert rows['deepseek_r1'].endswith('| renewed every 400 |') and rows['dapo'].endswith('| none |')
    assert '| `token` to sampler |' in rows['dppo']
