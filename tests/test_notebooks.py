"""The cells of each notebook run, in order, with the demo cut down."""

import json
import os

import matplotlib
import pytest

from grpo_jax import train
from grpo_jax.configs import arithmetic
from tests import tiny_run

NOTEBOOKS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'notebooks')


@pytest.mark.parametrize('name', sorted(os.listdir(NOTEBOOKS)))
def test_cells_run(name, tmp_path, monkeypatch):
    matplotlib.use('agg')
    run, small = train.run, tiny_run.config()

    def run_less(config, *arguments, **options):
        """Fewer steps than the notebook asks for, of which its cells then read."""
        config.steps, config.supervised.updates = min(config.steps, 3), 4
        return run(config, *arguments, **options)

    monkeypatch.setattr(train, 'run', run_less)
    monkeypatch.setattr(arithmetic, 'get_config', lambda preset: small)
    monkeypatch.chdir(tmp_path)
    with open(os.path.join(NOTEBOOKS, name), encoding='utf8') as file:
        cells = [''.join(c['source']) for c in json.load(file)['cells'] if c['cell_type'] == 'code']
    scope = {}
    for cell in cells:
        exec(compile(cell, name, 'exec'), scope)
    assert int(scope['state'].step) == scope['config'].steps
