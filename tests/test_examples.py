"""The examples run, and do what they say."""

import ast
import importlib
import json
import os
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATH = os.path.join(ROOT, 'examples', 'minimal_loop.py')
TRAIN_LOOP = os.path.join(ROOT, 'examples', 'train_loop.py')


@pytest.fixture
def minimal_loop(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(PATH))
    yield __import__('minimal_loop')
    del sys.modules['minimal_loop']


def test_the_minimal_loop_learns(minimal_loop):
    # chance is 1 of 16 tokens
    rewards = minimal_loop.run(steps=40)
    assert np.mean(rewards[:5]) < 0.3 < 0.5 < np.mean(rewards[-5:])


def test_the_minimal_loop_fits_on_a_screen():
    with open(PATH, encoding='utf8') as file:
        text = file.read()
    tree = ast.parse(text)
    lines = text.splitlines()[tree.body[0].end_lineno :]
    assert sum(bool(line.strip()) for line in lines) <= 60


def test_the_train_loop_goes_on_where_it_stopped(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(os.path.dirname(TRAIN_LOOP))
    train_loop = importlib.import_module('train_loop')
    monkeypatch.setattr(train_loop, 'IMITATED', 3)
    straight = train_loop.run(str(tmp_path / 'straight'), steps=4)
    parts = [row for steps in (2, 4) for row in train_loop.run(str(tmp_path / 'parts'), steps=steps)]
    assert parts == straight and [row['step'] for row in straight] == [0, 1, 2, 3]
    arrays = []
    for name in ('straight', 'parts'):
        path = tmp_path / name / 'checkpoints' / '4' / '_CHECKPOINT_METADATA'
        arrays.append(json.loads(path.read_text(encoding='utf8'))['custom_metadata']['digests'])
        lines = (tmp_path / name / 'metrics.jsonl').read_text(encoding='utf8').splitlines()
        assert [json.loads(line) for line in lines] == straight
    assert arrays[0] == arrays[1] and len(arrays[0]) > 30


def test_the_train_loop_is_a_page_of_the_core_alone():
    with open(TRAIN_LOOP, encoding='utf8') as file:
        text = file.read()
    modules = [node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    core = {'algorithms', 'collect', 'learner', 'models', 'run', 'sampler', 'sharding', 'types'}
    assert {module.split('.')[1] for module in modules if module.startswith('grpo_jax.')} <= core
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 125
