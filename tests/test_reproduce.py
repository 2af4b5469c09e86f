"""Configs of published runs: each can be opened, and docs/results.md has its band."""

import importlib
import os
import re

import numpy as np
import pytest

from grpo_jax import PACKAGE, statistics
from grpo_jax.run.settings import Settings

FOLDER = os.path.join(PACKAGE, 'configs', 'reproduce')
NAMES = sorted(name[:-3] for name in os.listdir(FOLDER) if name.endswith('.py') and name != '__init__.py')
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load(name):
    return importlib.import_module(f'grpo_jax.configs.reproduce.{name}')


@pytest.mark.parametrize('name', NAMES)
def test_a_published_run_is_marked_as_not_run_and_evaluates_what_is_expected(name):
    module = load(name)
    settings = Settings.from_config(module.get_config())
    assert 'Not run here' in module.__doc__
    assert settings.evaluation.prompts == module.EXPECTED['prompts']


@pytest.mark.parametrize('name', NAMES)
def test_its_band_is_the_interval_of_the_published_figure(name):
    expected = load(name).EXPECTED
    right = round(expected['after'] * expected['prompts'])
    outcomes = np.arange(expected['prompts']) < right
    low, high = statistics.share_interval(outcomes.astype(float), level=0.95)
    assert expected['band'] == pytest.approx((low, high), abs=1.1e-3)


def test_the_page_of_results_has_every_published_run_and_its_figures():
    with open(os.path.join(ROOT, 'docs', 'results.md'), encoding='utf8') as file:
        rows = dict(re.findall(r'^\| `(\w+_gsm8k)` \| (.*) \|$', file.read(), re.MULTILINE))
    assert sorted(rows) == NAMES
    for name, row in rows.items():
        expected = load(name).EXPECTED
        before = '-' if expected['before'] is None else f'{expected["before"]:.3f}'
        low, high = expected['band']
        shown = [expected['figure'], before, f'{expected["after"]:.3f}', f'{low:.3f} to {high:.3f}']
        assert row.split(' | ')[2:] == shown, name
