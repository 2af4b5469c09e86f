"""A folder of a family's tiny model of characters: the golden config, and a tokenizer; no weights."""

import json
import os

import numpy as np

from grpo_jax.models import hf

GOLDEN = os.path.join(os.path.dirname(__file__), 'golden')


def write(family, folder):
    """Writes the folder and returns its path."""
    hf.copy_files(hf.find('configs/models/characters'), folder)
    path = os.path.join(folder, 'config.json')
    with open(path, encoding='utf8') as file:
        characters = json.load(file)
    with np.load(os.path.join(GOLDEN, f'{family}.npz')) as stored:
        config = json.loads(str(stored['config']))
    shared = 'vocab_size', 'bos_token_id', 'eos_token_id', 'pad_token_id', 'max_position_embeddings'
    if 'original_max_position_embeddings' in config:  # which bounds the text as well
        config['original_max_position_embeddings'] = characters['max_position_embeddings']
    with open(path, 'w', encoding='utf8') as file:
        json.dump(config | {name: characters[name] for name in shared}, file)
    return str(folder)
