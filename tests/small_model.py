"""A folder of a tiny model of characters: config and tokenizer, no weights."""

import json
import os

from grpo_jax.models import hf

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
    hf.copy_files(hf.find('configs/models/characters'), folder)
    path = os.path.join(folder, 'config.json')
    with open(path, encoding='utf8') as file:
        config = json.load(file) | SMALL
    with open(path, 'w', encoding='utf8') as file:
        json.dump(config, file)
    return str(folder)
