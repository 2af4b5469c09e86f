"""Folders of models of characters: a tiny one without weights, and the demo's with random ones."""

import json
import os

import jax
import numpy as np

from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.linear import Adapted

CHARACTERS = 'configs/models/characters'
SMALL = {
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 1,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'head_dim': 16,
    'max_position_embeddings': 160,
}


def write(folder):
    """Writes the folder and returns its path."""
    hf.copy_files(hf.find(CHARACTERS), folder)
    path = os.path.join(folder, 'config.json')
    with open(path, encoding='utf8') as file:
        config = json.load(file) | SMALL
    with open(path, 'w', encoding='utf8') as file:
        json.dump(config, file)
    return str(folder)


def write_drawn(folder, seed):
    """Writes the folder of the demo's model with weights that are drawn, and returns its path."""
    source = hf.find(CHARACTERS)
    model_config = families.load_config(source)
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(seed), model_config)
    hf.save(str(folder), source, params, model_config, np.float32)
    return str(folder)


def without_adapters(layers):
    """Stacked layers with the base in place of each Adapted: what a sampler has that does not merge."""
    return {name: w.base if isinstance(w, Adapted) else w for name, w in layers.items()}
