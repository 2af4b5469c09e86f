"""Folders of the model of small runs, without weights and with ones that are drawn."""

import json
import pathlib

import jax
import numpy as np

from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.linear import Adapted
from tests import tiny_run


def write(folder, **changes):
    """Writes the folder of a small run's model, which has no weights, and returns its path; changes: of its config."""
    hf.copy_files(tiny_run.MODEL, folder)
    if changes:
        path = pathlib.Path(folder, 'config.json')
        path.write_text(json.dumps(json.loads(path.read_text(encoding='utf8')) | changes), encoding='utf8')
    return str(folder)


def write_drawn(folder, seed, **changes):
    """Writes the folder of such a model with weights that are drawn, and returns its path."""
    source = write(f'{folder}_without_weights', **changes)
    model_config = families.load_config(source)
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(seed), model_config)
    hf.save(str(folder), source, params, model_config, np.float32)
    return str(folder)


def without_adapters(layers):
    """Stacked layers with the base in place of each Adapted: what a sampler has that does not merge."""
    return {name: w.base if isinstance(w, Adapted) else w for name, w in layers.items()}
