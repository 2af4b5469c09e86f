"""SVAMP: short word problems with a trap, to evaluate what was learned on GSM8K, or to train on.

    python -m grpo_jax.evaluate --config=configs/svamp.py --config.model.path=FOLDER --out=runs/svamp

The data are read from GRPO_JAX_DATA/math or from the hub. Template and sizes are those of configs/gsm8k.py.
"""
import os

from grpo_jax.configs import default, gsm8k


def get_config(preset='dr_grpo'):
    """The config of gsm8k.py with 700 training problems, and 300 held-out ones."""
    config = gsm8k.get_config(preset)
    config.data.name = 'svamp'
    config.data.options = {'folder': os.path.join(default.DATA, 'math')}
    config.data.path = 'ChilleD/SVAMP'
    config.evaluation.prompts = 300
    return config
