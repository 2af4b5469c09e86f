"""The examples run, and do what they say."""

import ast
import os
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATH = os.path.join(ROOT, 'examples', 'minimal_loop.py')


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
